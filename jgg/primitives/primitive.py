"""Makes JAX primitives; under `vmap` a primitive runs once for all elements or for one element after the other."""

import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jgg.core.manual_axes import alike


def define_primitive(
    name: str,
    out_types: Callable[..., Sequence[jax.Array]],
    compute: Callable[..., Sequence[jax.Array]],
    *,
    jvp: Callable[..., object],
    transpose: Callable[..., object] | None = None,
    merge_batch: Callable[..., Sequence[jax.Array] | None] | None = None,
) -> Primitive:
    """A primitive with several results, which is bound to arrays that vary over the same mesh axes.

    Args:
      name: the name that a jaxpr shows.
      out_types: (*operand types, **parameters) -> shape and dtype of each result; parameters are hashable.
      compute: (*operands, **parameters) -> results, on every platform that gets no lowering of its own.
      jvp: (operands, tangents, **parameters) -> results and their tangents.
      transpose: (cotangents, *operands, **parameters) -> the cotangent of each operand in which results are linear.
      merge_batch: (operands, which of them have a leading batch axis, **parameters) -> results with that axis, or None
        if they must be computed in a loop.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def types(*avals: ShapedArray, **params: Hashable) -> list[ShapedArray]:
        return [_type_like(avals[0], result) for result in out_types(*avals, **params)]

    def batch(
        operands: Sequence[jax.Array], axes: Sequence[int | None], **params: Hashable
    ) -> tuple[Sequence[jax.Array], list[int]]:
        batched = [axis is not None for axis in axes]
        operands = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(operands, axes, strict=True)]
        outputs = _on_each_device(functools.partial(batch_on_device, batched, **params), operands, batched)
        return outputs, [0] * len(outputs)

    def batch_on_device(batched: Sequence[bool], *operands: jax.Array, **params: Hashable) -> Sequence[jax.Array]:
        outputs = merge_batch(operands, batched, **params) if merge_batch else None
        return loop(operands, batched, **params) if outputs is None else outputs

    def loop(operands: Sequence[jax.Array], batched: Sequence[bool], **params: Hashable) -> Sequence[jax.Array]:
        def one(slices: Sequence[jax.Array]) -> Sequence[jax.Array]:
            rest = iter(slices)
            arrays = alike([next(rest) if b else a for a, b in zip(operands, batched, strict=True)])
            return primitive.bind(*arrays, **params)

        # an operand without a batch axis, such as weights, is shared and not copied
        return jax.lax.map(one, [a for a, b in zip(operands, batched, strict=True) if b])

    primitive.def_abstract_eval(types)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=True))
    return primitive


def _on_each_device[Results](
    function: Callable[..., Results], operands: Sequence[jax.Array], batched: Sequence[bool]
) -> Results:
    """The results of function(*operands); if explicit mesh axes split the batch, each device computes its own part."""
    splits = {jax.typeof(a).sharding.spec[0] for a, b in zip(operands, batched, strict=True) if b} - {None}
    if not splits:
        return function(*operands)
    (split,) = splits
    split = jax.P(split)
    return jax.shard_map(
        function,
        in_specs=tuple(split if b else jax.P() for b in batched),
        out_specs=split,
        axis_names=set(split[0]) if isinstance(split[0], tuple) else {split[0]},
    )(*operands)


def _type_like(aval: ShapedArray, result: jax.Array) -> ShapedArray:
    """An array type of the result's shape and dtype that varies over the mesh axes that `aval` varies over."""
    sharding = aval.sharding.update(spec=jax.P(*[None] * len(result.shape)))
    return aval.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)
