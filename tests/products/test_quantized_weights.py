"""Products with one quantized operand: what they give with the dequantized one, whoever dequantizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.core.quantized import Format, QuantizedArray, quantize
from jgg.core.schedule import group_bounds
from jgg.launching.choice import How
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import LowRankTerm
from jgg.tuning.workloads import gemm, operands
from tests.support.closeness import largest_error
from tests.support.marks import PLAIN_JAX, on
from tests.support.packed import random_packed

SIZES = {"num_rows": 60, "in_features": 200, "out_features": 136, "num_experts": 5, "topk": 2}
PACKED = {"in_features": 224, "out_features": 160}  # which 128 does not divide
CASES = {
    "mxfp4's blocks": {"block": (32, 1)},
    "mxfp4's blocks, enk": {"block": (1, 32), "w_layout": "enk"},
    "packed": {"axis": -2},
    "packed, enk": {"axis": -1, "w_layout": "enk"},
    "packed along columns": {"axis": -1},
    "packed, gathered, scattered, weighted": {
        "axis": -2,
        "permute_x": True,
        "permute_y": True,
        "weighted": True,
        "biased": True,
    },
    "packed, many rows": {"axis": -2, "num_rows": 400},
    "deepseek's blocks": {"block": (128, 128)},
    "deepseek's blocks, enk": {"block": (128, 128), "w_layout": "enk"},
    "other blocks": {"block": (128, 32)},
    "blocks of one row": {"block": (1, 32)},
    "e5m2": {"block": (32, 32), "stored_as": Format(jnp.dtype(jnp.float8_e5m2))},
    "gathered, scattered, weighted": {
        "block": (32, 1),
        "permute_x": True,
        "permute_y": True,
        "weighted": True,
        "biased": True,
    },
    "many rows": {"block": (128, 128), "num_rows": 400},
}
INTERPRETED = (  # at every change: each kind of blocks and each layout
    "mxfp4's blocks, enk",
    "packed, gathered, scattered, weighted",
    "packed along columns",
    "deepseek's blocks",
    "e5m2",
)


def make(name, dtype="float32"):
    options = {"w_layout": "ekn"} | CASES[name]
    block, stored_as = options.pop("block", None), options.pop("stored_as", Format())
    axis = options.pop("axis", None)
    problem = gemm(**SIZES | ({} if axis is None else PACKED) | options, dtype=dtype)
    arrays = operands(problem)
    if axis is not None:
        return problem, arrays, random_packed(problem.w_shape, axis)
    return problem, arrays, quantize(arrays["w"], block, stored_as)


def compute(problem, arrays, w, implementation, **more):
    how = How(implementation, current_target())

    @jax.jit
    def product(arrays, w, more):
        bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
        own = {key: arrays.get(key) for key in ("gather_indices", "topk_weights", "bias")}
        return FORWARD(how, Forward(arrays["x"], w, bounds, **own, **more), problem=problem)

    return product(arrays, w, more)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, None) for name in list(CASES)[::3]),
        *(
            pytest.param(name, "interpret", marks=[pytest.mark.interpret, mark])
            for name in CASES
            for mark in [pytest.mark.thorough if name in INTERPRETED else pytest.mark.sweep]
        ),
    ],
)
def test_the_product_is_that_of_the_dequantized_weights(name, implementation):
    problem, arrays, w = make(name)
    got = compute(problem, arrays, w, implementation)
    want = compute(problem, arrays, w.dequantize(jnp.float32), "xla")
    assert got.dtype == want.dtype and largest_error(got, want) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype):
    problem, arrays, w = make(name, dtype)
    got = compute(problem, arrays, w, "triton")
    in_float32 = jax.tree.map(lambda array: array.astype(jnp.float32) if array.dtype == dtype else array, arrays)
    want = compute(dataclasses.replace(problem, dtype=jnp.dtype("float32")), in_float32, w.dequantize("float32"), "xla")
    assert largest_error(got, want) < 0.02


@pytest.mark.parametrize(
    ("name", "is_read"),
    [
        ("mxfp4's blocks", True),
        ("packed", True),
        ("packed along columns", False),
        ("deepseek's blocks, enk", True),
        ("blocks of one row", False),
        ("many rows", False),
    ],
)
def test_few_rows_read_weights_as_they_are(name, is_read, launched):
    problem, arrays, w = make(name, "bfloat16")
    with jgg.target(90, 132):
        run = jax.jit(lambda arrays, w: compute(problem, arrays, w, "triton"))
        run.trace(arrays, w).lower(lowering_platforms=("cuda",))
    multiplying = [launch for name, launch in launched if name != "unpack_kernel"]
    dtypes = {array.dtype for launch in multiplying for array in launch.operands.values() if hasattr(array, "dtype")}
    assert len(multiplying) > 0 and (w.values.dtype in dtypes) == is_read


@on(None, pytest.param("interpret", marks=pytest.mark.interpret))
def test_with_a_term_of_low_rank(implementation):
    problem, arrays, w = make("mxfp4's blocks")
    rng = np.random.default_rng(0)
    rows, matrices = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((problem.num_rows, 8), (problem.num_experts, 8, problem.out_features))
    )
    term = {"low_rank": LowRankTerm(rows, matrices)}
    got = compute(problem, arrays, w, implementation, **term)
    assert largest_error(got, compute(problem, arrays, w.dequantize(jnp.float32), "xla", **term)) < 2e-6


def test_under_vmap():
    problem, arrays, w = make("deepseek's blocks")
    x = jnp.stack([arrays["x"], -2 * arrays["x"]])
    run = jax.vmap(lambda x: compute(problem, arrays | {"x": x}, w, None))
    y = compute(problem, arrays, w, None)
    assert largest_error(run(x), jnp.stack([y, -2 * y])) < 2e-6
    several = jax.tree.map(lambda array: jnp.stack([array, array]), w)
    each = jax.vmap(functools.partial(compute, problem, arrays, implementation=None))(several)
    assert largest_error(each, jnp.stack([y, y])) < 2e-6


@on(None, PLAIN_JAX, pytest.param("interpret", marks=pytest.mark.interpret))
def test_layers_give_what_dequantized_weights_give(implementation):
    rng = np.random.default_rng(1)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 8, jnp.float32)  # noqa: E731
    w_gate_up, w_down = (quantize(normal(4, *shape), (32, 1), Format()) for shape in ((64, 96), (48, 64)))
    x, routing = normal(9, 64), jgg.route(normal(9, 4), 2)

    @functools.partial(jax.jit, static_argnums=3)
    def run(x, w_gate_up, w_down, implementation):
        options = {"w_layout": "ekn", "implementation": implementation}
        return jax.value_and_grad(lambda x: jgg.moe_mlp(x, w_gate_up, w_down, routing, **options).sum())(x)

    want = run(x, w_gate_up.dequantize(jnp.float32), w_down.dequantize(jnp.float32), "xla")
    for got, expected in zip(run(x, w_gate_up, w_down, implementation), want, strict=True):
        assert largest_error(got, expected) < 1e-5
    assert isinstance(w_gate_up, QuantizedArray)


def with_quantized_rows(name, dtype="float32"):
    """The problem of a case, its arrays, and rows of x in FP8 with a scale for 128 features."""
    problem, arrays, _ = make(name, dtype)
    return problem, arrays, quantize(arrays["x"], (1, 128), Format())


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("deepseek's blocks", None),
        *(
            pytest.param(name, "interpret", marks=pytest.mark.interpret)
            for name in ("deepseek's blocks, enk", "gathered, scattered, weighted")
        ),
    ],
)
def test_quantized_rows_times_dense_weights(name, implementation):
    problem, arrays, x = with_quantized_rows(name)
    got = compute(problem, arrays | {"x": x}, arrays["w"], implementation)
    want = compute(problem, arrays | {"x": x.dequantize(jnp.float32)}, arrays["w"], "xla")
    assert got.dtype == want.dtype and largest_error(got, want) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek's blocks, enk", "gathered, scattered, weighted"])
def test_quantized_rows_on_a_gpu(name):
    problem, arrays, x = with_quantized_rows(name, "bfloat16")
    got = compute(problem, arrays | {"x": x}, arrays["w"], "triton")
    want = compute(problem, arrays | {"x": x.dequantize(jnp.bfloat16)}, arrays["w"], "xla")
    assert largest_error(got, want) < 0.02


def test_quantized_rows_are_read_as_they_are(launched):
    problem, arrays, x = with_quantized_rows("deepseek's blocks", "bfloat16")
    with jgg.target(90, 132):
        run = jax.jit(lambda arrays, w: compute(problem, arrays, w, "triton"))
        run.trace(arrays | {"x": x}, arrays["w"]).lower(lowering_platforms=("cuda",))
    [read] = [launch.operands["x"] for name, launch in launched if name == "forward_kernel"]
    assert read.dtype == x.values.dtype


def test_quantized_rows_under_vmap():
    problem, arrays, x = with_quantized_rows("deepseek's blocks")
    y = compute(problem, arrays | {"x": x}, arrays["w"], None)
    several = jax.tree.map(lambda array: jnp.stack([array, array]), x)
    each = jax.vmap(lambda x: compute(problem, arrays | {"x": x}, arrays["w"], None))(several)
    assert largest_error(each, jnp.stack([y, y])) < 2e-6
