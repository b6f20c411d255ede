"""Rows in FP8 that are gathered, added up or multiplied by other rows: as if they were dequantized first."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.schedule import group_bounds
from jgg.launching.choice import How
from jgg.launching.heuristic import plain_config
from jgg.launching.kernel_configs import KernelConfigDW
from jgg.products.combine import COMBINE, Combine, dense_rows
from jgg.products.dw import DW, Dw
from tests.support.closeness import assert_close
from tests.support.fp8 import exactly
from tests.support.marks import INTERPRET, TRITON, on

EVERYWHERE = on(None, INTERPRET, TRITON)
TOKENS, COLUMNS, TOPK = 21, 272, 2  # 128 + 128 + 16 columns
FLOAT32 = jnp.dtype("float32")


@functools.cache
def rows(dtype=jnp.float8_e4m3fn):
    """Tokens of many magnitudes, quantized."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(TOKENS, COLUMNS)) * np.exp2(rng.integers(-9, 9, (TOKENS, 1)))
    return jgg.quantize_tokens(x.astype(np.float32), dtype)


def how(implementation):
    return How(implementation, current_target())


@EVERYWHERE
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize(("topk", "scaled"), [(1, False), (TOPK, True)])
def test_gathered_and_added_up(topk, scaled, dtype, implementation):
    """A position that names no row adds nothing."""
    rng = np.random.default_rng(1)
    positions = rng.integers(-1, TOKENS + 1, 15 * topk).astype(np.int32)
    scales = rng.uniform(0.5, 1, len(positions)).astype(np.float32) if scaled else None
    combined = jax.jit(functools.partial(COMBINE, how(implementation), topk=topk, dtype=FLOAT32))
    got = combined(Combine(rows(dtype), positions, scales))
    padded = np.concatenate([exactly(rows(dtype)), np.zeros((1, COLUMNS))])
    terms = padded[np.where((positions < 0) | (positions >= TOKENS), TOKENS, positions)]
    want = (terms if scales is None else terms * scales[:, None]).reshape(15, topk, COLUMNS).sum(axis=1)
    assert got.dtype == FLOAT32
    assert_close(got, want, 1e-6)


@EVERYWHERE
def test_rounded_once(implementation):
    """In the dtype of other rows, and NaN stays in its block; rows that are not quantized stay unchanged."""
    x = np.ones((4, COLUMNS), np.float32)
    x[2, 130] = np.nan
    quantized = jgg.quantize_tokens(x / 3)
    got = dense_rows(how(implementation), quantized, jnp.dtype("float16"))
    np.testing.assert_array_equal(got, quantized.dequantize("float16"))
    assert np.isnan(got[2, 128:256]).all() and np.isnan(got).sum() == 128
    assert dense_rows(how(implementation), got, FLOAT32) is got


@EVERYWHERE
@pytest.mark.parametrize("gathers", [None, False, True])
@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
def test_dw(w_layout, gathers, implementation):
    """From token order, where the kernel gathers or another does before it; or (None) from expert order."""
    rng = np.random.default_rng(2)
    sizes = jnp.asarray([13, 0, 20, 5], jnp.int32)
    num_rows = TOKENS if gathers is None else TOKENS * TOPK
    problem = GroupedGemmProblem(
        num_rows=num_rows,
        num_experts=4,
        in_features=COLUMNS,
        out_features=48,
        topk=1 if gathers is None else TOPK,
        dtype=FLOAT32,
        out_dtype=FLOAT32,
        w_layout=w_layout,
        permute_x=gathers is not None,
        permute_y=False,
        has_topk_weights=False,
        has_bias=False,
        precision=jax.lax.Precision.HIGHEST,
    )
    config = None
    if gathers is not None:
        config = plain_config(KernelConfigDW, problem, current_target())
        config = dataclasses.replace(config, fuse_gather=gathers)
    dy = rng.normal(size=(num_rows, 48)).astype(np.float32)
    indices = None if gathers is None else rng.permutation(num_rows).astype(np.int32)

    @jax.jit
    def dw(x):
        operands = Dw(x, jnp.asarray(dy), group_bounds(sizes, num_rows), indices)
        return DW(how(implementation), operands, config, problem=problem)

    assert_close(dw(rows()), dw(rows().dequantize("float32")), 1e-6)


def test_each_element_of_a_batch():
    x = jgg.QuantizedArray(*(jnp.stack([part, part[::-1]]) for part in (rows().values, rows().scales)))
    got = jax.vmap(lambda each: dense_rows(how(None), each, FLOAT32))(x)
    np.testing.assert_array_equal(got[1], rows().dequantize("float32")[::-1])
