"""Makes JAX primitives; under `vmap` a primitive runs once for all elements or for one element after the other."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jgg.core.manual_axes import vary_over, varying_axes


def define_primitive(
    name: str,
    out_types: Callable,
    compute: Callable,
    *,
    jvp: Callable,
    transpose: Callable | None = None,
    merge_batch: Callable | None = None,
):
    """A primitive with several results, and the function that binds it.

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

    def bind(*operands, **params):
        axes = varying_axes(*operands)
        return primitive.bind(*(vary_over(axes, operand) for operand in operands), **params)

    def types(*avals, **params):
        return [_type_like(avals[0], result) for result in out_types(*avals, **params)]

    def batch(operands, axes, **params):
        batched = [axis is not None for axis in axes]
        operands = [jnp.moveaxis(a, axis, 0) if b else a for a, axis, b in zip(operands, axes, batched, strict=True)]
        outputs = _on_each_device(functools.partial(batch_on_device, batched, **params), operands, batched)
        return outputs, [0] * len(outputs)

    def batch_on_device(batched, *operands, **params):
        outputs = merge_batch(operands, batched, **params) if merge_batch else None
        return loop(operands, batched, **params) if outputs is None else outputs

    def loop(operands, batched, **params):
        def one(slices):
            slices = iter(slices)
            return bind(*(next(slices) if b else a for a, b in zip(operands, batched, strict=True)), **params)

        # an operand without a batch axis, such as weights, is shared and not copied
        return jax.lax.map(one, [a for a, b in zip(operands, batched, strict=True) if b])

    primitive.def_abstract_eval(types)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=True))
    return primitive, bind


def _on_each_device(function, operands, batched):
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


def _type_like(aval, result):
    """An array type of the result's shape and dtype that varies over the mesh axes that `aval` varies over."""
    sharding = aval.sharding.update(spec=jax.P(*[None] * len(result.shape)))
    return aval.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)
