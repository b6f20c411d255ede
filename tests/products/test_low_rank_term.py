"""A low-rank term of a product: the sum of two products against float64, in every implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.core.gpu_target import current_target
from jgg.core.problem_checks import check_problem
from jgg.core.schedule import group_bounds
from jgg.launching.choice import How
from jgg.products.dx import DX, Dx
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import LowRankTerm
from tests.support import oracle
from tests.support.cases import CASES, OPTIONS, make_data
from tests.support.comparison import error_of, oracle_arguments, small_configs
from tests.support.marks import PLAIN_JAX, each_nth, on
from tests.support.specialized import LARGE_CASES, specialized_configs

CASES = [case for case in (*CASES, *OPTIONS) if not case.poison]
RANKS = (1, 8, 17, 64, 96)


def term_of(case, dtype, rank, of_dx):
    """The rows and matrices of a term, NumPy in the dtype."""
    rng = np.random.default_rng(1)
    columns = case.in_features if of_dx else case.out_features
    reduced_last = (case.w_layout == "enk") != of_dx
    shape = (columns, rank) if reduced_last else (rank, columns)
    rows = rng.standard_normal((case.num_rows, rank)).astype(dtype)
    return rows, rng.standard_normal((len(case.group_sizes), *shape)).astype(dtype)


def assert_right(case, dtype, implementation, rank, configs=()):
    case = dataclasses.replace(case, out_dtype=None)
    data, configs = make_data(case, dtype), dict(configs)
    arrays = {name: getattr(data, name) for name in ("x", "w", "topk_weights", "bias")}
    problem = check_problem(
        x=data.x,
        w=data.w,
        group_sizes=data.group_sizes,
        gather_indices=data.gather_indices,
        topk_weights=data.topk_weights,
        bias=data.bias,
        **case.options,
    )
    how = How(implementation, current_target())
    indices = None if data.gather_indices is None else jnp.asarray(data.gather_indices, jnp.int32)
    low = LowRankTerm(*map(jnp.asarray, term_of(case, data.x.dtype, rank, of_dx=False)))
    low_dx = LowRankTerm(*map(jnp.asarray, term_of(case, data.x.dtype, rank, of_dx=True)))

    @jax.jit
    def compute(arrays, dy, sizes, indices, low, low_dx):
        bounds = group_bounds(sizes, problem.num_rows)
        y = FORWARD(
            how,
            Forward(arrays["x"], arrays["w"], bounds, indices, arrays["topk_weights"], arrays["bias"], low),
            configs.get("kernel_config_fwd"),
            problem=problem,
        )
        dx = DX(
            how,
            Dx(dy, arrays["w"], bounds, None, indices, arrays["topk_weights"], low_dx),
            configs.get("kernel_config_bwd_dx"),
            problem=problem,
        )
        return y, dx.dx

    arrays = jax.tree.map(jnp.asarray, arrays)
    y, dx = compute(arrays, jnp.asarray(data.dy), jnp.asarray(data.group_sizes), indices, low, low_dx)
    own = oracle_arguments(case, data)
    specified = oracle.specified(**own)
    want = oracle.grouped_gemm(**own)
    plain = {"permute_x": False, "topk": 1, "bias": None}
    want = want + oracle.grouped_gemm(**own | plain | {"x": low.rows, "w": low.matrices})
    want_dx = oracle.gradients(data.dy, **own).x
    # of a term whose rows are in expert order already
    by_expert = own | {"permute_y": False, "x": np.zeros_like(data.x), "w": low_dx.matrices, "bias": None}
    want_dx = want_dx + oracle.gradients(np.asarray(low_dx.rows), **by_expert).x
    bound = 1e-5 if dtype == "float32" else 1e-2
    for name, got, wanted, mask in (("y", y, want, specified.y), ("dx", dx, want_dx, specified.x)):
        error = error_of(
            np.asarray(got, np.float64), wanted, np.broadcast_to(mask, wanted.shape), f"{case.name} {name}"
        )
        assert error < bound, (case.name, name, error)


# test_grouped_gemm_low_rank.py has terms in more cases
@on(None, PLAIN_JAX)
@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.name)
def test_case(case, implementation):
    assert_right(case, "float32", implementation, 5)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", each_nth(4, CASES[::8]))
def test_case_interpreted(case):
    assert_right(case, "float32", "interpret", 5, small_configs())


@pytest.mark.parametrize("rank", RANKS)
def test_rank(rank):
    assert_right(CASES[0], "float32", None, rank)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.name)
def test_on_gpu(case):
    assert_right(case, "bfloat16", "triton", 17)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", RANKS)
def test_rank_on_gpu(rank):
    assert_right(next(case for case in LARGE_CASES if case.name == "large-gathered"), "bfloat16", "triton", rank)


@pytest.mark.gpu
@pytest.mark.parametrize("fuse_gather", [True, False])
@pytest.mark.parametrize("case", [case for case in LARGE_CASES if not case.poison], ids=lambda case: case.name)
def test_on_hopper(case, fuse_gather):
    assert_right(case, "bfloat16", "triton", 16, specialized_configs(case.w_layout, 256, fuse_gather=fuse_gather))
