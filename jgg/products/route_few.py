"""The choices of few tokens, as in decoding, and their order: one kernel."""

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from jgg.launching.choice import How, Launcher, is_plain_jax
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type
from jgg.products.sort import SORT, Sort
from jgg.products.top_k import TOP_K, TopK

_MOST_SCORES = 8192  # that one program holds


class RouteFew(NamedTuple):
    """The router's logits, float32 [T, E]; a NaN is ranked as infinity."""

    logits: jax.Array


class Routed(NamedTuple):
    """The choices of few tokens, and their order.

    Attributes:
      topk_indices: int32 [T, k], the chosen experts, highest logit first and of equal ones the lower index.
      group_sizes, gather_indices: int32 [E] and [T * k], as in `jgg.products.sort.Sorted`.
    """

    topk_indices: jax.Array
    group_sizes: jax.Array
    gather_indices: jax.Array


def are_few(logits: jax.Array, how: How) -> bool:
    """Whether ROUTE_FEW takes this many tokens, and kernels may compute it."""
    num_tokens, num_experts = logits.shape
    if jax.export.is_symbolic_dim(num_tokens) or is_plain_jax(how.implementation):
        return False
    return power_of_2(num_tokens, least=1) * power_of_2(num_experts, least=1) <= _MOST_SCORES


def _result_types(operands: RouteFew, topk: int) -> Routed:
    num_tokens, num_experts = operands.logits.shape
    return Routed(
        topk_indices=array_type((num_tokens, topk), jnp.int32),
        group_sizes=array_type((num_experts,), jnp.int32),
        gather_indices=array_type((num_tokens * topk,), jnp.int32),
    )


def _several(how: How | None, operands: RouteFew, topk: int) -> Routed:
    (logits,) = operands
    topk_indices = TOP_K(how, TopK(logits), topk=topk)
    order = SORT(how, Sort(topk_indices.reshape(-1)), num_experts=logits.shape[1])
    return Routed(topk_indices, *order)


def _plain(operands: RouteFew, topk: int) -> Routed:
    return _several(None, operands, topk)


def _launch(launcher: Launcher, operands: RouteFew, topk: int) -> Routed:
    from jgg.kernels.route_few import route_few_kernel

    tiles = tiles_of("route_few_kernel", launcher.target)
    (logits,) = operands
    num_tokens, num_experts = logits.shape
    block_tokens, block_experts = power_of_2(num_tokens, least=1), power_of_2(num_experts, least=1)
    launch = Launch(
        operands={"logits": logits, "num_tokens": num_tokens},
        outputs=_result_types(operands, topk)._asdict(),
        constants={
            "NUM_EXPERTS": num_experts,
            "TOPK": topk,
            "BLOCK_TOKENS": block_tokens,
            "BLOCK_TOPK": power_of_2(topk, least=1),
            "BLOCK_EXPERTS": block_experts,
        },
        grid=(1,),
        num_warps=max(1, min(tiles["warps"], block_tokens * block_experts // tiles["scores_of_warp"])),
        bytes_accessed=4 * logits.size,
    )
    return Routed(**launcher.run(route_few_kernel, launch))


ROUTE_FEW: Operation[Routed] = Operation(
    "route_few",
    RouteFew,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    vmap="several",
    several=_several,
)
"""Routed; the parameter is k."""
