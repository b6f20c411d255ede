"""Experts, their features and tokens split over the devices of a mesh; `import jgg.sharding`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgg.activations import ActivationLike
from jgg.core.arguments import as_array, as_array_or_none, as_int, check, check_instance
from jgg.core.quantized import QuantizedArray, QuantizedWeights, block_of
from jgg.experts.arguments import Matrices, MlpOptions, as_matrices, check_choices, check_shapes, checked_terms
from jgg.experts.lora import adapter_names
from jgg.experts.mesh import (
    MoESharding,
    check_inside_shard_map,
    check_interleaved,
    check_outside_shard_map,
    map_tokens,
    specs_of_parts,
)
from jgg.experts.on_device import compute_mlp_on_device
from jgg.fp8 import Fp8
from jgg.low_rank import LowRank

__all__ = ["MoESharding", "interleave", "moe_mlp_on_device", "sharded_moe_mlp"]

P = jax.P


def sharded_moe_mlp(
    x: ArrayLike,
    w_gate_up: ArrayLike | QuantizedArray | QuantizedWeights,
    w_down: ArrayLike | QuantizedArray | QuantizedWeights,
    topk_weights: ArrayLike,
    topk_indices: ArrayLike,
    *,
    sharding: MoESharding,
    b_gate_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    low_rank_gate_up: LowRank | None = None,
    low_rank_down: LowRank | None = None,
    activation: ActivationLike = "swiglu",
    interleaved: bool = False,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    quantization: Fp8 | None = None,
    implementation: str | None = None,
    residual_names: Mapping[str, str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`jgg.moe_mlp` on a mesh: experts may be on other devices than their tokens.

    Differentiable in x, the weights, the biases and topk_weights. Communication is JAX's own collectives.

    Shapes are as in `jgg.moe_mlp` and count all devices: T tokens of all devices, E experts of all devices.

    Args:
      x: [T, H], split as `sharding.token_spec`.
      w_gate_up, w_down, b_gate_up, b_down, low_rank_gate_up, low_rank_down: as in `jgg.moe_mlp`, split as
        `sharding.weight_specs(w_layout)`. Values and scales of a QuantizedArray are split alike, and no block may be on
        several devices.
      topk_weights: float [T, k].
      topk_indices: integer [T, k], the expert of each choice; a row whose expert lies outside [0, E) adds nothing.
      sharding: which mesh axis splits what, and by which exchange.
      interleaved: as in `jgg.moe_mlp`; must be True for a gated activation split over a tensor axis, so that a gate
        and its up feature are on the same device: see `interleave`.
      activation, w_layout, precision, quantization, implementation, residual_names: as in `jgg.moe_mlp`.

    Returns:
      y [T, H] in the dtype of x, split like x, and the overflow: int32 scalar, how many of the T * k rows found no
      room in the buffers of `sharding.buffer_factor` and so added nothing to y.

    Raises:
      ValueError: shapes disagree with each other or with the mesh; on Explicit axes also if the weights are split in
        another way than `sharding.weight_specs` says; or this is called inside a `jax.shard_map` over the same axes,
        where `moe_mlp_on_device` must be called.
      TypeError: a dtype is unsupported.
    """
    check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding")
    check_outside_shard_map(sharding)
    options = MlpOptions.checked(
        activation=activation,
        interleaved=interleaved,
        w_layout=w_layout,
        precision=precision,
        quantization=quantization,
        implementation=implementation,
        residual_names=residual_names,
    )
    arrays, terms = _checked(
        x,
        w_gate_up,
        w_down,
        topk_weights,
        topk_indices,
        b_gate_up,
        b_down,
        low_rank_gate_up,
        low_rank_down,
        sharding,
        options,
        on_device=False,
    )
    for name, term in terms.items():
        arrays |= dict(zip(adapter_names(name), (term.a, term.b), strict=True))

    def on_device(part: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        own_terms = {}
        for name, term in terms.items():
            a, b = adapter_names(name)
            own_terms[name] = dataclasses.replace(term, a=part[a], b=part[b])
        return _compute(part, own_terms, sharding, options)

    return map_tokens(on_device, sharding, arrays, sharding.weight_specs(w_layout), (sharding.token_spec, P()))


def moe_mlp_on_device(
    x: ArrayLike,
    w_gate_up: ArrayLike | QuantizedArray | QuantizedWeights,
    w_down: ArrayLike | QuantizedArray | QuantizedWeights,
    topk_weights: ArrayLike,
    topk_indices: ArrayLike,
    *,
    sharding: MoESharding,
    b_gate_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    low_rank_gate_up: LowRank | None = None,
    low_rank_down: LowRank | None = None,
    activation: ActivationLike = "swiglu",
    interleaved: bool = False,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    quantization: Fp8 | None = None,
    implementation: str | None = None,
    residual_names: Mapping[str, str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`sharded_moe_mlp` for use inside your own `jax.shard_map`: each array is this device's shard.

    Returns:
      y [T, H] of this device's tokens, and the overflow of all devices together.

    Raises:
      ValueError: as in `sharded_moe_mlp`; or an axis of the mesh that `sharding` uses is none of the `jax.shard_map`,
        or has another number of devices there.
      TypeError: as in `sharded_moe_mlp`.
    """
    check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding")
    check_inside_shard_map(sharding)
    options = MlpOptions.checked(
        activation=activation,
        interleaved=interleaved,
        w_layout=w_layout,
        precision=precision,
        quantization=quantization,
        implementation=implementation,
        residual_names=residual_names,
    )
    arrays, terms = _checked(
        x,
        w_gate_up,
        w_down,
        topk_weights,
        topk_indices,
        b_gate_up,
        b_down,
        low_rank_gate_up,
        low_rank_down,
        sharding,
        options,
        on_device=True,
    )
    return _compute(arrays, terms, sharding, options)


def _checked(
    x: ArrayLike,
    w_gate_up: ArrayLike | Matrices,
    w_down: ArrayLike | Matrices,
    topk_weights: ArrayLike,
    topk_indices: ArrayLike,
    b_gate_up: ArrayLike | None,
    b_down: ArrayLike | None,
    low_rank_gate_up: LowRank | None,
    low_rank_down: LowRank | None,
    sharding: MoESharding,
    options: MlpOptions,
    *,
    on_device: bool,
) -> tuple[dict[str, Any], dict[str, LowRank]]:
    """The arrays that are given, by name, and the terms of low rank; raises where they disagree.

    Args:
      on_device: whether these are the shards of one device.
    """
    arrays: dict[str, Any] = {
        "x": as_array("x", x),
        "w_gate_up": as_matrices("w_gate_up", w_gate_up),
        "w_down": as_matrices("w_down", w_down),
        "topk_weights": as_array("topk_weights", topk_weights),
        "topk_indices": as_array("topk_indices", topk_indices),
    }
    biases = {"b_gate_up": as_array_or_none("b_gate_up", b_gate_up), "b_down": as_array_or_none("b_down", b_down)}
    weights = [arrays["w_gate_up"], arrays["w_down"]]
    if on_device:
        weights = [_gathered(name, arrays[name], sharding, options) for name in ("w_gate_up", "w_down")]
    check_shapes(arrays["x"], weights[0], weights[1], biases["b_gate_up"], biases["b_down"], options)
    check_choices(arrays["x"], arrays["topk_weights"], arrays["topk_indices"])
    check_interleaved(options.interleaved, options.activation, sharding)
    terms = checked_terms(low_rank_gate_up, low_rank_down, arrays["w_gate_up"], arrays["w_down"], options.w_layout)
    return arrays | {name: bias for name, bias in biases.items() if bias is not None}, terms


def _compute(
    part: Mapping[str, Any], terms: Mapping[str, LowRank], sharding: MoESharding, options: MlpOptions
) -> tuple[jax.Array, jax.Array]:
    """y and the overflow of one device's checked arrays."""
    return compute_mlp_on_device(
        part["x"],
        part["w_gate_up"],
        part["w_down"],
        part.get("b_gate_up"),
        part.get("b_down"),
        part["topk_weights"],
        part["topk_indices"],
        terms,
        sharding,
        options,
    )


def _gathered(name: str, w: Matrices, sharding: MoESharding, options: MlpOptions) -> Any:
    """The shapes and dtypes of a device's weights once they are gathered over the `fsdp` axis."""
    quantized = w.forms.straight if isinstance(w, QuantizedWeights) else w
    if isinstance(quantized, QuantizedArray):
        block_of(quantized, f"{name}.")
    if sharding.fsdp is None:
        return w

    def gathered(part: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        axis, devices = spec.index(sharding.fsdp), sharding.size(sharding.fsdp)
        shape = [size * devices if at == axis else size for at, size in enumerate(part.shape)]
        return jax.ShapeDtypeStruct(tuple(shape), part.dtype)

    return jax.tree.map(gathered, w, specs_of_parts(w, sharding.weight_specs(options.w_layout)[name]))


def interleave(array: ArrayLike, axis: int = -1) -> jax.Array:
    """Reorders features along `axis` from all gates, all ups (g0 g1 ... u0 u1 ...) to alternating (g0 u0 g1 u1 ...).

    Use it for w_gate_up and b_gate_up of a layer with `interleaved=True`, which a tensor axis needs.
    """
    array, axis = as_array("array", array), as_int("axis", axis)
    shape = array.shape
    check(len(shape) > 0, "array must have at least one axis, got [].")
    check(-len(shape) <= axis < len(shape), f"axis must be of the array's {len(shape)} axes, got {axis}.")
    axis %= len(shape)
    check(shape[axis] % 2 == 0, f"array must have 2 * I features along axis {axis}, got {list(shape)}.")
    halves = jnp.reshape(array, (*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :]))
    return jnp.reshape(jnp.swapaxes(halves, axis, axis + 1), shape)
