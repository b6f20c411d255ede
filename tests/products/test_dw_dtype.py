"""dW in another dtype than x: stored from the float32 sums, so no less exact than a product in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.launching import interpret
from jgg.products.launches.plans import plan_dw
from jgg.tuning.workloads import gemm
from tests.support import oracle
from tests.support.cases import CASES, OPTIONS, make_data
from tests.support.comparison import error_of, oracle_arguments, small_configs
from tests.support.marks import PLAIN_JAX, each_nth, on
from tests.support.specialized import LARGE_CASES, specialized_configs

FEW = [*CASES, *OPTIONS][::4]
ids = lambda case: case.name  # noqa: E731


def assert_right(case, dtype, implementation, configs=()):
    """Compares dW in float32, written over NaN, with the oracle; dy is in the dtype of x."""
    case = dataclasses.replace(case, out_dtype=None)
    data = make_data(case, dtype)
    arguments = oracle_arguments(case, data)
    with np.errstate(invalid="ignore"):
        want = oracle.gradients(data.dy, **arguments).w
        rows = {name: arguments.pop(name) for name in ("x", "group_sizes", "gather_indices", "topk_weights")}
    specified = oracle.specified(**rows, **arguments).w
    del arguments["w"], arguments["bias"]

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def compute(unwritten, dy, rows):
        del unwritten
        return jgg.grouped_gemm_dw(
            dy=dy,
            **rows,
            **arguments,
            preferred_element_type="float32",
            implementation=implementation,
            kernel_config=dict(configs).get("kernel_config_bwd_dw"),
        )

    got = np.asarray(compute(jnp.full(want.shape, jnp.nan, "float32"), data.dy, rows))
    assert got.dtype == "float32"
    error = error_of(got, want, np.broadcast_to(specified, want.shape), case.name)
    # rows that are scaled are rounded to the dtype of dy first
    assert error < (1e-5 if data.topk_weights is None else 1e-2), error


@on(None, PLAIN_JAX)
@pytest.mark.parametrize("case", FEW[::2], ids=ids)
def test_case(case, implementation):
    assert_right(case, "bfloat16", implementation)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", each_nth(3, FEW[1::4]))
def test_case_interpreted(case):
    assert_right(case, "float16", "interpret", small_configs())


@pytest.mark.gpu
@pytest.mark.parametrize("case", FEW + LARGE_CASES, ids=ids)
def test_case_on_gpu(case):
    assert_right(case, "bfloat16", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "step", "fuse_gather"), [(256, 64, True), (256, 32, False), (128, 64, False)])
@pytest.mark.parametrize("case", LARGE_CASES, ids=ids)
def test_large_case_on_hopper(case, columns, step, fuse_gather):
    assert_right(case, "bfloat16", "triton", specialized_configs(case.w_layout, columns, step, fuse_gather=fuse_gather))


def test_unknown_dtype():
    rows = jnp.ones((4, 8), "bfloat16")
    with pytest.raises(TypeError, match=r"^preferred_element_type must be one of .*float32.*, got int8"):
        jgg.grouped_gemm_dw(rows, rows, group_sizes=jnp.array([4]), preferred_element_type="int8")


@pytest.mark.parametrize("layout", ["enk", "ekn"])
@on(pytest.param("interpret", marks=pytest.mark.interpret), pytest.param("triton", marks=pytest.mark.gpu))
def test_rows_of_few_groups_are_reduced_in_parts(layout, implementation):
    rng = np.random.default_rng(0)
    sizes, dtype = np.array([97, 0, 150]), "float32" if implementation == "interpret" else "bfloat16"
    x, dy = (jnp.asarray(rng.standard_normal((260, features)), dtype) for features in (24, 17))
    config = jgg.KernelConfigDW(block_m=16, block_n=16, block_k=16, num_warps=4, programs_per_sm=4)
    problem = gemm(num_rows=260, in_features=24, out_features=17, num_experts=3, w_layout=layout, dtype=dtype)
    assert plan_dw(problem, interpret.TARGET, False, config).row_parts == 1
    config = dataclasses.replace(config, programs_per_sm=24)
    assert plan_dw(problem, interpret.TARGET, False, config).row_parts > 1
    options = {"w_layout": layout, "implementation": implementation, "preferred_element_type": "float32"}
    compute = functools.partial(jgg.grouped_gemm_dw, group_sizes=jnp.asarray(sizes), kernel_config=config, **options)
    got = jax.jit(compute)(x, dy)
    ends = np.cumsum(sizes)
    x, dy = (np.asarray(array.astype("float32"), np.float64) for array in (x, dy))
    left, right = (dy, x) if layout == "enk" else (x, dy)
    want = [left[end - size : end].T @ right[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
