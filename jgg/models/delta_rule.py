"""The gated delta rule, which recurrent layers compute for a sequence or for a token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.manual_axes import alike
from jgg.extend import How
from jgg.models.norms import how_of_rows
from jgg.models.operations import delta_rule_plain as plain
from jgg.models.operations.delta_rule import DELTA_RULE, DeltaRule, Written
from jgg.models.operations.delta_rule_backward import DELTA_RULE_BACKWARD, DeltaRuleBackward
from jgg.models.operations.delta_rule_in_order import DELTA_RULE_IN_ORDER, DeltaRuleInOrder
from jgg.models.operations.delta_rule_one import DELTA_RULE_ONE, DeltaRuleOne

EPSILON = 1e-6
RESULT, STATES = "jgg_delta_rule", "jgg_delta_rule_states"  # what it names, for a policy of `jax.checkpoint`


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    state: jax.Array | None = None,
    resets: jax.Array | None = None,
    scale: float,
    epsilon: float = EPSILON,
    implementation: str | None = None,
    in_order: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Results and last states of B rows of S tokens; differentiable, and correct for any S, including 0 and 1.

    q and k are normalized first, each head's features x as x / sqrt(sum(x ** 2) + epsilon). Consecutive
    value heads share a key head. A head's state S [K, V] then takes the tokens one by one:

        S = exp(log_decay) S;    S = S + beta k (v - k^T S)^T;    y = scale q^T S

    A token with log_decay 0 and beta 0 leaves the state unchanged.

    Args:
      q, k: [B, S, key heads, K], not normalized.
      v: [B, S, value heads, V], in the dtype of q.
      log_decay: float32 [B, S, value heads], finite and at most 0.
      beta: float32 [B, S, value heads], from 0 to 2.
      state: float32 [B, value heads, K, V], the states before the first tokens; None for zeros.
      resets: bool [B, S], the tokens that start from a zero state, such as the first of each packed sequence; None
        for none.
      scale: the factor of the results.
      epsilon: what is added to the sums of squares.
      implementation: "triton", "xla", "interpret" or None.
      in_order: whether kernels compute a token's result with the bits of `delta_rule_in_order`.

    Returns: (y [B, S, value heads, V] in the dtype of v, the states after the last tokens, float32 [B, value heads, K,
      V]).

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464.
    """
    how = how_of_rows(implementation)
    if how is None:
        return plain.delta_rule(q, k, v, log_decay, beta, state, resets, scale, epsilon)[:2]
    operands = DeltaRule(*alike((q, k, v, log_decay, beta, state, resets)))
    return _differentiable(_Options(how, scale, epsilon, in_order), operands)


def delta_rule_one(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    *,
    scale: float,
    epsilon: float = EPSILON,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` for one token per sequence; a kernel updates the states of a stack of layers in place.

    Args:
      q, k, v, log_decay, beta: as in `delta_rule`, without the axis of S.
      states: float32 [layers, B, value heads, K, V].
      layer: int32 [], the layer whose states are read and updated.
      scale, epsilon, implementation: as in `delta_rule`.

    Returns: (y [B, value heads, V] in the dtype of v, the states).
    """
    operands = DeltaRuleOne(q, k, v, log_decay, beta, states, jnp.asarray(layer, jnp.int32))
    y, states = DELTA_RULE_ONE(how_of_rows(implementation), operands, scale=scale, epsilon=epsilon)
    return y, states


def delta_rule_in_order(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    states: jax.Array,
    layer: jax.Array,
    *,
    scale: float,
    epsilon: float = EPSILON,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` for S tokens after the states of a stack of layers, which a kernel updates in place.

    A token's result and the states have the same bits however many tokens are computed at once.

    Args:
      q, k, v, log_decay, beta, scale, epsilon, implementation: as in `delta_rule`.
      states, layer: as in `delta_rule_one`.

    Returns: (y [B, S, value heads, V] in the dtype of v, the states).
    """
    operands = DeltaRuleInOrder(q, k, v, log_decay, beta, states, jnp.asarray(layer, jnp.int32))
    how = how_of_rows(implementation)
    return DELTA_RULE_IN_ORDER(how, operands, keeps=False, scale=scale, epsilon=epsilon)[:2]


class _Options(NamedTuple):
    """The static argument of the custom_vjp."""

    how: How
    scale: float
    epsilon: float
    in_order: bool


type _Kept = tuple[DeltaRule, list[jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(options: _Options, operands: DeltaRule) -> tuple[jax.Array, jax.Array]:
    return _written(options, operands, keeps=False)[:2]


def _written(options: _Options, operands: DeltaRule, keeps: bool) -> Written:
    how, scale, epsilon, in_order = options
    if not in_order:
        return DELTA_RULE(how, operands, keeps=keeps, scale=scale, epsilon=epsilon)
    q, k, v, log_decay, beta, state, resets = operands
    if state is None:
        zeros = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
        state, _ = alike((zeros, v))
    if resets is not None:
        log_decay = jnp.where(resets[..., None], -jnp.inf, log_decay)
    in_stack = DeltaRuleInOrder(q, k, v, log_decay, beta, state[None], jnp.int32(0))
    y, states, *kept = DELTA_RULE_IN_ORDER(how, in_stack, keeps=keeps, scale=scale, epsilon=epsilon)
    return Written(y, states[0], *kept)


def _forward(options: _Options, operands: DeltaRule) -> tuple[tuple[jax.Array, jax.Array], _Kept]:
    y, last_state, *kept = _written(options, operands, keeps=True)
    return (checkpoint_name(y, RESULT), last_state), (operands, checkpoint_name(kept, STATES))


def _backward(options: _Options, kept: _Kept, gradients: tuple[jax.Array, jax.Array]) -> tuple[DeltaRule]:
    how, scale, epsilon, _ = options
    operands, (states, corrections) = kept
    with_gradients = DeltaRuleBackward(
        **operands._asdict(), states=states, corrections=corrections, dy=gradients[0], d_last_state=gradients[1]
    )
    results = DELTA_RULE_BACKWARD(how, with_gradients, scale=scale, epsilon=epsilon)
    d_state = None if operands.state is None else results.d_state
    return (DeltaRule(*results[:5], state=d_state, resets=None),)


_differentiable.defvjp(_forward, _backward)
