"""A layer's experts for few tokens."""

import jax
import jax.numpy as jnp

from jgg.core.quantized import QuantizedArray
from jgg.experts.arguments import Matrices
from jgg.low_rank import LowRank
from jgg.router.routing import Routing

Weights = tuple[Matrices, Matrices, jax.Array | None, jax.Array | None]


def of_chosen(
    weights: Weights, terms: dict[str, LowRank], routing: Routing
) -> tuple[Weights, dict[str, LowRank], Routing]:  # fmt: skip
    """The weights, biases and terms of low rank of each row's expert, if they are fewer than the experts and quantized.

    Else the arguments. Dequantizing all experts, to multiply few rows by few of them, would be most of the time.

    Returns: also a routing in which each row is a group of its own.
    """
    num_experts, num_rows = len(routing.group_sizes), routing.topk_indices.size
    are_few = isinstance(num_rows, int) and num_rows < num_experts  # it may be symbolic, in exported programs
    if not are_few or not any(isinstance(w, QuantizedArray) for w in weights):
        return weights, terms, routing
    of_choices = routing.topk_indices.reshape(-1)
    of_rows = of_choices if routing.gather_indices is None else of_choices[routing.gather_indices]
    # rows of no expert are the last, and no group has them
    group_sizes = (jnp.arange(num_rows) < jnp.sum(routing.group_sizes)).astype(jnp.int32)
    weights, terms = jax.tree.map(lambda array: jnp.take(array, of_rows, axis=0, mode="clip"), (weights, terms))
    return weights, terms, routing._replace(group_sizes=group_sizes)
