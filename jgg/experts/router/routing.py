"""From router logits to rows sorted by expert."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgg.core.arguments import (
    as_array,
    as_int,
    check_floats,
    check_integers,
    check_rank,
)
from jgg.core.gpu_target import current_target
from jgg.core.schedule import saturated_int32
from jgg.experts.router.options import RouterOptions
from jgg.experts.router.weights import weigh
from jgg.launching.choice import How, check_implementation
from jgg.products.route_few import ROUTE_FEW, Routed, RouteFew, are_few
from jgg.products.score import SCORE, Score
from jgg.products.sort import SORT, Sort
from jgg.products.top_k import TOP_K, TopK


class Routing(NamedTuple):
    """The experts that each token goes to, and the order that sorts the rows by expert.

    Attributes:
      topk_weights: float32 [T, k], the weight of each choice.
      topk_indices: int32 [T, k], the expert of each choice; outside [0, E) for a choice without an expert.
      group_sizes: int32 [E], rows of each expert.
      gather_indices: int32 [M], for each row in expert order its position t * k + j in token order. None means
        that k is 1 and the tokens are in expert order already.
    """

    topk_weights: jax.Array
    topk_indices: jax.Array
    group_sizes: jax.Array
    gather_indices: jax.Array | None


def route(
    logits: ArrayLike,
    topk: int,
    *,
    score: str = "softmax",
    normalize: bool | None = None,
    scale: float = 1.0,
    selection_bias: ArrayLike | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
    scores_per_group: int | None = None,
    topk_indices: ArrayLike | None = None,
    implementation: str | None = None,
) -> Routing:
    """Chooses each token's experts and sorts the rows by expert.

    Each token takes the k experts with the highest score (plus `selection_bias`, if given). Ties go to the lower expert
    index. The weights are the scores without the bias; `normalize` divides them by their sum; `scale` multiplies them.
    All of this is computed in float32. The routers of published models:

        Mixtral, gpt-oss, Granite-MoE   score="topk_softmax"
        Qwen3-MoE                       (the defaults)
        Switch Transformer              (the defaults, with k = 1)
        OLMoE                           normalize=False
        DeepSeek-V2                     normalize=False, scale, num_groups, topk_groups
        Qwen1.5-MoE                     normalize=False
        ERNIE 4.5                       selection_bias
        DeepSeek-V3, Kimi-K2, GLM-4.5   score="sigmoid", scale, selection_bias, num_groups, topk_groups
        MiniMax-M2, Hunyuan V3          score="sigmoid", scale, selection_bias
        Gemma 4                         (the defaults); with MoELayer(use_router_scale=True) and another router_x
        Llama-4                         score="sigmoid", normalize=False; with MoELayer(scale_input=True),
                                        because the weights scale x before the first GEMM

    Args:
      logits: float [T, E], the router's output.
      topk: k, experts per token.
      score: "softmax" over all experts; "topk_softmax": the k highest logits are chosen, and the softmax is over these
        k; "sigmoid" of each logit.
      normalize: divide a token's k scores by their sum, for "sigmoid" their sum plus 1e-20. None divides if k > 1.
        With k = 1 a divided weight is always 1, so the logits get no gradient from it; None then keeps the score, as
        Switch Transformer does. "topk_softmax" weights always sum to 1, even with k = 1, so normalize=False is an
        error.
      scale: finite number that multiplies the weights.
      selection_bias: float [E], added to the scores to choose experts and groups; it gets no gradient. See
        `update_selection_bias`.
      num_groups: groups of E / num_groups consecutive experts each.
      topk_groups: number of groups that a token may take experts from: the groups with the highest group score, which
        is the sum of the group's `scores_per_group` highest scores, each plus its `selection_bias`. For "topk_softmax"
        these scores are the logits.
      scores_per_group: how many scores rank a group, at most E / num_groups. By default two for "sigmoid", as in
        DeepSeek-V3, else one, as in DeepSeek-V2. Megatron Core and Transformer Engine take k // topk_groups.
      topk_indices: integer [T, k], experts to use instead of the router's choice, for example to replay the choices of
        another router; None if the router makes all choices. -1 leaves a choice to the router: it takes the k experts
        that it would choose without topk_indices, skips those that the token is already given, and replaces the -1s by
        the best of the rest, in order. These stay within the router's groups; given experts may be in any group. The
        options above turn the logits of the experts used into weights. An expert given to a token twice has two rows,
        each with its weight. A choice with an index outside [-1, E) has no expert: its weight is 0, normalization
        leaves it out, and it adds nothing in `moe_mlp`.
      implementation: how to choose, weigh and sort, as in `grouped_gemm`. All implementations choose the same experts
        for the same scores; weights may differ in their last bits. With kernels, no bit of a token's choices and
        weights depends on the other tokens.

    Returns:
      a Routing, differentiable in logits through topk_weights. A NaN logit ranks as +infinity: its expert is chosen
      and its weight is NaN. ("softmax" with a selection_bias is the exception: there all scores of the token are
      NaN, which is a tie.) The k experts of the token are still distinct.

    Raises:
      ValueError: a shape or an option is wrong; the message names the argument, what it expected and what it got.
      TypeError: logits or selection_bias is not a float array, topk_indices is not an integer array, or an option is
        not a number or flag.
    """
    logits = as_logits(logits)
    num_experts = logits.shape[1]
    options = RouterOptions.checked(
        num_experts,
        topk=topk,
        score=score,
        normalize=normalize,
        scale=scale,
        num_groups=num_groups,
        topk_groups=topk_groups,
        scores_per_group=scores_per_group,
    )
    if selection_bias is not None:
        selection_bias = as_selection_bias(selection_bias, num_experts)
    if topk_indices is not None:
        topk_indices = as_given_choices(topk_indices, "[T, k]", (logits.shape[0], options.topk))
    check_implementation(implementation)
    return compute_routing(logits, selection_bias, topk_indices, How(implementation, current_target()), options)


def compute_routing(
    logits: jax.Array,
    selection_bias: jax.Array | None,
    given: jax.Array | None,
    how: How,
    options: RouterOptions,
) -> Routing:
    """`route` for checked arguments; its topk_indices are `given`."""
    logits = logits.astype(jnp.float32)
    fixed = jax.lax.stop_gradient(logits)
    if selection_bias is None and given is None and options.takes_every_group and are_few(logits, how):
        choices = ROUTE_FEW(how, RouteFew(fixed), topk=options.topk)
    else:
        if selection_bias is not None:
            selection_bias = jax.lax.stop_gradient(selection_bias).astype(jnp.float32)
        topk_indices = _choose(fixed, selection_bias, options, how)
        if given is not None:
            topk_indices = _replace_given(topk_indices, saturated_int32(given))
        choices = Routed(topk_indices, *compute_order(topk_indices, logits.shape[1], how))
    topk_weights = weigh(
        logits,
        choices.topk_indices,
        how,
        score=options.score,
        normalize=options.normalize,
        scale=options.scale,
        all_are_experts=given is None,
    )
    return Routing(topk_weights, *choices)


def _choose(logits: jax.Array, selection_bias: jax.Array | None, options: RouterOptions, how: How) -> jax.Array:
    """The experts of each token, int32 [T, k], the highest biased score first."""
    top_k, score = functools.partial(_top_k, how=how), options.score
    if selection_bias is None:
        ranks = logits  # logits rank as scores do, but rounding makes some scores equal
    elif score == "topk_softmax":
        ranks = logits + selection_bias[None, :]
    else:
        ranks = SCORE(how, Score(logits, selection_bias), score=score)
    if options.takes_every_group:
        return top_k(ranks, options.topk)
    num_tokens, num_experts = logits.shape
    group_size = num_experts // options.num_groups
    grouped = (num_tokens, options.num_groups, group_size)
    are_scores = selection_bias is not None or score == "topk_softmax"
    num_scores = options.scores_per_group or min(2 if score == "sigmoid" else 1, group_size)
    if num_scores == 1 and score != "sigmoid":
        group_scores = jnp.max(ranks.reshape(grouped), axis=-1)
    else:
        scores = (ranks if are_scores else SCORE(how, Score(logits), score=score)).reshape(grouped)
        group_scores = _sum_of_best(scores, top_k(scores, num_scores))
    # The eligible experts are gathered, since no value that masks the others is lower than every score. Groups
    # are in ascending order, so that among equal scores the lower index still comes first.
    groups = jnp.sort(top_k(group_scores, options.topk_groups), axis=-1)  # [T, topk_groups]
    eligible = jnp.take_along_axis(ranks.reshape(grouped), groups[:, :, None], axis=1)
    chosen = top_k(eligible.reshape(num_tokens, options.topk_groups * group_size), options.topk)
    return jnp.take_along_axis(groups, chosen // group_size, axis=1) * group_size + chosen % group_size


def _sum_of_best(scores: jax.Array, best: jax.Array) -> jax.Array:
    """The sum of the scores [..., E] at indices [..., n], in a fixed order; XLA's is fixed only for two numbers."""
    found = jnp.take_along_axis(scores, best, axis=-1)
    others = (found[..., place] for place in range(2, found.shape[-1]))
    return sum(others, start=jnp.sum(found[..., :2], axis=-1))


def _top_k(scores: jax.Array, k: int, how: How) -> jax.Array:
    """Indices [..., k] of the highest scores; among equals the lower index comes first, and NaN counts as infinity."""
    rows = jax.lax.stop_gradient(scores).reshape(math.prod(scores.shape[:-1]), scores.shape[-1])
    indices = TOP_K(how, TopK(rows), topk=k)
    return indices.reshape(*scores.shape[:-1], k)


def _replace_given(own: jax.Array, given: jax.Array) -> jax.Array:
    """The given experts, int32 [T, k], with the router's own experts [T, k] in place of each -1.

    The n-th -1 of a token becomes the n-th of its own experts that is not given: own [5, 2, 7] and given [-1, 5, -1]
    become [2, 5, 7]. There are always enough, because at most as many own experts are given as there are given choices.
    """
    is_open = given == -1
    is_left = jnp.all(own[:, :, None] != given[:, None, :], axis=-1)
    nth_open, nth_left = (jnp.cumsum(mask, axis=1, dtype=jnp.int32) for mask in (is_open, is_left))
    takes = is_left[:, None, :] & (nth_open[:, :, None] == nth_left[:, None, :])  # [T, k, k]: choice, own expert
    taken = jnp.sum(jnp.where(takes, own[:, None, :], 0), axis=-1, dtype=jnp.int32)
    return jnp.where(is_open, taken, given)


def sort_by_expert(
    topk_indices: ArrayLike, num_experts: int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sorts the routed rows by expert; rows of one expert keep their token order.

    Args:
      topk_indices: integer [T, k] or [M], the expert of each row in token order. A row whose expert is outside
        [0, num_experts) is placed after all groups and belongs to none.
      num_experts: E.
      implementation: as in `grouped_gemm`; all implementations give the same result.

    Returns:
      group_sizes int32 [E] and gather_indices int32 [M], the position in token order of each row in expert order.

    Raises:
      TypeError: topk_indices is not an integer array, or num_experts is not an int.
      ValueError: num_experts is negative.
    """
    topk_indices = as_array("topk_indices", topk_indices)
    check_integers("topk_indices", topk_indices)
    num_experts = as_int("num_experts", num_experts, least=0)
    check_implementation(implementation)
    return compute_order(topk_indices, num_experts, How(implementation, current_target()))


def compute_order(topk_indices: jax.Array, num_experts: int, how: How) -> tuple[jax.Array, jax.Array]:
    """`sort_by_expert` for checked arguments."""
    experts = saturated_int32(topk_indices.reshape(-1))
    sorted_rows = SORT(how, Sort(experts), num_experts=num_experts)
    return sorted_rows.group_sizes, sorted_rows.gather_indices


def with_factors(routing: Routing, factors: jax.Array) -> Routing:
    """Multiplies each choice's weight by its expert's factor [E], or by 0 if the choice has no expert.

    The factors are looked up by a sum with at most one nonzero term: it is exact, and unlike a gather, its gradient
    needs no atomics.
    """
    is_own = routing.topk_indices[..., None] == jnp.arange(len(factors), dtype=jnp.int32)[None, None]  # [T, k, E]
    own = jnp.sum(jnp.where(is_own, factors.astype(jnp.float32)[None, None], 0.0), axis=-1)
    return routing._replace(topk_weights=routing.topk_weights * own)


def without_masked(routing: Routing, mask: jax.Array, num_experts: int, how: How) -> Routing:
    """The routing of tokens whose mask [T] is True; other tokens' choices are -1 and belong to no group."""
    topk_indices = jnp.where(mask[:, None], routing.topk_indices, -1)
    topk_weights = jnp.where(mask[:, None], routing.topk_weights, 0.0)
    return Routing(topk_weights, topk_indices, *compute_order(topk_indices, num_experts, how))


def zeroed(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """An array [T, ...] with zeros for tokens whose mask [T] is False, so that NaN there reaches no sum or gradient."""
    return array if mask is None else jnp.where(mask.reshape(-1, *[1] * (array.ndim - 1)), array, 0.0)


def as_logits(logits: ArrayLike) -> jax.Array:
    """The logits as an array; raises unless they are float [T, E]."""
    logits = as_array("logits", logits)
    check_rank("logits", logits, "[T, E]")
    check_floats("logits", logits)
    return logits


def as_selection_bias(selection_bias: ArrayLike, num_experts: int) -> jax.Array:
    """The selection bias as an array; raises unless it is float [E]."""
    selection_bias = as_array("selection_bias", selection_bias)
    if selection_bias.shape != (num_experts,):
        raise ValueError(f"selection_bias must be [E] = [{num_experts}], got {list(selection_bias.shape)}.")
    check_floats("selection_bias", selection_bias)
    return selection_bias


def as_given_choices(topk_indices: ArrayLike, axes: str, shape: tuple[int, ...]) -> jax.Array:
    """The choices given to a router, as an array; raises unless they are integers of this shape, named `axes`."""
    topk_indices = as_array("topk_indices", topk_indices)
    if topk_indices.shape != shape:
        raise ValueError(f"topk_indices must be {axes} = {list(shape)}, got {list(topk_indices.shape)}.")
    check_integers("topk_indices", topk_indices)
    return topk_indices
