"""The router's scores of all experts, and the weights of those that a token chose; float32.

Sums have one order for any number of tokens: a program of `score_kernel` has one token, and is compiled for the number
of experts alone; `weigh_kernel` adds one choice after the other.
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
        value = tl.exp(value - tl.reduce(value, 0, highest))
        value /= tl.reduce(value, 0, add)
    if bias is not None:
        value += tl.load(bias + experts, mask=mask, other=0.0).to(tl.float32)
    tl.store(scores + at, value, mask=mask)


@triton.jit
def load_chosen(logits, topk_indices, rows, choice, exists, NUM_EXPERTS: tl.constexpr, TOPK: tl.constexpr):
    """The logits of the experts that the rows chose by that choice, and whether it is an expert."""
    expert = tl.load(topk_indices + rows * TOPK + choice, mask=exists, other=-1)
    is_expert = (expert >= 0) & (expert < NUM_EXPERTS)
    return tl.load(logits + rows * NUM_EXPERTS + expert, mask=is_expert, other=-float("inf")), is_expert


@triton.jit
def weigh_kernel(
    logits,
    topk_indices,
    weights,
    num_rows,
    NUM_EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """weights = SCALE * the softmax or the sigmoids of each row's chosen logits; 0 where a choice is no expert.

    Arrays: logits float32 [num_rows, NUM_EXPERTS]; topk_indices int32 and weights float32 [num_rows, TOPK]. A softmax
    is over the choices that are experts. With NORMALIZES sigmoids are divided by their sum plus 1e-20.
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    exists = rows < num_rows
    rows = rows.to(tl.int64)
    most = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    total = tl.full([BLOCK_ROWS], 1e-20 if IS_SIGMOID else 0.0, tl.float32)
    if not IS_SIGMOID:
        for choice in tl.range(0, TOPK):
            logit, _ = load_chosen(logits, topk_indices, rows, choice, exists, NUM_EXPERTS, TOPK)
            most = tl.maximum(most, logit)
    if NORMALIZES:
        for choice in tl.range(0, TOPK):
            logit, is_expert = load_chosen(logits, topk_indices, rows, choice, exists, NUM_EXPERTS, TOPK)
            term = sigmoid(logit) if IS_SIGMOID else tl.exp(logit - most)
            total += tl.where(is_expert, term, 0.0)
    for choice in tl.range(0, TOPK):
        logit, is_expert = load_chosen(logits, topk_indices, rows, choice, exists, NUM_EXPERTS, TOPK)
        term = sigmoid(logit) if IS_SIGMOID else tl.exp(logit - most)
        if NORMALIZES:
            term /= total
        tl.store(weights + rows * TOPK + choice, tl.where(is_expert, term * SCALE, 0.0), mask=exists)
