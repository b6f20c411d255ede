"""The gated delta rule, token after token, with the same bits for any number of tokens at once."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.rounding import rounded
from jgg.extend import WHOLE, Launch, Launcher, Letters, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations.delta_rule import Sizes
from jgg.models.operations.delta_rule_plain import CHUNK, delta_rule

_LANES = 32  # threads of a program, which is one warp: its sums need no other


class DeltaRuleInOrder(NamedTuple):
    """S tokens of each of B rows, and the states of a stack of layers.

    Attributes:
      q, k, v: as in DeltaRule.
      log_decay: float32 [B, S, value heads]; -inf where a token starts from a zero state.
      beta: float32 [B, S, value heads].
      states: float32 [layers, B, value heads, K, V].
      layer: int32 [], the layer of the states.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    states: jax.Array
    layer: jax.Array


class WrittenInOrder(NamedTuple):
    """What the rule gives.

    Attributes:
      y: like v.
      states: those given, of the layer those after the tokens.
      befores, corrections: the states and corrections of Written, for DELTA_RULE_BACKWARD; None if they are not kept.
    """

    y: jax.Array
    states: jax.Array
    befores: jax.Array | None
    corrections: jax.Array | None


def _types(operands: DeltaRuleInOrder, keeps: bool, **_: object) -> WrittenInOrder:
    v, states, chunks = operands.v, operands.states, Sizes.of(operands).chunks
    y = array_type(v.shape, v.dtype)
    befores = array_type((*states.shape[1:3], chunks, *states.shape[3:]), v.dtype) if keeps else None
    return WrittenInOrder(y, array_type(states.shape, states.dtype), befores, y if keeps else None)


def _plain(operands: DeltaRuleInOrder, keeps: bool, scale: float, epsilon: float) -> WrittenInOrder:
    q, k, v, log_decay, beta, states, layer = operands
    y, state, *kept = delta_rule(q, k, v, log_decay, beta, states[layer], None, scale, epsilon)
    return WrittenInOrder(y, states.at[layer].set(state), *(kept if keeps else (None, None)))


def _launch(
    launcher: Launcher, operands: DeltaRuleInOrder, keeps: bool, scale: float, epsilon: float
) -> WrittenInOrder:
    from jgg.kernels.delta_rule_in_order import delta_rule_in_order_kernel

    sizes, v, states = Sizes.of(operands), operands.v, operands.states
    tiles = tiles_of("delta_rule_in_order_kernel", launcher.target)
    block = max(16, power_of_2(sizes.features))
    columns = min(power_of_2(sizes.value_features), _LANES, max(1, tiles["elements"] // block))
    types = _types(operands, keeps)
    unkept = jax.ShapeDtypeStruct((1,), v.dtype)  # is not written, but lets one program serve all
    launch = Launch(
        # float32: loads of fewer bytes per thread are not pipelined, and each program would convert them
        operands={name: rounded(getattr(operands, name).astype(jnp.float32), v.dtype) for name in "qkv"}
        | {name: getattr(operands, name) for name in ("log_decay", "beta", "layer")}
        | {"length_and_keeps": 2 * sizes.length + keeps},  # never 1, for which Triton would compile another program
        outputs={
            "states": states,
            "y": types.y,
            "befores": unkept if types.befores is None else types.befores,
            "corrections": unkept if types.corrections is None else types.corrections,
        },
        constants=sizes.constants
        | {
            "VALUE_FEATURES": sizes.value_features,
            "SCALE": scale,
            "EPSILON": epsilon,
            "CHUNK": CHUNK,
            "BLOCK_FEATURES": block,
            "BLOCK_COLUMNS": columns,
            "LANES": min(_LANES // columns, block),
            "STAGES": tiles["stages"],
        },
        grid=(math.ceil(sizes.value_features / columns), sizes.heads, sizes.batch),
        num_warps=1,
        flops=6 * v.size * sizes.features,
        bytes_accessed=2 * 4 * v.size // sizes.length * sizes.features + 4 * (2 * operands.q.size + 2 * v.size),
    )
    written = launcher.run(delta_rule_in_order_kernel, launch)
    return WrittenInOrder(**written if keeps else {**written, "befores": None, "corrections": None})


def _letters(operands: DeltaRuleInOrder, keeps: bool, **_: object) -> Letters:
    rows = {name: "t" + WHOLE * (array.ndim - 1) for name, array in operands._asdict().items() if array.ndim}
    states = WHOLE + "t" + WHOLE * 3
    results = rows["v"], states, *(("t" + WHOLE * 4, rows["v"]) if keeps else ())
    return Letters(rows | {"states": states, "layer": ""}, results, ("",) * len(results))


DELTA_RULE_IN_ORDER: Operation[WrittenInOrder] = Operation(
    "delta_rule_in_order",
    DeltaRuleInOrder,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    mesh=_letters,
)
"""WrittenInOrder; the parameters are those of DELTA_RULE."""
