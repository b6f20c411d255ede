"""The gated delta rule, which recurrent layers compute for a sequence or for a token."""

import jax

from jgg.products.plain import delta_rule as plain

EPSILON = 1e-6


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
) -> tuple[jax.Array, jax.Array]:
    """Results and last states of B rows of S tokens; differentiable, and right for any S, 0 and 1 among them.

    q and k are normalized first, each head's features x as x / sqrt(sum(x ** 2) + epsilon). Value heads that follow
    each other share a key head. A head's state S [K, V] then takes the tokens one after the other:

        S = exp(log_decay) S;    S = S + beta k (v - k^T S)^T;    y = scale q^T S

    A token with log_decay 0 and beta 0 leaves the state as it is.

    Args:
      q, k: [B, S, key heads, K], not normalized.
      v: [B, S, value heads, V], in the dtype of q.
      log_decay: float32 [B, S, value heads], finite and at most 0.
      beta: float32 [B, S, value heads], from 0 to 2.
      state: float32 [B, value heads, K, V], the states before the first tokens; None for zeros.
      resets: bool [B, S], the tokens before which the state becomes zero, as the first of each packed sequence; None
        for none.
      scale: the factor of the results.
      epsilon: what is added to the sums of squares.
      implementation: of `jgg.launching.choice.NAMES`, or None.

    Returns: (y [B, S, value heads, V] in the dtype of v, the states after the last tokens, float32 [B, value heads, K,
      V]).

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464.
    """
    return plain.delta_rule(q, k, v, log_decay, beta, state, resets, scale, epsilon)
