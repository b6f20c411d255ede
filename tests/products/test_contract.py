"""The contract of grouped_gemm, forward and every gradient, case by case in every implementation."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.problem_checks import check_problem
from jgg.core.schedule import group_bounds
from jgg.linear.differentiable import bias_row_sums
from jgg.products.dw import row_scales
from tests.support import oracle
from tests.support.cases import (
    CASES,
    CASES_IN_EVERY_DTYPE,
    CASES_IN_FLOAT32,
    EVERYTHING,
    FEATURES,
    OPTIONS_HALVES,
    Case,
    make_data,
)
from tests.support.comparison import OUTPUTS, assert_matches, assert_right, oracle_arguments, run, small_configs
from tests.support.marks import each_nth, thorough_but
from tests.support.passes import forward_and_backward


def on(implementation, *dtypes_and_precisions, marks=()):
    own_marks = {"interpret": [pytest.mark.interpret], "triton": [pytest.mark.gpu]}.get(implementation, [])
    for dtype, precision in dtypes_and_precisions:
        name = "-".join(filter(None, (implementation or "default", dtype, precision)))
        # one worker compiles, once for all cases that share a program
        group = [] if implementation == "triton" else [pytest.mark.xdist_group(name)]
        yield pytest.param(implementation, dtype, precision, id=name, marks=[*own_marks, *group, *marks])


def thoroughly_on(implementation, *dtypes_and_precisions):
    """Parameters marked thorough: the others show the same at every change, in another implementation or dtype."""
    return on(implementation, *dtypes_and_precisions, marks=[pytest.mark.thorough])


def rarely_on(implementation, *dtypes_and_precisions):
    """Parameters left to the sweep: test_generated.py draws such cases in CI."""
    return on(implementation, *dtypes_and_precisions, marks=[pytest.mark.sweep])


def parametrize(*groups):
    names = ("implementation", "dtype", "precision")
    return pytest.mark.parametrize(names, list(itertools.chain(*groups)))


FLOAT32, HIGHEST = ("float32", None), ("float32", "highest")
FLOAT16, BFLOAT16 = ("float16", None), ("bfloat16", None)
IN_EVERY_DTYPE = parametrize(
    on("xla", FLOAT32),
    rarely_on("xla", BFLOAT16),
    on("interpret", FLOAT32),
    on("triton", FLOAT32, HIGHEST, FLOAT16, BFLOAT16),
)
IN_FLOAT32 = parametrize(
    rarely_on("xla", FLOAT32),  # what None compiles to on a CPU
    on(None, FLOAT32),
    on("interpret", FLOAT32),
    on("triton", HIGHEST),
)


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@parametrize(on("xla", FLOAT32), rarely_on("xla", BFLOAT16), on("triton", FLOAT32, HIGHEST, FLOAT16, BFLOAT16))
@named(CASES_IN_EVERY_DTYPE)
def test_case(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(on("interpret", FLOAT32))
@pytest.mark.parametrize("case", each_nth(3, CASES_IN_EVERY_DTYPE))
def test_case_interpreted(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(rarely_on("xla", FLOAT32), on("triton", HIGHEST, BFLOAT16))
@named(FEATURES)
def test_case_of_shapes(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


INTERPRETED = "features-17-to-96-enk", "features-96-to-17-ekn", "features-727-to-96-enk"


@parametrize(thoroughly_on("interpret", FLOAT16))
@pytest.mark.parametrize(
    "case", thorough_but(INTERPRETED, {case.name: case for case in FEATURES[:7]}, pytest.mark.sweep)
)
def test_case_of_shapes_interpreted(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(
    rarely_on("xla", FLOAT32), rarely_on(None, FLOAT32), thoroughly_on("interpret", FLOAT32), on("triton", HIGHEST)
)
@pytest.mark.parametrize("case", each_nth(3, CASES_IN_FLOAT32))
def test_case_of_values(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(rarely_on(None, BFLOAT16), on("triton", FLOAT32, BFLOAT16))
@named(OPTIONS_HALVES[0])
def test_every_option(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(on("interpret", FLOAT32))
@pytest.mark.parametrize("case", each_nth(3, OPTIONS_HALVES[0]))
def test_every_option_interpreted(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(rarely_on("interpret", FLOAT16), on("triton", HIGHEST, FLOAT16))
@named(OPTIONS_HALVES[1])
def test_every_option_in_the_other_layout(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision)


@parametrize(
    on("xla", FLOAT32), rarely_on("xla", BFLOAT16), on("interpret", FLOAT32), on("triton", HIGHEST, FLOAT16, BFLOAT16)
)
def test_every_pattern_of_empty_groups(implementation, dtype, precision):
    options = {"in_features": 16, "out_features": 12, "biased": True, "weighted": True}
    for pattern in itertools.product((0, 1), repeat=5):
        # the shapes stay, so that all patterns share one compiled function
        sizes = tuple(np.multiply(pattern, (5, 1, 4, 2, 6)).tolist())
        name = "pattern-" + "".join(map(str, pattern))
        case = Case(name, sizes, num_rows=24, poison="tail", **options)
        assert_right(case, dtype, implementation, precision=precision)


@IN_FLOAT32
@named([case for case in CASES if case.name == "indices-out-of-range-everything"])
def test_without_jit(case, implementation, dtype, precision):
    assert_right(case, dtype, implementation, precision=precision, jit=False)


POINTERS = {f"use_tma_load_{name}": False for name in ("x", "w", "dy")}
KERNEL_CONFIGS = {
    "pointers": small_configs(16, **POINTERS),
    "pointers-for-weights": small_configs(16, use_tma_load_w=False),
    "pointers-for-rows": small_configs(16, use_tma_load_x=False, use_tma_load_dy=False),
    "tiles-of-32": small_configs(32),
    "uneven-tiles": (
        ("kernel_config_fwd", jgg.KernelConfigForward(32, 16, 64, num_warps=4, band=1)),
        ("kernel_config_bwd_dx", jgg.KernelConfigDX(16, 64, 32, num_warps=4, programs_per_sm=2)),
        ("kernel_config_bwd_dw", jgg.KernelConfigDW(64, 32, 16, num_warps=4, num_stages=2)),
    ),
}


@parametrize(thoroughly_on("interpret", FLOAT16), on("triton", FLOAT16))
@pytest.mark.parametrize(
    ("configs", "w_layout"),
    [
        pytest.param(configs, w_layout, id=f"{name}-{w_layout}", marks=[pytest.mark.sweep] * ((i + j) % 2))
        for i, (name, configs) in enumerate(KERNEL_CONFIGS.items())
        for j, w_layout in enumerate(("enk", "ekn"))
    ],
)
def test_kernel_configs(configs, w_layout, implementation, dtype, precision):
    # rows of multiples of 16 bytes, so that TMA can be used; several tiles in each direction
    case = Case("kernel-configs", (19, 0, 1, 34), 60, 40, 48, w_layout=w_layout, poison="tail")
    assert_right(case, dtype, implementation, precision=precision, configs=configs)


@IN_EVERY_DTYPE
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
def test_rows_reordered_in_copies(biased, implementation, dtype, precision):
    # small tiles gather and scatter inside the kernels by default; here a copy is made before or after
    configs = small_configs(16, fuse_gather=False, fuse_scatter=False)
    case = Case("copies", **EVERYTHING | {"biased": biased, "gather": "out_of_range"})
    assert_right(case, dtype, implementation, precision=precision, configs=configs)


@IN_FLOAT32
def test_repeated_index_any_row_wins(implementation, dtype, precision):
    case = Case("repeated", permute_y=True, gather="repeated", weighted=True, biased=True)
    data = make_data(case, dtype)
    y = run(case, data, implementation, precision=precision)[0]
    in_expert_order = oracle.grouped_gemm(**oracle_arguments(case, data) | {"permute_y": False})
    scales = data.topk_weights.reshape(-1)
    # without permute_y the scales are read at the same positions, so only the rows' places differ
    assert scales.shape == (case.num_rows,)
    candidates = [np.flatnonzero(data.gather_indices == p) for p in range(case.num_rows)]
    repeated = [p for p, rows in enumerate(candidates) if len(rows) > 1]
    assert len(repeated) == 2
    for position in repeated:
        errors = np.abs(in_expert_order[candidates[position]] - y[position])
        assert np.all(np.min(errors, axis=0) < 1e-5)


@IN_FLOAT32
def test_64_bit_integers(implementation, dtype, precision):
    case = Case("64-bit", topk=2, permute_x=True, gather="random")
    data = make_data(case, dtype)
    data.gather_indices[3] = 0
    sizes, indices = data.group_sizes.astype(np.int64), data.gather_indices.astype(np.int64)
    # in 32 bits these would wrap around to values that look right
    sizes[1] = -(2**32) + 1
    sizes[4] += 2**32
    indices[3] += 2**32
    wide = dataclasses.replace(data, group_sizes=sizes, gather_indices=indices)
    with jax.enable_x64(True):
        assert_matches(case, wide, run(case, wide, implementation, precision=precision), precision)


@IN_EVERY_DTYPE
def test_same_result_every_time(implementation, dtype, precision):
    case = Case("again", **EVERYTHING)
    data = make_data(case, dtype)
    first, second = (run(case, data, implementation, precision=precision) for _ in range(2))
    for name, one, other in zip(OUTPUTS, first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), name)


@IN_FLOAT32
@named([Case("products", **EVERYTHING), Case("products-plain", w_layout="ekn", gather="none")])
def test_products_alone(case, implementation, dtype, precision):
    data = make_data(case, dtype)
    arguments = oracle_arguments(case, data)
    options = {"implementation": implementation, "precision": precision, **case.options}
    options |= {name: arguments[name] for name in ("topk_weights", "gather_indices", "group_sizes")}
    expected = oracle.gradients(data.dy, **arguments)
    y = jgg.grouped_gemm_forward(data.x, data.w, bias=data.bias, **options)
    np.testing.assert_allclose(y, oracle.grouped_gemm(**arguments), rtol=1e-5, atol=1e-5)
    dx = jgg.grouped_gemm_dx(data.dy, data.w, **options)
    np.testing.assert_allclose(dx, expected.x, rtol=1e-5, atol=1e-5)
    dw = jgg.grouped_gemm_dw(data.x, data.dy, **options)
    np.testing.assert_allclose(dw, expected.w, rtol=1e-5, atol=1e-5)


@IN_FLOAT32
def test_ragged_dot(implementation, dtype, precision):
    rng = np.random.default_rng(0)
    group_sizes = np.array([4, 0, 7, 2, 3], np.int32)
    lhs = rng.standard_normal((18, 12)).astype(dtype)
    all_rhs = rng.standard_normal((5, 12, 20)).astype(dtype)
    dy = rng.standard_normal((18, 20)).astype(dtype)

    @jax.jit
    def run(lhs, rhs, dy, group_offset):
        def forward(lhs, rhs):
            return jgg.ragged_dot(
                lhs, rhs, jnp.asarray(group_sizes), precision, group_offset=group_offset, implementation=implementation
            )

        return forward_and_backward(forward)(dy, lhs, rhs)

    for offset in (None, 0, 1, 2, 5):
        rhs, first = (all_rhs, 0) if offset is None else (all_rhs[:3], offset)
        y, d_lhs, d_rhs = run(lhs, rhs, dy, offset)
        d_rows = oracle.ragged_dot(dy, rhs.swapaxes(1, 2), group_sizes, first)
        np.testing.assert_allclose(y, oracle.ragged_dot(lhs, rhs, group_sizes, first), atol=1e-5)
        np.testing.assert_allclose(d_lhs, d_rows, atol=1e-5)
        ranges = [*oracle.group_ranges(group_sizes, 18), *[range(0)] * 5]
        for group, rows in enumerate(ranges[first : first + len(rhs)]):
            np.testing.assert_allclose(d_rhs[group], lhs[rows].T @ dy[rows], atol=1e-5)
        if offset is None:
            reference = jax.lax.ragged_dot(lhs, rhs, group_sizes, precision="highest")
            np.testing.assert_allclose(y, reference, atol=1e-5)


def test_interpret_refuses_bfloat16():
    case = Case("bfloat16")
    with pytest.raises(TypeError, match=r"interpret.* float32 and float16, got bfloat16"):
        run(case, make_data(case, "bfloat16"), "interpret")


@pytest.mark.parametrize("bad", [-1, -6, 6, 2**31 - 1])
def test_a_bad_index_reads_zero_where_rows_are_summed(bad):
    """Checks the row sums from which the gradient of topk_weights is made, and the weights of rows."""
    indices = jnp.array([2, bad, 0, 5, 1, 3])
    arrays = {"x": jnp.ones((6, 4)), "w": jnp.ones((2, 3, 4)), "group_sizes": jnp.array([2, 4])}
    problem = check_problem(**arrays, gather_indices=indices, permute_y=True)
    dy, bias = jnp.arange(1.0, 19).reshape(6, 3), jnp.ones((2, 3))
    sums = bias_row_sums(problem, dy, bias, group_bounds(arrays["group_sizes"], 6), indices)
    np.testing.assert_array_equal(sums, [24, 0, 6, 51, 15, 33])
    # more positions than rows
    np.testing.assert_array_equal(row_scales(jnp.arange(1.0, 7), indices[:4]), [3, 0, 1, 6])
