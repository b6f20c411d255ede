"""The gradients of the gated delta rule, from the states that it kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations.attend import precision_of
from jgg.models.operations.delta_rule import Sizes, chunk_matrices, kernels_take, over_chunks
from jgg.models.operations.delta_rule_plain import CHUNK, delta_rule


class DeltaRuleBackward(NamedTuple):
    """What DELTA_RULE had and kept, and the gradients of its results.

    Attributes:
      q, k, v, log_decay, beta, state, resets: as in DeltaRule.
      states, corrections: as in Written.
      dy: the gradient of y, in its dtype.
      d_last_state: the gradient of last_state, float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    state: jax.Array | None
    resets: jax.Array | None
    states: jax.Array
    corrections: jax.Array
    dy: jax.Array
    d_last_state: jax.Array


class DeltaRuleGradients(NamedTuple):
    """The gradients of a DeltaRule's arrays, each in its array's shape and dtype; d_state for a state of zeros too."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array
    d_log_decay: jax.Array
    d_beta: jax.Array
    d_state: jax.Array


def _types(operands: DeltaRuleBackward, **_: object) -> DeltaRuleGradients:
    like = *operands[:5], operands.d_last_state
    return DeltaRuleGradients(*(array_type(array.shape, array.dtype) for array in like))


def _plain(operands: DeltaRuleBackward, scale: float, epsilon: float) -> DeltaRuleGradients:
    state = jnp.zeros_like(operands.d_last_state) if operands.state is None else operands.state

    def rule(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        state: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        return delta_rule(q, k, v, log_decay, beta, state, operands.resets, scale, epsilon)[:2]

    _, vjp = jax.vjp(rule, *operands[:5], state)
    return DeltaRuleGradients(*vjp((operands.dy, operands.d_last_state)))


def _launch(launcher: Launcher, operands: DeltaRuleBackward, scale: float, epsilon: float) -> DeltaRuleGradients:
    if not kernels_take(launcher, operands):
        return _plain(operands, scale, epsilon)
    matrices = chunk_matrices(launcher, operands, False, scale, epsilon)
    of_states = _of_states(launcher, operands, matrices)
    d_state = of_states.pop("d_state")
    return DeltaRuleGradients(**_of_operands(launcher, operands, of_states, scale, epsilon), d_state=d_state)


def _of_states(launcher: Launcher, operands: DeltaRuleBackward, matrices: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The gradients of the first states and of those after each chunk, and dx as `kernels.delta_rule_backward` says."""
    from jgg.kernels.delta_rule_backward import delta_rule_backward_kernel

    sizes, dtype = Sizes.of(operands), operands.q.dtype
    names = "q", "k", "dy", "d_last_state"
    outputs = {
        "dx": array_type(operands.v.shape, dtype),
        "d_states": array_type(operands.states.shape, dtype),
        "d_state": array_type(operands.d_last_state.shape, jnp.float32),
    }
    launch = Launch(
        operands={name: getattr(operands, name) for name in names}
        | matrices
        | {"length": sizes.length, "chunks": sizes.chunks},
        outputs=outputs,
        flops=2 * operands.v.size * (3 * sizes.features + 2 * CHUNK),
        bytes_accessed=(2 * operands.q.size + 2 * operands.v.size + operands.states.size) * dtype.itemsize,
        **over_chunks(launcher, sizes, dtype),
    )
    return launcher.run(delta_rule_backward_kernel, launch)


def _of_operands(
    launcher: Launcher, operands: DeltaRuleBackward, others: dict[str, jax.Array], scale: float, epsilon: float
) -> dict[str, jax.Array]:
    from jgg.kernels.delta_rule_backward import delta_rule_gradients_kernel

    tiles = tiles_of("delta_rule_gradients_kernel", launcher.target)
    sizes, dtype = Sizes.of(operands), operands.q.dtype
    names = "q", "k", "log_decay", "beta", "resets", "states", "corrections", "dy"
    launch = Launch(
        operands={name: getattr(operands, name) for name in names} | others | {"length": sizes.length},
        outputs={name: kind for name, kind in _types(operands)._asdict().items() if name != "d_state"},
        constants=sizes.constants
        | {
            "VALUE_FEATURES": sizes.value_features,
            "SCALE": scale,
            "EPSILON": epsilon,
            "PRECISION": precision_of(dtype),
            "CHUNK": CHUNK,
            # not all columns of small heads at once, for which compute capability 8.9 lacks registers
            "BLOCK_COLUMNS": min(tiles["columns"], max(16, power_of_2(sizes.value_features) // 2)),
        },
        grid=(sizes.chunks, sizes.key_heads, sizes.batch),
        num_warps=tiles["warps"],
        num_stages=tiles["stages"],
        flops=2 * operands.v.size * (4 * sizes.features + 8 * CHUNK),
        bytes_accessed=(4 * operands.q.size + 4 * operands.v.size + 2 * operands.states.size) * dtype.itemsize,
    )
    return launcher.run(delta_rule_gradients_kernel, launch)


DELTA_RULE_BACKWARD: Operation[DeltaRuleGradients] = Operation(
    "delta_rule_backward",
    DeltaRuleBackward,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    mesh="rows",
)
"""DeltaRuleGradients; the parameters are DELTA_RULE's scale and epsilon."""
