"""The expert MLP of one device's tokens, whose experts may be on other devices; runs inside `jax.shard_map`."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import vary_over
from jgg.core.matrix import Matrix
from jgg.core.quantized import as_bits, from_bits
from jgg.experts.arguments import ExpertWeights, MlpOptions
from jgg.experts.exchange import BY_NAME
from jgg.experts.mesh import MoESharding, axis_split_over, specs_of_parts
from jgg.experts.moe import compute_mlp
from jgg.experts.moves import Placement
from jgg.experts.router.routing import Routing, compute_order
from jgg.experts.sums import sum_all
from jgg.launching.choice import How
from jgg.primitives.barrier import barrier

# Multiprocessors for the collective that sums the gradient of x while the gradient of w_gate_up is computed, or for the
# collectives that gather and scatter other layers' weights during all products. kernels/trials.md times other numbers.
_SPARE_SMS = 24


def compute_mlp_on_device(
    x: jax.Array,
    weights: ExpertWeights,
    topk_weights: jax.Array,
    topk_indices: jax.Array,
    sharding: MoESharding,
    options: MlpOptions,
) -> tuple[jax.Array, jax.Array]:
    """`moe_mlp_on_device` for checked arguments."""
    how = How(options.implementation, current_target())
    num_rows = topk_indices.shape[0] * topk_indices.shape[1]
    sums_gradients = sharding.size(sharding.expert, sharding.tensor) > 1  # of x, over devices
    gathers_beside = sharding.gather_axis is not None and not sharding.prevent_cse
    options = dataclasses.replace(
        options,
        spare_sms=_SPARE_SMS if sums_gradients and not gathers_beside else 0,
        spare_sms_always=_SPARE_SMS if gathers_beside else 0,
        expected_rows=num_rows or None,
    )
    if sharding.tensor is not None:
        # so gradients are summed over the axis here, where they are [T, H], not the rows of the exchange
        x, topk_weights = (vary_over(frozenset({sharding.tensor}), array) for array in (x, topk_weights))
        if (b_down := weights.b_down) is not None:  # added on one of the devices whose results are summed
            is_first = jax.lax.axis_index(sharding.tensor) == 0
            weights = weights._replace(b_down=jnp.where(is_first, b_down, jnp.zeros_like(b_down)))

    def compute(x: jax.Array, topk_weights: jax.Array, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
        if sharding.gather_axis is not None:
            weights = _gathered(weights, x.dtype, sharding.gather_axis, sharding.weight_specs(options.w_layout))

        num_experts, arrival = weights.gate_up.shape[0], None
        if sums_gradients:
            x, weights = _with_gradients_at_once(x, weights)
        if sharding.expert is None or num_rows == 0:  # JAX gathers no arrays without elements
            routing = Routing(topk_weights, topk_indices, *compute_order(topk_indices, num_experts, how))
            overflow = jnp.int32(0)
        else:
            placement = Placement(sharding.expert, num_experts, sharding.capacity(num_rows))
            arrival = BY_NAME[sharding.exchange](x, topk_weights, topk_indices, placement, how)
            routing, overflow = arrival.routing, arrival.overflow
        routing = checkpoint_name(routing, "jgg_routing")
        weights = weights.in_recipe(options.quantization, x.dtype)
        return compute_mlp(x, weights, routing, options, arrival), overflow

    if sharding.gather_axis is not None:  # the gathered weights are not kept, but gathered again in the backward pass
        names = options.names.x, options.names.pre_activation, "jgg_routing"
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        compute = jax.checkpoint(compute, policy=policy, prevent_cse=sharding.prevent_cse)
    y, overflow = compute(x, topk_weights, weights)
    if sharding.tensor is not None:
        y = sum_all(y, sharding.tensor)
    return y, overflow if sharding.expert is None else jax.lax.psum(overflow, sharding.token_axes)


def _with_gradients_at_once(x: jax.Array, weights: ExpertWeights) -> tuple[jax.Array, ExpertWeights]:
    """x and the weights; whatever uses the gradient of x is computed after the gradients of the weights.

    The products for the weights' gradients then run while the gradient of x comes back from other devices.
    """
    leaves, structure = jax.tree.flatten((x, weights))
    places = [place for place, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    for place, leaf in zip(places, _tied([leaves[place] for place in places]), strict=True):
        leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


@jax.custom_jvp
def _tied(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


_tied.defjvp(lambda primals, tangents: (primals[0], barrier(tangents[0])))


def _gathered(weights: ExpertWeights, dtype: DTypeLike, axis_name: str, specs: Mapping[str, jax.P]) -> ExpertWeights:
    """Gathers a device's weights from the shards of all devices along a mesh axis.

    Dense weights are first cast to `dtype`, so that wider ones take no longer to send.
    """

    def gathered(part: jax.Array, spec: jax.P) -> jax.Array:
        axis = axis_split_over(axis_name, spec)
        if axis is None:  # a factor that this axis does not split
            return part
        return from_bits(jax.lax.all_gather(as_bits(part), axis_name, axis=axis, tiled=True), part.dtype)

    def cast(matrix: Matrix) -> Matrix:
        if matrix.dense is None or matrix.is_quantized:
            return matrix
        return matrix._replace(dense=matrix.dense.astype(dtype))

    weights = weights._replace(gate_up=cast(weights.gate_up), down=cast(weights.down))
    return map_matrices(gathered, weights, specs)


def map_matrices(
    function: Callable[[jax.Array, jax.P], object], weights: ExpertWeights, specs: Mapping[str, jax.P]
) -> ExpertWeights:
    """Replaces each array of each Matrix in the weights by function(array, its PartitionSpec)."""

    def mapped(name: str, matrix: Matrix) -> Matrix:
        return jax.tree.map(function, matrix, specs_of_parts(name, matrix, specs))

    return weights._replace(gate_up=mapped("w_gate_up", weights.gate_up), down=mapped("w_down", weights.down))
