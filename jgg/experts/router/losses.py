"""Keeps the experts' loads even: auxiliary losses of the router and the update of the selection bias."""

from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, as_mask, check_integers, check_one_of, check_reals
from jgg.core.gpu_target import current_target
from jgg.core.schedule import saturated_int32
from jgg.experts.router.options import SCORES
from jgg.experts.router.routing import as_logits, as_selection_bias, compute_order, zeroed
from jgg.launching.choice import How


def load_balancing_loss(
    logits: ArrayLike,
    topk_indices: ArrayLike,
    *,
    score: str = "softmax",
    mask: ArrayLike | None = None,
    axis_name: Hashable = (),
) -> jax.Array:
    """The auxiliary loss that evens out the experts' loads.

    Computes `E * sum over e of f[e] * P[e]` with f[e] the fraction of the routed rows that go to expert e and P[e] the
    mean over tokens of the router's probability of e. It is 1 if f or P is uniform, and at most E.
    `load_balancing_loss_func` of Hugging Face Transformers is k times larger. The gradient flows through P.

    Args:
      logits: float [T, E], the router's output.
      topk_indices: integer [T, k], the expert of each choice.
      score: as in `route`: how logits become probabilities. For "sigmoid", each score is divided by the sum over
        all E experts.
      mask: bool or number [T], False or 0 for tokens to leave out, such as padding; by default all count.
      axis_name: inside `jax.shard_map`, the mesh axis or axes that split tokens; the means are over the tokens of all
        devices.

    Returns: float32 scalar, 0 if no token counts.
    Raises: ValueError, TypeError: as `route`.
    Source: Fedus et al., Switch Transformers, 2021, equations 4 to 6; for "sigmoid" DeepSeek-AI, DeepSeek-V3 Technical
      Report, 2024, equations 17 to 20, over all tokens given rather than each sequence.
    """
    logits, topk_indices = as_logits(logits), as_array("topk_indices", topk_indices)
    check_one_of("score", score, SCORES)
    num_tokens, num_experts = logits.shape
    check_integers("topk_indices", topk_indices)
    if topk_indices.ndim != 2 or topk_indices.shape[0] != num_tokens or topk_indices.shape[1] == 0:
        raise ValueError(
            f"topk_indices must be [T, k] with T equal to logits's {num_tokens} and k at least 1, "
            f"got {list(topk_indices.shape)}."
        )
    counts = as_mask(mask, "[T]", (num_tokens,))
    rows = counted_rows(topk_indices, counts, num_experts, How(None, current_target()))
    return compute_load_balancing_loss(logits, rows, counts, topk_indices.shape[1], score, axis_name)


def counted_rows(topk_indices: jax.Array, counts: jax.Array | None, num_experts: int, how: How) -> jax.Array:
    """Rows per expert, int32 [E], from tokens that count; topk_indices is [T, k], counts bool [T] or None for all."""
    # the rows of tokens left out go past every group
    experts = topk_indices if counts is None else jnp.where(counts[:, None], saturated_int32(topk_indices), -1)
    return compute_order(experts, num_experts, how)[0]


def compute_load_balancing_loss(
    logits: jax.Array, rows: jax.Array, counts: jax.Array | None, topk: int, score: str, axis_name: Hashable
) -> jax.Array:
    """`load_balancing_loss` for checked arguments.

    Args:
      rows: int32 [E], rows per expert, from tokens that count.
      counts: bool [T], which tokens count; None for all.
    """
    logits = zeroed(logits.astype(jnp.float32), counts)
    # the softmax of the sigmoids' logarithms is each sigmoid divided by the sum of all
    probabilities = jax.nn.softmax(jax.nn.log_sigmoid(logits) if score == "sigmoid" else logits)
    sums = rows, _number_of(counts, logits), jnp.sum(zeroed(probabilities, counts), axis=0)
    rows, num_counted, probabilities = jax.lax.psum(sums, axis_name)
    num_counted = jnp.maximum(num_counted, 1).astype(jnp.float32)
    loads = rows.astype(jnp.float32) / (num_counted * topk)
    mean_probabilities = probabilities / num_counted
    return logits.shape[1] * jnp.sum(loads * mean_probabilities)


def router_z_loss(logits: ArrayLike, *, mask: ArrayLike | None = None, axis_name: Hashable = ()) -> jax.Array:
    """The auxiliary loss that keeps the router's logits small: the mean over tokens of logsumexp(logits) squared.

    Args:
      logits: float [T, E], the router's output.
      mask, axis_name: as in `load_balancing_loss`.

    Returns: float32 scalar, 0 if no token counts.
    Raises: ValueError, TypeError: as `route`.
    Source: Zoph et al., ST-MoE: Designing Stable and Transferable Sparse Expert Models, 2022, equation 5.
    """
    logits = as_logits(logits)
    return compute_router_z_loss(logits, as_mask(mask, "[T]", logits.shape[:1]), axis_name)


def compute_router_z_loss(logits: jax.Array, counts: jax.Array | None, axis_name: Hashable) -> jax.Array:
    """`router_z_loss` for checked arguments; counts: bool [T], which tokens count, or None for all."""
    logits = zeroed(logits.astype(jnp.float32), counts)
    squares = zeroed(jnp.square(jax.nn.logsumexp(logits, axis=-1)), counts)
    total, num_counted = jax.lax.psum((jnp.sum(squares), _number_of(counts, logits)), axis_name)
    return total / jnp.maximum(num_counted, 1).astype(jnp.float32)


def update_selection_bias(selection_bias: ArrayLike, group_sizes: ArrayLike, rate: ArrayLike) -> jax.Array:
    """Adds `rate` to the bias of experts with fewer rows than the mean, and subtracts it for experts with more.

    Computes `selection_bias + rate * sign(mean(group_sizes) - group_sizes)`. Call it after each training step. It
    balances load without an auxiliary loss.

    Args:
      selection_bias: float [E], as `route` takes it; float32, since a narrower one loses small steps.
      group_sizes: integer [E], rows per expert in one or several steps, summed over devices (`jax.lax.psum`) if each
        has its own tokens. Their sum may exceed what the dtype can hold.
      rate: number or scalar array, 0.001 in DeepSeek-V3.

    Returns: [E] in the dtype of selection_bias.
    Raises: ValueError: a shape is wrong. TypeError: a dtype is wrong.
    Source: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts, 2024, algorithm 1;
      DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 2.1.2.
    """
    group_sizes, rate = as_array("group_sizes", group_sizes), as_array("rate", rate)
    check_integers("group_sizes", group_sizes)
    check_reals("rate", rate)
    if group_sizes.ndim != 1 or group_sizes.shape[0] == 0:
        raise ValueError(f"group_sizes must be [E], 1-dimensional and not empty, got {list(group_sizes.shape)}.")
    selection_bias = as_selection_bias(selection_bias, group_sizes.shape[0])
    if rate.ndim:
        raise ValueError(f"rate must be a scalar, got {list(rate.shape)}.")
    signs = _signs_of_mean_minus(group_sizes)
    return selection_bias + rate.astype(selection_bias.dtype) * signs.astype(selection_bias.dtype)


def _signs_of_mean_minus(counts: jax.Array) -> jax.Array:
    """The sign of mean(counts) - counts, exact for all counts of up to 46,340 experts, even if their sum overflows."""
    counts = counts.astype(jnp.int32) if jnp.iinfo(counts.dtype).bits < 32 else counts
    num_experts = jnp.array(len(counts), counts.dtype)
    # The sum is num_experts * sum(quotients) + sum(remainders). The sum of the quotients may wrap around, but then the
    # mean wraps back, since it lies between the smallest and the largest count.
    quotients, remainders = (jnp.sum(part, dtype=counts.dtype) for part in jnp.divmod(counts, num_experts))
    carry, rest = jnp.divmod(remainders, num_experts)
    mean = quotients + carry  # rounded down by rest / num_experts
    is_below = jnp.where(counts == mean, rest > 0, counts < mean)
    return is_below.astype(jnp.int32) - (counts > mean).astype(jnp.int32)


def _number_of(counts: jax.Array | None, logits: jax.Array) -> jax.Array:
    """The number of tokens that count, int32."""
    return jnp.sum(jnp.ones(logits.shape[:1], bool) if counts is None else counts, dtype=jnp.int32)
