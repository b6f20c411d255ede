"""vmap: each element of a batch gets the oracle's values, and shared weights are not copied."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.layers
from tests.support import moe_oracle, oracle
from tests.support.cases import EVERYTHING, Case
from tests.support.closeness import assert_close
from tests.support.comparison import small_configs
from tests.support.marks import INTERPRET, KERNELS, PLAIN_JAX, RARELY_INTERPRETED, on, thorough_but
from tests.support.moe_runs import forward, indices_of
from tests.support.passes import forward_and_backward
from tests.support.transforms import IN_ORDER, ORDER, SMALL, WITH_EVERYTHING, batch_of, expected_outputs, passes_of

ROUTING = ("topk_weights", "group_sizes", "gather_indices")
# what has a batch axis; the rest is shared
BATCHED = {
    "everything": ORDER,
    "rows": ("x", "dy"),
    "rows-and-routing": ("x", *ROUTING, "dy"),
    "rows-and-weights": ("x", "w", "dy"),
    "rows-and-bias": ("x", "bias", "dy"),
    "routing": ROUTING,
    **{f"only-{name}": (name,) for name in ("x", "w", "dy")},
}


def elements(arguments, axes, count):
    """The arguments of each element of a batch, NumPy arrays."""
    for i in range(count):
        yield i, [np.asarray(a if axis is None else a[i]) for a, axis in zip(arguments, axes, strict=True)]


def assert_elements_right(got, case, arguments, axes, count=2):
    """Compares y and the gradients of each element, or the first of these, with the oracle's."""
    for i, one in elements(arguments, axes, count):
        assert_close([output[i] for output in got], list(expected_outputs(case, *one))[: len(got)])


def assert_right_under_vmap(case, implementation, batched, size=3):
    """Forward and backward under vmap, `batched` last in memory for one array and first for the others."""
    batch = batch_of(case, size)
    arguments = [batch[name] if name in batched else batch[name][0] for name in ORDER]
    axes = [(1 if name == "x" else 0) if name in batched else None for name in ORDER]
    moved = [a if axis is None else jnp.moveaxis(a, 0, axis) for a, axis in zip(arguments, axes, strict=True)]
    got = jax.jit(jax.vmap(passes_of(case, implementation), axes))(*moved)
    assert_elements_right(got, case, arguments, axes, size)


# which arrays are shared changes how a product is merged; test_generated.py draws more such sets at every change
OFTEN = ("everything", "rows-and-routing", "only-w")


@pytest.mark.parametrize("batched", thorough_but(OFTEN, BATCHED, pytest.mark.sweep))
def test_any_argument(batched):
    assert_right_under_vmap(WITH_EVERYTHING, None, batched)


def test_any_argument_of_plain_jax():
    assert_right_under_vmap(WITH_EVERYTHING, "xla", BATCHED["rows-and-routing"], size=2)


# in the merged product, what the kernels leave unwritten shows as NaN or as whatever the memory held
@KERNELS
@pytest.mark.parametrize(
    ("permute_x", "permute_y", "batched"),
    [
        pytest.param(x, y, batched, marks=[pytest.mark.sweep] * ((batched == "everything") != (x == y)))
        for batched in ("everything", "rows-and-routing")
        for x in (False, True)
        for y in (False, True)
    ],
)
def test_every_order_of_rows(permute_x, permute_y, batched, implementation):
    """With NaN in the rows past an element's groups, which in the merged product lie between two groups."""
    options = EVERYTHING | {"permute_x": permute_x, "permute_y": permute_y}
    case = Case("order", num_rows=12, poison="tail", **SMALL, **options)
    assert_right_under_vmap(case, implementation, BATCHED[batched], size=2)


@RARELY_INTERPRETED
@pytest.mark.parametrize(
    "sizes", [[[0], [32]], [[1, 1], [60, 4], [30, 33]], [[0, 40], [0, 0], [33, 0]]], ids=["empty", "more", "none"]
)
def test_fewer_rows_in_groups_than_there_are(sizes, implementation):
    """In the merged product of elements with their own weights, rows of no group lie between groups."""
    num_rows = 32 if len(sizes) == 2 else 64
    case = Case("gaps", sizes[0], num_rows, 8, 12, **EVERYTHING)
    batch = batch_of(case, len(sizes)) | {"group_sizes": jnp.array(sizes, jnp.int32)}
    arguments = [batch[name] for name in ORDER]
    got = jax.jit(jax.vmap(passes_of(case, implementation)))(*arguments)
    assert_elements_right(got, case, arguments, [0] * len(ORDER), len(sizes))


LAYER = jgg.layers.MoELayer(8, 8, 4, 2, shared_features=4, use_shared_gate=True)
PARAMS = {name: jnp.ones(shape) for name, shape in LAYER.shapes.items()}
WITHOUT_TOKENS = {
    "router_logits": lambda x: jgg.router_logits(x, PARAMS["w_router"]),
    "bfloat16 logits": lambda x: jgg.router_logits(x.astype("bfloat16"), PARAMS["w_router"]),
    "router": lambda x: jgg.route(x, 2, score="sigmoid", num_groups=2, topk_groups=1).topk_weights,
    "few tokens' router": lambda x: jgg.route(x, 2).topk_weights,
    "product": lambda x: jgg.grouped_gemm(x, PARAMS["w_down"], jnp.zeros(4, jnp.int32), w_layout="ekn"),
    "layer": lambda x: LAYER.apply(PARAMS, x)[0],
    "layer in FP8": lambda x: LAYER.apply(PARAMS, x, quantization=jgg.Fp8())[0],
    "losses": lambda x: jgg.router_z_loss(x) + jgg.load_balancing_loss(x, jnp.zeros((len(x), 2), jnp.int32)),
}


@pytest.mark.parametrize("function", WITHOUT_TOKENS.values(), ids=WITHOUT_TOKENS)
@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0), (2, 3, 0)], ids=str)
def test_without_tokens(shape, function):
    mapped, gradient = function, jax.grad(lambda x: jnp.sum(function(x)))
    for _ in shape[1:]:
        mapped, gradient = jax.vmap(mapped), jax.vmap(gradient)
    got, of_ones = (jax.eval_shape(mapped, jnp.ones((*sizes, 8))).shape for sizes in (shape, [1] * len(shape)))
    assert got == (*shape, *of_ones[len(shape) :])[: len(of_ones)]
    assert jax.eval_shape(gradient, jnp.ones((*shape, 8))).shape == (*shape, 8)


@on(INTERPRET, PLAIN_JAX, None)
def test_layers_that_drop_tokens(implementation):
    """Each element with its own weights and choices; some choices name no expert."""
    runs = [moe_oracle.make(seed=seed, tokens=24, features=8, hidden=8, experts=3) for seed in range(2)]
    for seed, (_, chosen, _) in enumerate(runs):
        chosen[seed::2] = 3  # no such expert
    floats, chosen, dy = jax.tree.map(lambda *arrays: jnp.stack(arrays), *runs)

    @jax.jit
    @jax.vmap
    def run(floats, chosen, dy):
        options = {"precision": "highest", "implementation": implementation}
        return forward_and_backward(lambda floats: forward(floats, indices_of(chosen, 3), **options))(dy, floats)

    got = run(floats, chosen, dy)
    for i, one in enumerate(runs):
        want = moe_oracle.expected(*one, "swiglu", False, "enk")
        assert_close(jax.tree.map(lambda a, i=i: a[i], got), want, 1e-4)


@KERNELS
@pytest.mark.parametrize("batched", ["everything", "rows-and-routing"])
def test_bad_indices_stay_in_their_element(batched, implementation):
    """A position past an element's rows is the next element's first."""
    batch = batch_of(WITH_EVERYTHING, 2)
    batch["gather_indices"] = batch["gather_indices"].at[0, :4].set(jnp.array([12, -1, -(2**31), 13], jnp.int32))
    axes = [0 if name in BATCHED[batched] else None for name in ORDER]
    arguments = [batch[name] if axis == 0 else batch[name][0] for name, axis in zip(ORDER, axes, strict=True)]
    got = jax.jit(jax.vmap(passes_of(WITH_EVERYTHING, implementation), axes))(*arguments)
    for i, one in elements(arguments, axes, 2):
        named = dict(zip(ORDER[:-1], one, strict=False))
        y_is_specified = np.broadcast_to(oracle.specified(**named, **WITH_EVERYTHING.options)[0], got[0][i].shape)
        y, *gradients = expected_outputs(WITH_EVERYTHING, *one)
        assert_close(got[0][i][y_is_specified], y[y_is_specified])
        assert_close([output[i] for output in got[1:]], gradients)


@RARELY_INTERPRETED
def test_gradient_of_shared_weights_through_vmap(implementation):
    batch = batch_of(WITH_EVERYTHING, 2)
    shared = {name: batch[name][0] for name in ("topk_weights", "bias", "group_sizes", "gather_indices")}
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}

    @jax.jit
    def gradient(w):
        def forward(x, dy):
            options = {**shared, **WITH_EVERYTHING.options, **configs, "implementation": implementation}
            return jnp.sum(jgg.grouped_gemm(x, w, **options, precision="highest") * dy)

        return jnp.sum(jax.vmap(forward)(batch["x"], batch["dy"]))

    got = jax.grad(gradient)(batch["w"][0])
    arguments = {**shared, **WITH_EVERYTHING.options, "w": batch["w"][0]}
    expected = sum(
        oracle.gradients(np.asarray(batch["dy"][i]), **jax.tree.map(np.asarray, arguments | {"x": batch["x"][i]})).w
        for i in range(2)
    )
    assert_close(got, expected)


@RARELY_INTERPRETED
def test_nested_vmap(implementation):
    outer, inner = 2, 3
    batch = batch_of(IN_ORDER, outer * inner)
    nested = {name: array.reshape(outer, inner, *array.shape[1:]) for name, array in batch.items()}
    # the outer axis has its own weights, the inner one its own rows
    arguments = [nested["w"][:, 0] if name == "w" else nested[name] for name in ORDER]
    inner_axes = [None if name == "w" else 0 for name in ORDER]
    function = passes_of(IN_ORDER, implementation)
    got = jax.jit(jax.vmap(jax.vmap(function, inner_axes)))(*arguments)
    for i in range(outer):
        for j in range(inner):
            one = [np.asarray(a[i] if axis is None else a[i, j]) for a, axis in zip(arguments, inner_axes, strict=True)]
            assert_close([output[i, j] for output in got], list(expected_outputs(IN_ORDER, *one)))


@pytest.mark.parametrize("batched", ["everything", "rows-and-routing"])
def test_products_alone(batched):
    batch = batch_of(WITH_EVERYTHING, 2)
    axes = [0 if name in BATCHED[batched] else None for name in ORDER]
    arguments = [batch[name] if axis == 0 else batch[name][0] for name, axis in zip(ORDER, axes, strict=True)]

    def products(x, w, topk_weights, bias, group_sizes, gather_indices, dy):
        options = {"topk_weights": topk_weights, "gather_indices": gather_indices, "group_sizes": group_sizes}
        options |= {"precision": "highest", **WITH_EVERYTHING.options}
        y = jgg.grouped_gemm_forward(x, w, bias=bias, **options)
        return y, jgg.grouped_gemm_dx(dy, w, **options), jgg.grouped_gemm_dw(x, dy, **options)

    got = jax.jit(jax.vmap(products, axes))(*arguments)
    assert_elements_right(got, WITH_EVERYTHING, arguments, axes)


@on(PLAIN_JAX, None)
def test_ragged_dot_with_an_offset_for_each(implementation):
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((3, 18, 12)), jnp.float32)
    rhs = jnp.asarray(rng.standard_normal((2, 12, 20)), jnp.float32)
    sizes = jnp.array([[4, 0, 7, 2], [0, 18, 0, 0], [5, 5, 5, 1]], jnp.int32)
    offsets = jnp.array([1, 0, 2], jnp.int32)

    def dot(lhs, rhs, sizes, offset):
        options = {"precision": "highest", "implementation": implementation}
        return jgg.ragged_dot(lhs, rhs, sizes, group_offset=offset, **options)

    def batched(lhs, rhs):
        return jax.vmap(dot, (0, None, 0, 0))(lhs, rhs, sizes, offsets)

    dy = jnp.asarray(rng.standard_normal((3, 18, 20)), jnp.float32)
    y, d_lhs, d_rhs = jax.jit(forward_and_backward(batched))(dy, lhs, rhs)
    expected, lhs, rhs, sizes, dy = np.zeros(rhs.shape), *map(np.asarray, (lhs, rhs, sizes, dy))
    for i, offset in enumerate(np.asarray(offsets)):
        assert_close(y[i], oracle.ragged_dot(lhs[i], rhs, sizes[i], offset))
        assert_close(d_lhs[i], oracle.ragged_dot(dy[i], rhs.swapaxes(1, 2), sizes[i], offset))
        for group, rows in enumerate(oracle.group_ranges(sizes[i], 18)[offset : offset + 2]):
            expected[group] += lhs[i][rows].T @ dy[i][rows]
    assert_close(d_rhs, expected)


def lowered_for_cuda(function, *arguments):
    with jgg.target(90):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("batched", ["everything", "rows-and-routing"])
def test_a_batch_is_one_launch_of_each_kernel(batched):
    batch = batch_of(WITH_EVERYTHING, 3)
    one = [batch[name][0] for name in ORDER]
    arguments = [batch[name] if name in BATCHED[batched] else batch[name][0] for name in ORDER]
    axes = [0 if name in BATCHED[batched] else None for name in ORDER]
    function = passes_of(WITH_EVERYTHING, None)
    alone, merged = lowered_for_cuda(function, *one), lowered_for_cuda(jax.vmap(function, axes), *arguments)
    assert alone.count("@triton_kernel_call_ffi") == merged.count("@triton_kernel_call_ffi") > 3
    assert "stablehlo.while" not in merged


def test_a_batch_that_would_copy_rows_is_a_loop():
    struct = jax.ShapeDtypeStruct
    x, ws, group_sizes = struct((16, 24), "float32"), struct((3, 4, 40, 24), "float32"), struct((4,), "int32")
    program = lowered_for_cuda(jax.vmap(jgg.grouped_gemm, (None, 0, None)), x, ws, group_sizes)
    assert "stablehlo.while" in program
    assert "tensor<3x16x24xf32>" not in program
    assert "tensor<48x24xf32>" not in program


@pytest.mark.parametrize("implementation", ["xla", None])
@pytest.mark.parametrize("lowering", ["cpu", "cuda"])
def test_shared_weights_are_not_copied(lowering, implementation):
    """Nothing in the program is as large as two copies of w; dw, which each element has, is not asked for."""
    experts, features, batch, rows = 8, 64, 4, 16
    struct = jax.ShapeDtypeStruct
    x, w = struct((batch, rows, features), "float32"), struct((experts, features, features), "float32")

    def function(x, w, group_sizes):
        y, vjp = jax.vjp(lambda x: jgg.grouped_gemm(x, w, group_sizes, implementation=implementation), x)
        return y, vjp(jnp.sin(y))

    with jgg.target(90):
        traced = jax.jit(jax.vmap(function, (0, None, 0))).trace(x, w, struct((batch, experts), "int32"))
        program = traced.lower(lowering_platforms=(lowering,)).as_text()
    sizes = [math.prod(map(int, shape.split("x")[:-1])) for shape in re.findall(r"tensor<((?:\d+x)+)f32>", program)]
    assert max(sizes) == experts * features**2


def test_the_layer_with_shared_weights_is_no_loop():
    tokens, features, hidden, experts, topk = 16, 24, 20, 4, 2
    struct = jax.ShapeDtypeStruct
    weights = struct((experts, 2 * hidden, features), "bfloat16"), struct((experts, features, hidden), "bfloat16")

    def gradient(weights, x, routing):
        def loss(weights, x):
            return jnp.sum(jgg.moe_mlp(x, *weights, routing).astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(weights, x)

    def inputs(batch):
        shapes = {"topk_weights": (tokens, topk), "topk_indices": (tokens, topk)}
        shapes |= {"group_sizes": (experts,), "gather_indices": (tokens * topk,)}
        dtypes = {"topk_weights": "float32"}
        routing = {name: struct((batch, *shape), dtypes.get(name, "int32")) for name, shape in shapes.items()}
        return struct((batch, tokens, features), "bfloat16"), jgg.Routing(**routing)

    merged = lowered_for_cuda(jax.vmap(gradient, (None, 0, 0)), weights, *inputs(3))
    assert "@triton_kernel_call_ffi" in merged
    assert "stablehlo.while" not in merged
