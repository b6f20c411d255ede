"""Routes few tokens by one program: top k, and the sort of the rows by expert.

A token chooses an expert once, so that a row's place among its expert's is the number of earlier tokens that chose it.
"""

import triton
import triton.language as tl

from .routing import ascending_key
from .tiles import add, highest


@triton.jit
def route_few_kernel(
    logits,
    topk_indices,
    group_sizes,
    gather_indices,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_TOPK: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """The experts of each token, highest logit first and of equal ones the lower index, and the rows in expert order.

    Arrays: logits float32 [num_tokens, NUM_EXPERTS]; topk_indices int32 [num_tokens, TOPK];
    group_sizes int32 [NUM_EXPERTS]; gather_indices int32 [num_tokens * TOPK]. Each block holds its whole axis.
    """
    tokens, columns, choices = tl.arange(0, BLOCK_TOKENS), tl.arange(0, BLOCK_EXPERTS), tl.arange(0, BLOCK_TOPK)
    exists = (tokens < num_tokens)[:, None] & (columns < NUM_EXPERTS)[None, :]
    key = ascending_key(tl.load(logits + tokens[:, None] * NUM_EXPERTS + columns[None, :], mask=exists, other=0.0))
    # one number that orders by score first and column second: the highest is the choice
    taken = -(2**63)
    order = tl.where(exists, key.to(tl.int64) * 2**32 + (BLOCK_EXPERTS - 1 - columns)[None, :], taken)
    experts = tl.full([BLOCK_TOKENS, BLOCK_TOPK], 0, tl.int32)
    for choice in tl.range(0, TOPK):
        best = tl.reduce(order, 1, highest)
        order = tl.where(order == best[:, None], taken, order)
        chosen = BLOCK_EXPERTS - 1 - (best & (BLOCK_EXPERTS - 1)).to(tl.int32)
        experts = tl.where((choices == choice)[None, :], chosen[:, None], experts)
    is_choice = (tokens < num_tokens)[:, None] & (choices < TOPK)[None, :]
    slots = tokens[:, None] * TOPK + choices[None, :]
    tl.store(topk_indices + slots, experts, mask=is_choice)

    has_chosen = (exists & (order == taken)).to(tl.int32)
    sizes = tl.reduce(has_chosen, 0, add)
    tl.store(group_sizes + columns, sizes, mask=columns < NUM_EXPERTS)
    starts = tl.associative_scan(sizes, 0, add) - sizes
    places = starts[None, :] + tl.associative_scan(has_chosen, 0, add) - has_chosen
    tl.store(gather_indices + tl.gather(places, experts, 1), slots, mask=is_choice)
