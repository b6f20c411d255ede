"""Experts, their features and tokens split over the devices of a mesh; `import jgg.sharding`."""

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, as_int, check, check_instance, check_keywords
from jgg.core.matrix import Matrix
from jgg.core.quantized import QuantizedArray, QuantizedWeights, block_of
from jgg.experts.arguments import ExpertWeights, MlpOptions, Options, check_choices, check_shapes, expert_weights
from jgg.experts.mesh import (
    MoESharding,
    axis_split_over,
    check_inside_shard_map,
    check_interleaved,
    check_outside_shard_map,
    map_tokens,
)
from jgg.experts.on_device import compute_mlp_on_device, map_matrices
from jgg.linear.weights import Weights

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
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """`jgg.moe_mlp` on a mesh: experts and their tokens may be on different devices.

    Differentiable in x, the weights, the biases and topk_weights. Communication is JAX's own collectives.

    Shapes are as in `jgg.moe_mlp` and global: T and E count the tokens and experts of all devices.

    Args:
      x: [T, H], split as `sharding.token_spec`.
      w_gate_up, w_down: as in `jgg.moe_mlp`, split as `sharding.weight_specs(w_layout)`. Values and scales of a
        QuantizedArray are split alike, and no block may span several devices.
      topk_weights: float [T, k].
      topk_indices: integer [T, k], the expert of each choice; a row whose expert lies outside [0, E) adds nothing.
      sharding: which mesh axis splits what, and which exchange sends tokens to experts.
      options: any of b_gate_up, b_down, low_rank_gate_up and low_rank_down, split like the weights, activation,
        interleaved, w_layout, precision, quantization, implementation and residual_names, as in `jgg.moe_mlp`.
        `interleaved` must be True for a gated activation split over a tensor axis, so that a gate and its up feature
        are on the same device: see `interleave`.

    Returns:
      y [T, H] in the dtype of x, split like x, and the overflow: int32 scalar, how many of the T * k rows found no
      room in the buffers of `sharding.buffer_factor` and so added nothing to y.

    Raises:
      ValueError: shapes disagree with each other or with the mesh; or, on Explicit axes, the weights are not split as
        `sharding.weight_specs` says; or the call is inside a `jax.shard_map` over the same axes: use
        `moe_mlp_on_device` there.
      TypeError: a dtype is unsupported.
    """
    check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding")
    check_outside_shard_map(sharding)
    checked = _checked(x, w_gate_up, w_down, topk_weights, topk_indices, sharding, options, gathers=False)
    specs = sharding.weight_specs(checked.options.w_layout)
    on_device = functools.partial(_on_device, sharding, checked.options)
    return map_tokens(on_device, sharding, checked.arrays, specs, (sharding.token_spec, P()))


class _Arrays(NamedTuple):
    """The arrays of `sharded_moe_mlp`, under the names that its errors use; low-rank terms are in the matrices."""

    x: jax.Array
    topk_weights: jax.Array
    topk_indices: jax.Array
    w_gate_up: Matrix
    w_down: Matrix
    b_gate_up: jax.Array | None
    b_down: jax.Array | None


class _Checked(NamedTuple):
    """What the arguments of `sharded_moe_mlp` give."""

    arrays: _Arrays
    options: MlpOptions


def moe_mlp_on_device(
    x: ArrayLike,
    w_gate_up: ArrayLike | QuantizedArray | QuantizedWeights,
    w_down: ArrayLike | QuantizedArray | QuantizedWeights,
    topk_weights: ArrayLike,
    topk_indices: ArrayLike,
    *,
    sharding: MoESharding,
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]:
    """`sharded_moe_mlp` for use inside your own `jax.shard_map`: each array is this device's shard.

    Returns:
      y [T, H] for this device's tokens, and the overflow of all devices together.

    Raises:
      ValueError: as in `sharded_moe_mlp`; or the `jax.shard_map` lacks a mesh axis that `sharding` uses, or has a
        different number of devices along it.
      TypeError: as in `sharded_moe_mlp`.
    """
    check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding")
    check_inside_shard_map(sharding)
    checked = _checked(x, w_gate_up, w_down, topk_weights, topk_indices, sharding, options, gathers=True)
    return _on_device(sharding, checked.options, checked.arrays)


def _on_device(sharding: MoESharding, options: MlpOptions, arrays: _Arrays) -> tuple[jax.Array, jax.Array]:
    own, choices = ExpertWeights(*arrays[3:]), (arrays.topk_weights, arrays.topk_indices)
    return compute_mlp_on_device(arrays.x, own, *choices, sharding, options)


def _checked(
    x: ArrayLike,
    w_gate_up: ArrayLike | Weights,
    w_down: ArrayLike | Weights,
    topk_weights: ArrayLike,
    topk_indices: ArrayLike,
    sharding: MoESharding,
    given: Options,
    *,
    gathers: bool,
) -> _Checked:
    """The arguments of `sharded_moe_mlp`; raises if one is wrong or they disagree.

    Args:
      gathers: whether these are one device's arrays, whose weights are gathered before they are multiplied.
    """
    check_keywords(given, Options)
    others: dict[str, Any] = {**given}
    of_weights = {name: others.pop(name) for name in given if name.startswith(("b_", "low_rank_"))}
    options = MlpOptions.checked(**others)
    weights = expert_weights(w_gate_up, w_down, **of_weights, w_layout=options.w_layout)
    x, topk_weights = as_array("x", x), as_array("topk_weights", topk_weights)
    topk_indices = as_array("topk_indices", topk_indices)
    for name, matrix in (("w_gate_up", weights.gate_up), ("w_down", weights.down)):
        if matrix.straight is not None:
            block_of(matrix.straight, f"{name}.")
    check_shapes(x, _gathered_types(weights, sharding, options) if gathers else weights, options)
    check_choices(x, topk_weights, topk_indices)
    check_interleaved(options.interleaved, options.activation, sharding)
    return _Checked(_Arrays(x, topk_weights, topk_indices, *weights), options)


def _gathered_types(weights: ExpertWeights, sharding: MoESharding, options: MlpOptions) -> ExpertWeights:
    """The shapes and dtypes of a device's weights once they are gathered over the `fsdp` axis."""
    if sharding.fsdp is None:
        return weights
    devices = sharding.size(sharding.fsdp)

    def gathered(part: jax.Array, spec: P) -> jax.ShapeDtypeStruct:
        axis = axis_split_over(sharding.fsdp, spec)
        return jax.ShapeDtypeStruct(
            tuple(size * devices if number == axis else size for number, size in enumerate(part.shape)), part.dtype
        )

    return map_matrices(gathered, weights, sharding.weight_specs(options.w_layout))


def interleave(array: ArrayLike, axis: int = -1) -> jax.Array:
    """Reorders features along `axis` from all gates, all ups (g0 g1 ... u0 u1 ...) to alternating (g0 u0 g1 u1 ...).

    Use it for w_gate_up and b_gate_up of a layer with `interleaved=True`, as a tensor axis requires.
    """
    array, axis = as_array("array", array), as_int("axis", axis)
    shape = array.shape
    check(len(shape) > 0, "array must have at least one axis, got [].")
    check(-len(shape) <= axis < len(shape), f"axis must be of the array's {len(shape)} axes, got {axis}.")
    axis %= len(shape)
    check(shape[axis] % 2 == 0, f"array must have 2 * I features along axis {axis}, got {list(shape)}.")
    halves = jnp.reshape(array, (*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :]))
    return jnp.reshape(jnp.swapaxes(halves, axis, axis + 1), shape)
