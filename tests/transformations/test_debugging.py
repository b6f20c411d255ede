"""grouped_gemm and moe_mlp where JAX looks for mistakes: no jit, debug_nans, checkify."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jgg
from jgg.layers import MoELayer
from tests.support.cases import EVERYTHING, Case
from tests.support.closeness import assert_close
from tests.support.marks import PLAIN_JAX, TRITON, on, thorough_but
from tests.support.transforms import SHARED_WEIGHTS, SMALL, WITH_EVERYTHING, arguments_of, moe_arguments, passes_of

NAN_PAST_THE_GROUPS = Case("tail", num_rows=12, poison="tail", **SMALL, **EVERYTHING)


NAN_IN_A_GROUP = Case("rows", num_rows=12, poison="rows", **SMALL, **EVERYTHING)


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
@pytest.mark.parametrize(
    "case", thorough_but(("grouped_gemm", "dw", "contracted", "moe_mlp in FP8"), WITHOUT_NAN, pytest.mark.sweep)
)
def test_debug_nans_of_eager_gradients(case, implementation):
    """No NaN where it is only in rows of no group, though those are kept for the backward pass."""
    function, dtypes = case
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
        pytest.param("xla", False, marks=pytest.mark.sweep),
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


@pytest.mark.parametrize("quantization", [None, pytest.param(jgg.Fp8(), marks=pytest.mark.sweep)])
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


@pytest.mark.parametrize("options", thorough_but(("sigmoid",), ROUTERS, pytest.mark.sweep))
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
