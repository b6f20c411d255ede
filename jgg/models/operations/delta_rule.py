"""The gated delta rule: sequences that each head writes into a state, chunk after chunk, and its gradients."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations.attend import precision_of
from jgg.models.operations.delta_rule_plain import CHUNK, delta_rule

_LARGEST_HEAD = 128  # features of a head that kernels take
_FACTORS = 4  # of each token; `kernels.delta_rule` names them
_LEVELS = CHUNK.bit_length() - 1
_REGISTERS = 168  # of a thread that computes a chunk's matrices


class DeltaRule(NamedTuple):
    """S tokens of each of B rows; value heads that follow each other share a key head.

    Attributes:
      q, k: [B, S, key heads, K], not normalized.
      v: [B, S, value heads, V], in the dtype of q.
      log_decay, beta: float32 [B, S, value heads].
      state: float32 [B, value heads, K, V], before the first tokens; None for zeros.
      resets: bool [B, S], the tokens before which the state becomes zero; None for none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    state: jax.Array | None
    resets: jax.Array | None


class Written(NamedTuple):
    """What the rule gives.

    Attributes:
      y: [B, S, value heads, V] in the dtype of v.
      last_state: float32 [B, value heads, K, V].
      states: [B, value heads, chunks of 64 tokens, K, V] in the dtype of v, those before each chunk.
      corrections: like v, the difference between each token's v and what its k recalls.
        Both are for DELTA_RULE_BACKWARD; None if they are not kept.
    """

    y: jax.Array
    last_state: jax.Array
    states: jax.Array | None
    corrections: jax.Array | None


class Sizes(NamedTuple):
    """The sizes of a problem."""

    batch: int
    length: int
    key_heads: int
    features: int
    heads: int
    value_features: int

    @classmethod
    def of(cls, operands: Any) -> "Sizes":
        """The sizes of operands that have k and v."""
        return cls(*operands.k.shape, *operands.v.shape[2:])

    @property
    def chunks(self) -> int:
        """The number of chunks of a row; the last may have fewer tokens."""
        return math.ceil(self.length / CHUNK)

    @property
    def constants(self) -> dict[str, int]:
        """What all kernels take."""
        return {
            "KEY_HEADS": self.key_heads,
            "GROUP": self.heads // self.key_heads,
            "FEATURES": self.features,
            "BLOCK_FEATURES": max(16, power_of_2(self.features)),
        }


def kernels_take(launcher: Launcher, operands: Any) -> bool:
    """Whether kernels take such heads; GPUs have no registers for such products of float32."""
    fits = max(operands.k.shape[3], operands.v.shape[3]) <= _LARGEST_HEAD
    return fits and (launcher.target.is_interpreted or operands.q.dtype != jnp.float32)


def _types(operands: DeltaRule, keeps: bool, **_: object) -> Written:
    sizes, v = Sizes.of(operands), operands.v
    state = sizes.batch, sizes.heads, sizes.features, sizes.value_features
    states = array_type((*state[:2], sizes.chunks, *state[2:]), v.dtype) if keeps else None
    corrections = array_type(v.shape, v.dtype) if keeps else None
    return Written(array_type(v.shape, v.dtype), array_type(state, jnp.float32), states, corrections)


def _plain(operands: DeltaRule, keeps: bool, scale: float, epsilon: float) -> Written:
    y, last_state, *kept = delta_rule(*operands, scale=scale, epsilon=epsilon)
    return Written(y, last_state, *(kept if keeps else (None, None)))


def chunk_matrices(
    launcher: Launcher, operands: Any, by_column: bool, scale: float, epsilon: float
) -> dict[str, jax.Array]:
    """What the states do not decide, of all chunks: inverses, weights, factors and totals, as the kernel says."""
    from jgg.kernels.delta_rule import chunk_matrices_kernel

    sizes, dtype = Sizes.of(operands), operands.q.dtype
    of_chunks = sizes.batch, sizes.heads, sizes.chunks
    matrices = jax.ShapeDtypeStruct((*of_chunks, CHUNK, CHUNK), dtype)
    names = "q", "k", "log_decay", "beta", "resets"
    launch = Launch(
        operands={name: getattr(operands, name) for name in names} | {"length": sizes.length},
        outputs={
            "inverses": matrices,
            "weights": matrices,
            "factors": jax.ShapeDtypeStruct((*of_chunks[:2], _FACTORS, sizes.chunks * CHUNK), jnp.float32),
            "totals": jax.ShapeDtypeStruct(of_chunks, jnp.float32),
        },
        constants=sizes.constants
        | {
            "SCALE": scale,
            "EPSILON": epsilon,
            "PRECISION": precision_of(dtype),
            "LEVELS": _LEVELS,
            "BY_COLUMN": by_column,
        },
        grid=(sizes.heads, sizes.chunks, sizes.batch),
        num_warps=tiles_of("chunk_matrices_kernel", launcher.target)["warps"],
        max_registers=_REGISTERS,
        flops=4 * matrices.size * (sizes.features + CHUNK * _LEVELS),
        bytes_accessed=2 * (operands.q.size + matrices.size) * dtype.itemsize,
    )
    return launcher.run(chunk_matrices_kernel, launch)


def over_chunks(launcher: Launcher, sizes: Sizes, dtype: DTypeLike) -> dict[str, Any]:
    """The fields of a Launch whose programs take a head's chunks one after the other, for some columns of its state."""
    tiles = tiles_of("delta_rule_kernel", launcher.target)
    columns = min(tiles["columns"], max(16, power_of_2(sizes.value_features)))
    return {
        "constants": sizes.constants
        | {
            "VALUE_FEATURES": sizes.value_features,
            "PRECISION": precision_of(dtype),
            "CHUNK": CHUNK,
            "BLOCK_COLUMNS": columns,
        },
        "grid": (math.ceil(sizes.value_features / columns), sizes.heads, sizes.batch),
        "num_warps": tiles["warps"],
        "num_stages": tiles["stages"],
    }


def _launch(launcher: Launcher, operands: DeltaRule, keeps: bool, scale: float, epsilon: float) -> Written:
    from jgg.kernels.delta_rule import delta_rule_kernel

    sizes, dtype = Sizes.of(operands), operands.q.dtype
    if not kernels_take(launcher, operands):
        return _plain(operands, keeps, scale, epsilon)
    matrices = chunk_matrices(launcher, operands, True, scale, epsilon)
    types = {name: kind for name, kind in _types(operands, keeps)._asdict().items() if kind is not None}
    launch = Launch(
        operands={"q": operands.q, "k": operands.k, "v": operands.v, **matrices, "state": operands.state}
        | {"length": sizes.length, "chunks": sizes.chunks}
        | dict.fromkeys({"states", "corrections"} - types.keys()),
        outputs=types,
        flops=2 * operands.v.size * (3 * sizes.features + 2 * CHUNK),
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in (operands.q, *operands[:3], types["y"])),
        **over_chunks(launcher, sizes, dtype),
    )
    results = launcher.run(delta_rule_kernel, launch)
    return Written(results["y"], results["last_state"], results.get("states"), results.get("corrections"))


DELTA_RULE: Operation[Written] = Operation(
    "delta_rule",
    DeltaRule,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    mesh="rows",
)
"""Written; the parameters are `keeps`, whether states are kept, `scale`, the factor of the results, and `epsilon`,
which is added to the sums of squares when q and k are normalized."""
