"""The router's scores of all experts, and the weights of those that a token chose; float32.

Sums have one order for any number of tokens: a program has one token, and no kernel is compiled for their number.
"""

import triton
import triton.language as tl

from .tiles import add, highest


@triton.jit
def sigmoid(logits):
    """1 / (1 + exp(-logits)), whose exponential never overflows."""
    small = tl.exp(-tl.abs(logits))
    return tl.where(logits < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def exponentials(logits):
    """exp(logits - the highest); where one is NaN so is the sum, and the highest is of the others."""
    return tl.exp(logits - tl.reduce(tl.where(logits == logits, logits, -float("inf")), 0, highest))


@triton.jit
def score_kernel(
    logits,
    bias,
    scores,
    NUM_EXPERTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """scores = softmax(logits) or sigmoid(logits), plus the bias; the grid is (tokens,).

    Arrays: logits, scores float32 [tokens, NUM_EXPERTS]; bias [NUM_EXPERTS] or None.
    """
    experts = tl.arange(0, BLOCK_EXPERTS)
    mask = experts < NUM_EXPERTS
    at = tl.program_id(0).to(tl.int64) * NUM_EXPERTS + experts
    value = tl.load(logits + at, mask=mask, other=-float("inf"))
    if IS_SIGMOID:
        value = sigmoid(value)
    else:
        value = exponentials(value)
        value /= tl.reduce(value, 0, add)
    if bias is not None:
        value += tl.load(bias + experts, mask=mask, other=0.0).to(tl.float32)
    tl.store(scores + at, value, mask=mask)


@triton.jit
def weigh_kernel(
    logits,
    topk_indices,
    weights,
    NUM_EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
):
    """weights = SCALE * the softmax or the sigmoids of a token's chosen logits; the grid is (tokens,).

    Arrays: logits float32 [tokens, NUM_EXPERTS]; topk_indices int32 and weights float32 [tokens, TOPK]. A choice that
    is no expert has weight 0 and adds nothing to a sum. With NORMALIZES sigmoids are divided by their sum plus 1e-20.
    """
    token, choices = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_TOPK)
    expert = tl.load(topk_indices + token * TOPK + choices, mask=choices < TOPK, other=-1)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    logit = tl.load(logits + token * NUM_EXPERTS + expert, mask=is_expert, other=-float("inf"))
    weight = sigmoid(logit) if IS_SIGMOID else exponentials(logit)
    weight = tl.where(is_expert, weight, 0.0)
    if NORMALIZES:
        weight /= tl.reduce(weight, 0, add) + (1e-20 if IS_SIGMOID else 0.0)
    weight = tl.where(is_expert, weight * SCALE, 0.0)
    tl.store(weights + token * TOPK + choices, weight, mask=choices < TOPK)
