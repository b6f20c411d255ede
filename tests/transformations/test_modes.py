"""grouped_gemm and moe_mlp in JAX's modes: 64 bits, meshes, abstract values, other derivatives."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import jgg
from tests.support.cases import make_data
from tests.support.closeness import assert_close
from tests.support.marks import INTERPRET, PLAIN_JAX, RARELY_INTERPRETED, TRITON, on
from tests.support.transforms import (
    NAMES,
    ORDER,
    SHARED_WEIGHTS,
    WITH_EVERYTHING,
    arguments_of,
    differentiable,
    moe,
    moe_arguments,
    passes_of,
)


@pytest.mark.parametrize("axes", [None, SHARED_WEIGHTS], ids=["one", "vmap"])
@on(INTERPRET, TRITON)
def test_enable_x64(axes, implementation):
    arguments, expected = arguments_of(WITH_EVERYTHING)
    function = passes_of(WITH_EVERYTHING, implementation)
    with jax.enable_x64(True):
        arguments = [a.astype(jnp.int64) if a.dtype == jnp.int32 else a for a in arguments]
        if axes is not None:
            function = jax.vmap(function, axes)
            arguments = [a if axis is None else a[None] for a, axis in zip(arguments, axes, strict=True)]
            expected = [output[None] for output in expected]
        outputs = jax.jit(function)(*arguments)
    assert [output.dtype for output in outputs] == [jnp.float32] * len(outputs)
    assert_close(list(outputs), expected)


@on(PLAIN_JAX, None, TRITON)
def test_enable_x64_in_the_layer(implementation):
    arrays = moe_arguments()
    gradient = jax.grad(lambda arrays: jnp.sum(jnp.sin(moe(implementation)(*arrays))))
    expected = jax.jit(gradient)(arrays)
    with jax.enable_x64(True):
        assert_close(jax.jit(gradient)(arrays), expected)


@on(PLAIN_JAX, None)
def test_cotangents_of_integers_are_float0(implementation):
    arguments, _ = arguments_of(WITH_EVERYTHING)
    floats, integers = dict(zip(NAMES, arguments, strict=False)), dict(zip(ORDER[4:6], arguments[4:6], strict=True))

    def loss(floats, integers):
        return jnp.sum(jgg.grouped_gemm(**floats, **integers, **WITH_EVERYTHING.options, implementation=implementation))

    _, d_integers = jax.eval_shape(jax.grad(loss, argnums=(0, 1), allow_int=True), floats, integers)
    assert jax.tree.map(lambda g: g.dtype, d_integers) == dict.fromkeys(integers, jax.dtypes.float0)

    x, *ws, logits = moe_arguments()
    of_routing = jax.grad(lambda r: jnp.sum(jgg.moe_mlp(x, *ws, r, implementation=implementation)), allow_int=True)
    d_routing = jax.eval_shape(of_routing, jax.eval_shape(lambda logits: jgg.route(logits, 2), logits))
    assert [g.dtype for g in d_routing] == [jnp.float32, *[jax.dtypes.float0] * 3]


@pytest.mark.parametrize(
    "axis_type", [jax.sharding.AxisType.Explicit, pytest.param(jax.sharding.AxisType.Auto, marks=pytest.mark.sweep)]
)
@on(PLAIN_JAX, None, TRITON)
def test_mesh_of_one_device(implementation, axis_type):
    """Alone, under vmap and in shard_map; `jax.make_mesh` makes explicit axes unless told otherwise."""
    arguments, expected = arguments_of(WITH_EVERYTHING)
    function = passes_of(WITH_EVERYTHING, implementation)
    rows, shared = jax.P("data"), jax.P()
    by_rows = tuple(shared if axis is None else rows for axis in SHARED_WEIGHTS)
    sharded = jax.shard_map(function, in_specs=by_rows, out_specs=(rows, rows, shared, rows, shared))

    def all_ways(arguments, by_rows):
        batch = [a if axis is None else a[None] for a, axis in zip(arguments, SHARED_WEIGHTS, strict=True)]
        outputs = jax.vmap(function, SHARED_WEIGHTS)(*batch)
        return function(*arguments), [output[0] for output in outputs], sharded(*by_rows)

    mesh = jax.make_mesh((1,), ("data",), (axis_type,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        by_rows = [jax.device_put(a, jax.NamedSharding(mesh, spec)) for a, spec in zip(arguments, by_rows, strict=True)]
        for outputs in jax.jit(all_ways)(jax.device_put(arguments, jax.NamedSharding(mesh, shared)), by_rows):
            assert_close(list(outputs), expected)


@RARELY_INTERPRETED
def test_abstract_values(implementation):
    """Shapes and jaxprs come without data, and for any GPU without one."""
    arguments, expected = arguments_of(WITH_EVERYTHING)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments]
    function = passes_of(WITH_EVERYTHING, implementation)
    with jgg.target(90) if implementation is None else contextlib.nullcontext():
        outputs = jax.eval_shape(function, *shapes)
        jaxpr = jax.make_jaxpr(function)(*shapes)
    assert [(o.shape, o.dtype) for o in outputs] == [(e.shape, jnp.float32) for e in expected]
    assert [aval.shape for aval in jaxpr.out_avals] == [e.shape for e in expected]
    if implementation == "xla":
        assert "custom_vjp" not in str(jaxpr)


@on(None, TRITON)
def test_jacobian_of_the_kernels(implementation):
    """Reverse mode only, by vmap over dy alone; forward mode says why not."""
    function, arrays, _ = differentiable(WITH_EVERYTHING, implementation)
    plain, _, _ = differentiable(WITH_EVERYTHING, "xla")
    got, expected = (jax.jit(jax.jacrev(f))(arrays) for f in (function, plain))
    assert_close(got, expected)
    with pytest.raises(TypeError, match=r"forward-mode .* custom_vjp"):
        jax.jvp(function, (arrays,), (arrays,))


def second_derivative(function, arguments):
    def slope(*arguments):
        gradients = jax.grad(lambda *floats: jnp.sum(jnp.sin(function(*floats))), range(len(arguments)))(*arguments)
        return sum(jnp.sum(jnp.cos(gradient)) for gradient in jax.tree.leaves(gradients))

    return jax.jit(jax.grad(slope, range(len(arguments))))(*arguments)


@on(None, TRITON)
@pytest.mark.parametrize("kind", ["product", pytest.param("layer", marks=pytest.mark.sweep)])
def test_second_order_of_the_kernels(kind, implementation):
    """There are second derivatives: plain JAX differentiates what the kernels compute backwards."""
    names = implementation, "xla"
    if kind == "layer":
        functions, arguments = map(moe, names), moe_arguments()
    else:
        functions, (arrays, *_), _ = zip(*(differentiable(WITH_EVERYTHING, name) for name in names), strict=True)
        arguments = [arrays]
    got, expected = (second_derivative(function, arguments) for function in functions)
    assert_close(got, expected, 1e-4)


@pytest.mark.sweep
@on(None, TRITON)
def test_derivative_of_a_product_alone(implementation):
    """Right even where JAX differentiates the product and not the function that has a rule for it."""
    function, arrays, _ = differentiable(WITH_EVERYTHING, "xla")
    case, data = WITH_EVERYTHING, make_data(WITH_EVERYTHING, "float32")
    fixed = {"group_sizes": jnp.asarray(data.group_sizes), "gather_indices": jnp.asarray(data.gather_indices)}

    def product(arrays):
        return jgg.grouped_gemm_forward(
            **arrays, **fixed, **case.options, implementation=implementation, precision="highest"
        )

    def gradients(function):
        return jax.jit(jax.vmap(jax.grad(lambda arrays: jnp.sum(jnp.sin(function(arrays))))))

    batch = jax.tree.map(lambda a: jnp.stack([a, -a]), arrays)
    assert_close(gradients(product)(batch), gradients(function)(batch))
    _, tangent = jax.jvp(product, (arrays,), (arrays,))
    assert_close(tangent, jax.jvp(function, (arrays,), (arrays,))[1])
