"""grouped_gemm and moe_mlp in JAX's modes: debugging, 64 bits, meshes, abstract values, other derivatives."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jgg
from jgg.layers import MoELayer
from tests.support.cases import EVERYTHING, Case, make_data
from tests.support.closeness import assert_close
from tests.support.marks import EVERYWHERE, INTERPRET, PLAIN_JAX, TRITON, on, thorough_but
from tests.support.transforms import (
    NAMES,
    ORDER,
    SMALL,
    WITH_EVERYTHING,
    differentiable,
    expected_outputs,
    passes_of,
)

NAN_PAST_THE_GROUPS = Case("tail", num_rows=12, poison="tail", **SMALL, **EVERYTHING)
NAN_IN_A_GROUP = Case("rows", num_rows=12, poison="rows", **SMALL, **EVERYTHING)
SHARED_WEIGHTS = [None if name in ("w", "bias") else 0 for name in ORDER]


def arguments_of(case):
    data = make_data(case, "float32")
    arrays = {name: getattr(data, name) for name in ORDER}
    with np.errstate(invalid="ignore"):
        return [jnp.asarray(array) for array in arrays.values()], list(expected_outputs(case, **arrays))


def moe_arguments():
    """x, w_gate_up, w_down and logits."""
    rng = np.random.default_rng(0)
    shapes = (6, 8), (4, 10, 8), (4, 8, 5), (6, 4)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def moe(implementation):
    def layer(x, w_gate_up, w_down, logits):
        routing = jgg.route(logits, 2)
        return jgg.moe_mlp(x, w_gate_up, w_down, routing, precision="highest", implementation=implementation)

    return layer


@on(PLAIN_JAX, None, TRITON)
def test_disable_jit(implementation):
    arguments, expected = arguments_of(WITH_EVERYTHING)
    with jax.disable_jit():
        assert_close(list(passes_of(WITH_EVERYTHING, implementation)(*arguments)), expected)


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
@on(None, TRITON)
def test_debug_nans(jit, implementation):
    """NaN in a group is found, and none where there are rows that no group has."""
    function = jit(passes_of(WITH_EVERYTHING, implementation))
    past_the_groups, expected = arguments_of(NAN_PAST_THE_GROUPS)
    in_a_group, _ = arguments_of(NAN_IN_A_GROUP)
    with jax.debug_nans(True):
        assert_close(list(function(*past_the_groups)), expected)
        with pytest.raises(FloatingPointError, match="nan"):
            function(*in_a_group)


SIZES = jnp.array([3, 0, 5])  # of 12 rows
INDICES = jnp.array([5, 2, 7, 0, 1, 6, 4, 3, 8, 11, 10, 9])  # rows of no group are those of tokens 4 and 5
ALL_OPTIONS = {"topk": 2, "gather_indices": INDICES, "permute_x": True, "permute_y": True}
CONTRACTED = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
SHAPES = {
    "tokens": (6, 4),
    "x": (12, 4),
    "dy": (12, 5),
    "topk_weights": (12,),
    "w": (3, 5, 4),
    "bias": (3, 5),
    "w_gate_up": (3, 6, 4),
    "w_down": (3, 4, 3),
    "choices": (6, 2),
}


def layer_of_some_tokens(tokens, w_gate_up, w_down, choices, **options):
    routing = jgg.Routing(choices, jnp.zeros((6, 2), jnp.int32), SIZES, INDICES)
    return jgg.moe_mlp(tokens, w_gate_up, w_down, routing, **options)


def product_of_some_rows(tokens, w, topk_weights, bias, **options):
    return jgg.grouped_gemm(
        tokens,
        w,
        SIZES,
        topk_weights=topk_weights,
        bias=bias,
        preferred_element_type="float32",
        **ALL_OPTIONS,
        **options,
    )


def derivative_in_rows(dy, w, topk_weights, **options):
    return jgg.grouped_gemm_dx(dy, w, group_sizes=SIZES, topk_weights=topk_weights, **ALL_OPTIONS, **options)


def derivative_in_weights(tokens, dy, topk_weights, **options):
    return jgg.grouped_gemm_dw(tokens, dy, group_sizes=SIZES, topk_weights=topk_weights, **ALL_OPTIONS, **options)


def product_in_order(x, w, topk_weights, **options):
    return jgg.grouped_gemm(x, w, SIZES, topk_weights=topk_weights, **options)


def product_alone(tokens, w, bias, **options):
    return jgg.grouped_gemm_forward(tokens, w, group_sizes=SIZES, bias=bias, **ALL_OPTIONS, **options)


def ragged_dot(x, w, **options):
    return jgg.ragged_dot(x, w.mT, SIZES, **options)


def contracted_rows(x, dy, **options):
    return jgg.ragged_dot_general(x, dy, SIZES, CONTRACTED, **options)


# the function, the dtypes of its arrays, one or each one's own
WITHOUT_NAN = {
    "grouped_gemm": (product_of_some_rows, "bfloat16"),
    "in float32": (product_of_some_rows, "float32"),
    "in order": (product_in_order, "float16"),
    "forward": (product_alone, "float32"),
    "dx": (derivative_in_rows, "float32"),
    "dw": (derivative_in_weights, "float32"),
    "ragged_dot": (ragged_dot, "float32"),
    "ragged_dot of two dtypes": (ragged_dot, ("bfloat16", "float32")),
    "contracted": (contracted_rows, ("bfloat16", "float32")),
    "moe_mlp": (layer_of_some_tokens, "float32"),
    "moe_mlp in FP8": (functools.partial(layer_of_some_tokens, quantization=jgg.Fp8()), "bfloat16"),
}


@on(PLAIN_JAX, None, TRITON)
@pytest.mark.parametrize(("function", "dtypes"), WITHOUT_NAN.values(), ids=WITHOUT_NAN)
def test_debug_nans_of_eager_gradients(function, dtypes, implementation):
    """No NaN where it is only in rows of no group, though those are kept for the backward pass."""
    names = [name for name in inspect.signature(function).parameters if name in SHAPES]
    dtypes = [dtypes] * len(names) if isinstance(dtypes, str) else dtypes
    arrays = []
    for name, dtype in zip(names, dtypes, strict=True):
        array = np.ones(SHAPES[name])
        if not name.startswith(("w", "bias")):
            array[len(array) * 2 // 3 :] = np.nan
        arrays.append(jnp.asarray(array, "float32" if name == "choices" else dtype))
    with jax.debug_nans(True):
        y, vjp = jax.vjp(functools.partial(function, implementation=implementation), *arrays)
        gradients = vjp(jnp.ones_like(y))
    assert all(jnp.isfinite(gradient).all() for gradient in (y, *gradients))


@pytest.mark.parametrize(
    ("implementation", "batched"),
    [
        pytest.param("xla", False, marks=pytest.mark.thorough),
        (None, False),
        (None, True),
        pytest.param("triton", True, marks=pytest.mark.gpu),
    ],
)
def test_checkify_reports_nothing_that_is_right(implementation, batched):
    """Indices out of range are how rows are left out, which must not look like a mistake."""
    # JAX cannot check the indices of any gather under vmap: IndexError
    errors = checkify.float_checks | checkify.user_checks if batched else checkify.all_checks
    arguments, expected = arguments_of(WITH_EVERYTHING)
    function = passes_of(WITH_EVERYTHING, implementation)
    if batched:
        function = jax.vmap(function, SHARED_WEIGHTS)
        arguments = [a if axis is None else a[None] for a, axis in zip(arguments, SHARED_WEIGHTS, strict=True)]
        expected = [output[None] for output in expected]
    error, outputs = jax.jit(checkify.checkify(function, errors))(*arguments)
    error.throw()
    assert_close(list(outputs), expected)


@pytest.mark.parametrize("quantization", [None, jgg.Fp8()])
@on(PLAIN_JAX, None, TRITON)
def test_checkify_reports_no_choice_without_a_row(implementation, quantization):
    *floats, logits = moe_arguments()
    routing = jgg.route(logits, 2)
    routing = routing._replace(gather_indices=routing.gather_indices[:9])

    def loss(*floats):
        y = jgg.moe_mlp(*floats, routing, quantization=quantization, implementation=implementation)
        return jnp.sum(jnp.sin(y))

    error, _ = jax.jit(checkify.checkify(jax.grad(loss, (0, 1, 2)), checkify.all_checks))(*floats)
    error.throw()


ROUTERS = {
    "softmax": {},
    "softmax as it is": {"normalize": False},
    "topk_softmax": {"score": "topk_softmax"},
    "sigmoid": {"score": "sigmoid", "use_selection_bias": True, "num_groups": 2, "topk_groups": 1},
    "sigmoid as it is": {"topk": 1, "score": "sigmoid", "normalize": False, "scale_input": True},
}


@pytest.mark.parametrize(
    "options",
    thorough_but(("softmax", "sigmoid"), ROUTERS),
)
@on(PLAIN_JAX, None, TRITON)
def test_checkify_reports_nothing_in_the_layer(implementation, options):
    """With its router, shared experts and losses, and their gradients."""
    layer = MoELayer(8, 5, 4, **({"topk": 2, "shared_features": 6, "use_bias": True} | options))
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in layer.shapes.items()}
    x, selection_bias = jnp.asarray(rng.standard_normal((6, 8)), jnp.float32), jnp.linspace(-0.1, 0.1, 4)

    def loss(params, x):
        bias = selection_bias if layer.use_selection_bias else None
        y, metrics = layer.apply(params, x, bias, implementation=implementation)
        new_bias = jgg.update_selection_bias(selection_bias, metrics.group_sizes, 0.1)
        return jnp.sum(jnp.sin(y)) + metrics.load_balancing_loss + metrics.router_z_loss, new_bias

    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    error, outputs = jax.jit(checkify.checkify(gradient, checkify.all_checks))(params, x)
    error.throw()
    assert all(jnp.isfinite(output).all() for output in jax.tree.leaves(outputs))


def test_checkify_reports_nan():
    arguments, _ = arguments_of(NAN_IN_A_GROUP)
    function = passes_of(WITH_EVERYTHING, None)
    error, _ = jax.jit(checkify.checkify(function, checkify.float_checks))(*arguments)
    with pytest.raises(checkify.JaxRuntimeError, match="nan generated by primitive"):
        error.throw()


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: lambda *a: jax.lax.map(lambda a: f(*a), a)])
def test_check_beside_the_product_under(transform):
    """`jgg.check` in a model's code, where the values of one element of a batch are bad."""
    x, w = jnp.ones((2, 5, 3)), jnp.ones((2, 2, 4, 3))

    def function(x, w, group_sizes):
        jgg.check(group_sizes, len(x))
        return jgg.grouped_gemm(x, w, group_sizes)

    function = jax.jit(checkify.checkify(transform(function)))
    error, _ = function(x, w, jnp.array([[2, 3], [1, 1]]))
    error.throw()
    error, _ = function(x, w, jnp.array([[2, 3], [3, 3]]))
    with pytest.raises(checkify.JaxRuntimeError, match="group_sizes must sum to at most M, 5, got 6"):
        error.throw()


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


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
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


@EVERYWHERE
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


def test_linearize_and_second_order_of_plain_jax():
    function, arrays, _ = differentiable(WITH_EVERYTHING, "xla")
    x, rest = arrays["x"], {name: array for name, array in arrays.items() if name != "x"}

    def of_x(x):
        return function({"x": x, **rest})

    y, linear = jax.linearize(of_x, x)
    by_jvp = jax.jvp(of_x, (x,), (jnp.cos(x),))
    assert_close([y, linear(jnp.cos(x))], list(by_jvp))
    forward, reverse = jax.jit(jax.jacfwd(of_x))(x), jax.jit(jax.jacrev(of_x))(x)
    assert_close(forward, reverse)
    # y is linear in x, so that only the sine has a second derivative
    hessian = jax.jit(jax.hessian(lambda x: jnp.sum(jnp.sin(of_x(x)))))(x)
    expected = -np.einsum("mn,mnij,mnkl->ijkl", np.sin(y), reverse, reverse)
    assert_close(hessian, expected, 1e-4)


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
@pytest.mark.parametrize("kind", ["layer", pytest.param("product", marks=pytest.mark.thorough)])
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
