"""The router's scores of all experts, and the weights of those that a token chose; no token's bits depend on others."""

import math
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import MAX_EXPERTS, Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type
from jgg.products.plain.choices import of_choices


class Score(NamedTuple):
    """The router's logits, float32 [T, E], and what is added to their scores, float [E] or None."""

    logits: jax.Array
    bias: jax.Array | None = None


def _score_types(operands: Score, score: str) -> jax.Array:
    return array_type(operands.logits.shape, jnp.float32)


def _score_plainly(operands: Score, score: str) -> jax.Array:
    logits, bias = operands
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    return scores if bias is None else scores + bias.astype(jnp.float32)[None, :]


def _launch_score(launcher: Launcher, operands: Score, score: str) -> jax.Array:
    num_tokens, num_experts = operands.logits.shape
    if num_experts > MAX_EXPERTS:
        return _score_plainly(operands, score)
    from jgg.kernels.score import score_kernel

    block = power_of_2(num_experts)
    launch = Launch(
        operands=operands._asdict(),
        outputs={"scores": _score_types(operands, score)},
        constants={"NUM_EXPERTS": num_experts, "IS_SIGMOID": score == "sigmoid", "BLOCK_EXPERTS": block},
        grid=(num_tokens,),
        num_warps=max(1, block // tiles_of("score_kernel", launcher.target)["experts_of_warp"]),
        bytes_accessed=8 * operands.logits.size,
    )
    return launcher.run(score_kernel, launch)["scores"]


SCORE: Operation[jax.Array] = Operation(
    "score",
    Score,
    result_types=_score_types,
    plain=_score_plainly,
    launch=_launch_score,
    vmap="rows",
    mesh="rows",
    shared=("bias",),
)
"""Each expert's score, float32 [T, E]; the parameter is "softmax" or "sigmoid"."""


class Weigh(NamedTuple):
    """The router's logits, float32 [T, E], and the chosen experts, int32 [T, k]."""

    logits: jax.Array
    topk_indices: jax.Array


def _weights_types(operands: Weigh, **_: Hashable) -> jax.Array:
    return array_type(operands.topk_indices.shape, jnp.float32)


def _weigh_plainly(operands: Weigh, score: str, normalize: bool, scale: float, all_are_experts: bool) -> jax.Array:
    logits, topk_indices = operands
    if all_are_experts:
        return _weigh_chosen(of_choices(logits, topk_indices), score, normalize) * scale
    is_expert = (topk_indices >= 0) & (topk_indices < logits.shape[1])
    if normalize:
        # What is no expert takes a column of its own, which adds nothing to the sum of a token's scores. A mask would
        # do so too, but XLA would then compute the gradients of a replayed choice with other last bits.
        logits = jnp.pad(logits, ((0, 0), (0, 1)), constant_values=jnp.finfo(jnp.float32).min)
    chosen = of_choices(logits, jnp.where(is_expert, topk_indices, logits.shape[1] - 1))
    return jnp.where(is_expert, _weigh_chosen(chosen, score, normalize) * scale, 0.0)


def _weigh_chosen(chosen: jax.Array, score: str, normalize: bool) -> jax.Array:
    if score != "sigmoid":
        return jax.nn.softmax(chosen)  # equals the softmax over all experts divided by the sum of the chosen
    if not normalize:
        return jax.nn.sigmoid(chosen)
    # s / (sum of s + 1e-20) as a softmax over log(s) and log(1e-20): the gradient of the quotient overflows where all
    # of s are tiny
    terms = jnp.pad(jax.nn.log_sigmoid(chosen), ((0, 0), (0, 1)), constant_values=math.log(1e-20))
    return jax.nn.softmax(terms)[:, :-1]


def _launch_weigh(
    launcher: Launcher, operands: Weigh, score: str, normalize: bool, scale: float, all_are_experts: bool
) -> jax.Array:
    from jgg.kernels.score import weigh_kernel

    num_tokens, topk = operands.topk_indices.shape
    launch = Launch(
        operands=operands._asdict(),
        outputs={"weights": _weights_types(operands)},
        constants={
            "NUM_EXPERTS": operands.logits.shape[1],
            "TOPK": topk,
            "IS_SIGMOID": score == "sigmoid",
            "NORMALIZES": normalize,
            "SCALE": scale,
            "BLOCK_TOPK": power_of_2(topk, least=1),
        },
        grid=(num_tokens,),
        num_warps=tiles_of("weigh_kernel", launcher.target)["warps"],
        bytes_accessed=3 * 4 * operands.topk_indices.size,
    )
    return launcher.run(weigh_kernel, launch)["weights"]


WEIGH: Operation[jax.Array] = Operation(
    "weigh",
    Weigh,
    result_types=_weights_types,
    plain=_weigh_plainly,
    launch=_launch_weigh,
    vmap="rows",
    mesh="rows",
)
"""The weights of the chosen experts, float32 [T, k]; 0 for a choice that is no expert.

The parameters are score, normalize and scale as in `jgg.route`, but for a softmax that is not normalized, which is
SCORE; and whether all choices are known to be experts. A softmax over the chosen logits equals the softmax over all
experts divided by the sum of the chosen.
"""
