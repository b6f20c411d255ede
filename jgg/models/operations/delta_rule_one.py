"""The gated delta rule for one new token of each sequence, which updates a cache of states."""

import math
from typing import NamedTuple

import jax

from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of
from jgg.models.operations.delta_rule_plain import delta_rule


class DeltaRuleOne(NamedTuple):
    """One token of each of B sequences, and the states of a stack of layers.

    Attributes:
      q, k: [B, key heads, K], not normalized.
      v: [B, value heads, V], in the dtype of q.
      log_decay, beta: float32 [B, value heads].
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


class WrittenOne(NamedTuple):
    """The result [B, value heads, V] in the dtype of v, and the states, those of the layer after the token."""

    y: jax.Array
    states: jax.Array


def _types(operands: DeltaRuleOne, scale: float, epsilon: float) -> WrittenOne:
    return WrittenOne(*(array_type(array.shape, array.dtype) for array in (operands.v, operands.states)))


def _plain(operands: DeltaRuleOne, scale: float, epsilon: float) -> WrittenOne:
    *of_token, states, layer = operands
    q, k, v, log_decay, beta = (array[:, None] for array in of_token)
    y, state, *_ = delta_rule(q, k, v, log_decay, beta, states[layer], None, scale, epsilon)
    return WrittenOne(y[:, 0], states.at[layer].set(state))


def _launch(launcher: Launcher, operands: DeltaRuleOne, scale: float, epsilon: float) -> WrittenOne:
    from jgg.kernels.delta_rule_one import delta_rule_one_kernel

    (batch, key_heads, features), (heads, value_features) = operands.k.shape, operands.v.shape[1:]
    block_features = power_of_2(features)
    elements = tiles_of("delta_rule_one_kernel", launcher.target)["elements"]
    columns = min(power_of_2(value_features), max(1, elements // block_features))
    launch = Launch(
        operands=operands._asdict(),
        outputs={"states": operands.states, "y": _types(operands, scale, epsilon).y},
        constants={
            "KEY_HEADS": key_heads,
            "GROUP": heads // key_heads,
            "FEATURES": features,
            "VALUE_FEATURES": value_features,
            "SCALE": scale,
            "EPSILON": epsilon,
            "BLOCK_FEATURES": block_features,
            "BLOCK_COLUMNS": columns,
        },
        grid=(math.ceil(value_features / columns), heads, batch),
        flops=6 * batch * heads * features * value_features,
        bytes_accessed=2 * 4 * batch * heads * features * value_features,
    )
    return WrittenOne(**launcher.run(delta_rule_one_kernel, launch))


DELTA_RULE_ONE: Operation[WrittenOne] = Operation(
    "delta_rule_one",
    DeltaRuleOne,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    vmap="several",
)
"""WrittenOne; the parameters are DELTA_RULE's scale and epsilon."""
