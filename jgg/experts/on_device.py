"""The expert MLP of one device's tokens, whose experts may be on other devices; runs inside `jax.shard_map`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.gpu_target import current_target
from jgg.core.manual_axes import vary_over
from jgg.core.quantized import as_bits, from_bits
from jgg.experts.arguments import Matrices, MlpOptions, in_quantization, with_terms
from jgg.experts.exchange import EXCHANGES, Placement
from jgg.experts.lora import adapter_names
from jgg.experts.mesh import MoESharding, specs_of_parts
from jgg.experts.moe import compute_mlp
from jgg.launching.choice import How
from jgg.low_rank import LowRank
from jgg.router.routing import Routing, compute_order

# Multiprocessors for the collective that sums the gradient of x while the gradient of w_gate_up is computed;
# kernels/trials.md has measurements of other numbers.
_SPARE_SMS = 24


def compute_mlp_on_device(
    x: jax.Array,
    w_gate_up: Matrices,
    w_down: Matrices,
    b_gate_up: jax.Array | None,
    b_down: jax.Array | None,
    topk_weights: jax.Array,
    topk_indices: jax.Array,
    terms: Mapping[str, LowRank],
    sharding: MoESharding,
    options: MlpOptions,
) -> tuple[jax.Array, jax.Array]:
    """`moe_mlp_on_device` of checked arguments; `terms` are by the names of the weights that they are beside."""
    how = How(options.implementation, current_target())
    num_experts, num_rows = w_gate_up.shape[0], topk_indices.shape[0] * topk_indices.shape[1]
    spare_sms = _SPARE_SMS if sharding.size(sharding.expert, sharding.tensor) > 1 else 0
    options = dataclasses.replace(options, spare_sms=spare_sms, expected_rows=num_rows or None)
    if sharding.tensor is not None:
        # so gradients are summed over the axis here, where they are [T, H], not the rows of the exchange
        x, topk_weights = (vary_over(frozenset({sharding.tensor}), array) for array in (x, topk_weights))
        if b_down is not None:  # added on one of the devices whose results are summed
            b_down = jnp.where(jax.lax.axis_index(sharding.tensor) == 0, b_down, jnp.zeros_like(b_down))

    def compute(
        x: jax.Array, topk_weights: jax.Array, w_gate_up: Matrices, w_down: Matrices, terms: Mapping[str, LowRank]
    ) -> tuple[jax.Array, jax.Array]:
        if (axis := sharding.gather_axis) is not None:
            specs = sharding.weight_specs(options.w_layout)
            w_gate_up, w_down = (  # in the dtype of x, so that wider weights take no longer to communicate
                _gathered(w.astype(x.dtype) if isinstance(w, jax.Array) else w, specs[name], axis)
                for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down))
            )
            terms = {name: _gathered_term(term, name, specs, axis) for name, term in terms.items()}

        def mlp(rows: jax.Array, routing: Routing) -> jax.Array:
            routing = checkpoint_name(routing, "jgg_routing")
            weights = in_quantization(rows, w_gate_up, w_down, b_gate_up, b_down, options.quantization)
            return compute_mlp(rows, with_terms(weights, terms), routing, options)

        if sharding.expert is None or num_rows == 0:  # JAX gathers no arrays without elements
            routing = Routing(topk_weights, topk_indices, *compute_order(topk_indices, num_experts, how))
            return mlp(x, routing), jnp.int32(0)
        placement = Placement(sharding.expert, num_experts, sharding.capacity(num_rows))
        return EXCHANGES[sharding.exchange](x, topk_weights, topk_indices, mlp, placement, how)

    if sharding.gather_axis is not None:  # the gathered weights are not kept, but gathered again in the backward pass
        names = options.names.x, options.names.pre_activation, "jgg_routing"
        compute = jax.checkpoint(compute, policy=jax.checkpoint_policies.save_only_these_names(*names))
    y, overflow = compute(x, topk_weights, w_gate_up, w_down, terms)
    if sharding.tensor is not None:
        y = jax.lax.psum(y, sharding.tensor)
    return y, overflow if sharding.expert is None else jax.lax.psum(overflow, sharding.token_axes)


def _gathered_term(term: LowRank, name: str, specs: Mapping[str, jax.P], axis_name: str) -> LowRank:
    """The term beside the weights of this name with the factor that is split along the axis whole, in its own dtype."""
    parts: dict[str, Any] = {
        part: _gathered(getattr(term, part), specs[adapter], axis_name)
        for part, adapter in zip("ab", adapter_names(name), strict=True)
        if axis_name in specs[adapter]
    }
    return dataclasses.replace(term, **parts)


def _gathered(w: Matrices, spec: jax.P, axis_name: str) -> Matrices:
    """A device's weights with the shards that other devices along a mesh axis have of them."""

    def gathered(part: jax.Array, spec: jax.P) -> jax.Array:
        bits = jax.lax.all_gather(as_bits(part), axis_name, axis=spec.index(axis_name), tiled=True)
        return bits if bits.dtype == part.dtype else from_bits(bits, part.dtype)

    return jax.tree.map(gathered, w, specs_of_parts(w, spec))
