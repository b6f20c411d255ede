"""Products of operands that are both quantized, against float64 products of what they dequantize to."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import Target, current_target
from jgg.core.quantized import Format
from jgg.core.versions import WARP_SPECIALIZED, unlike
from jgg.launching.choice import How
from jgg.launching.heuristic import heuristic_config, plain_config
from jgg.launching.requirements import can_run, why_not, why_not_quantized
from jgg.products.quantize import QUANTIZE_ROWS, QUANTIZE_WEIGHTS, Quantize
from jgg.tuning.workloads import gemm
from tests.support import oracle
from tests.support.cases import CASES, OPTIONS, Case, make_data
from tests.support.comparison import oracle_arguments
from tests.support.fp8 import exactly
from tests.support.marks import PLAIN_JAX, each_nth, on
from tests.support.specialized import LARGE_CASES


def in_fp8(case):
    """The case with rows that the FP8 kernel can load."""
    return dataclasses.replace(case, in_features=math.ceil(case.in_features / 16) * 16)


def quantized(data, gradient=False, powers=False):
    dtype = jnp.float8_e5m2 if gradient else jnp.float8_e4m3fn
    with np.errstate(invalid="ignore"):
        x = jgg.quantize_tokens(data.x, dtype, power_of_2_scales=powers)
        return x, jgg.quantize_weights(data.w, power_of_2_scales=powers)


def run(case, data, x, w, implementation, config=None):
    """y, written over NaN."""

    def product(unwritten, x, w, group_sizes, gather_indices, topk_weights, bias):
        del unwritten
        return jgg.grouped_gemm(
            x,
            w,
            group_sizes,
            gather_indices=gather_indices,
            topk_weights=topk_weights,
            bias=bias,
            preferred_element_type=case.out_dtype,
            implementation=implementation,
            kernel_config_fwd=config,
            **case.options,
        )

    unwritten = jnp.full(data.dy.shape, np.nan, case.out_dtype or "bfloat16")
    function = jax.jit(product, donate_argnums=0, keep_unused=True)
    return np.asarray(function(unwritten, x, w, data.group_sizes, data.gather_indices, data.topk_weights, data.bias))


def assert_right(case, implementation, tolerance=1e-3, dtype="bfloat16", config=None, **options):
    data = make_data(case, dtype)
    x, w = quantized(data, **options)
    got = run(case, data, x, w, implementation, config).astype(np.float64)
    arguments = oracle_arguments(case, data) | {"x": exactly(x), "w": exactly(w)}
    with np.errstate(invalid="ignore"):
        want = oracle.grouped_gemm(**arguments)
    mask = np.broadcast_to(oracle.specified(**arguments).y, want.shape)
    assert (got[(want == 0).all(axis=1) & mask.all(axis=1)] == 0).all()
    got, want = got[mask], want[mask]
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    got, want = got[finite], want[finite]
    # FP8 products are added up with 13 bits after the largest term's first, 128 of them; where operands are dequantized
    # to bfloat16, they are rounded by up to 2**-9 each
    allowed = 2.0**-8 * np.abs(want) + tolerance * np.max(np.abs(want), initial=0)
    assert (np.abs(got - want) <= allowed).all(), np.max(np.abs(got - want) - allowed)
    assert np.linalg.norm(got - want) <= 4e-3 * np.linalg.norm(want)


@on(None, PLAIN_JAX)
@pytest.mark.parametrize("case", [*CASES[::10], *OPTIONS[::14], *LARGE_CASES[::9]], ids=lambda case: case.name)
def test_case(case, implementation):
    assert_right(case, implementation)


@pytest.mark.thorough
@pytest.mark.interpret
@pytest.mark.parametrize("case", each_nth(3, [*CASES[2::12], *OPTIONS[3::16]]))
def test_case_interpreted(case):
    number, case = len(case.name), in_fp8(case)
    case = dataclasses.replace(case, out_dtype=("float32", "float16")[number % 2])
    assert_right(case, "interpret", dtype="float32", gradient=number % 3 == 0, powers=number % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *OPTIONS, *LARGE_CASES], ids=lambda case: case.name)
def test_case_on_gpu(case):
    number, case = len(case.name), in_fp8(case)
    assert_right(case, "triton", gradient=number % 3 == 0, powers=number % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", [*CASES[::3], *OPTIONS[::3], *LARGE_CASES], ids=lambda case: case.name)
def test_case_on_gpu_by_the_kernel_of_every_gpu(case, fused):
    number, case = len(case.name), in_fp8(case)
    config = jgg.KernelConfigForward(
        block_m=(16, 64, 128)[number % 3], block_k=128, num_stages=3, fuse_gather=fused, fuse_scatter=fused
    )
    assert_right(case, "triton", config=config, gradient=number % 4 == 0, powers=number % 2 == 0)


WIDE = Case("wide", (700, 0, 33, 1, 900), None, 1040, 392)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(WIDE, name="float32", out_dtype="float32"),
        dataclasses.replace(WIDE, name="float16", out_dtype="float16"),
        dataclasses.replace(WIDE, name="steps", in_features=7168, out_features=512),
        dataclasses.replace(WIDE, name="rows of 8 bytes", in_features=1048),
        dataclasses.replace(WIDE, name="many columns", out_features=5128, permute_x=True, topk=2, gather="random"),
    ],
    ids=lambda case: case.name,
)
def test_wide_case_on_gpu(case):
    assert_right(case, "triton", tolerance=8e-3 if case.name == "rows of 8 bytes" else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("gathers", [False, True])
def test_the_same_bits_every_time_with_many_groups(gathers):
    num_rows, features, experts = 20_000, 768, 64
    rng = np.random.default_rng(0)
    x, w = (
        quantize(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16))
        for quantize, shape in (
            (jgg.quantize_tokens, (num_rows, features)),
            (jgg.quantize_weights, (experts, features, features)),
        )
    )
    indices = jnp.asarray(rng.permutation(num_rows), jnp.int32) if gathers else None
    product = jax.jit(lambda x, w, sizes: jgg.grouped_gemm(x, w, sizes, gather_indices=indices, permute_x=gathers))
    dense = jax.jit(
        lambda x, w, sizes: jgg.grouped_gemm(
            x.dequantize(jnp.float32),
            w.dequantize(jnp.float32),
            sizes,
            gather_indices=indices,
            permute_x=gathers,
            precision="highest",
        )
    )
    for _ in range(20):
        sizes = rng.multinomial(num_rows - 17, rng.dirichlet(np.full(experts, 0.3)))
        y = product(x, w, jnp.asarray(sizes, jnp.int32))
        assert (y == product(x, w, jnp.asarray(sizes, jnp.int32))).all()
        want = dense(x, w, jnp.asarray(sizes, jnp.int32))
        y = y.astype(want.dtype)
        assert jnp.linalg.norm(y - want) <= 3e-3 * jnp.linalg.norm(want)


@pytest.mark.gpu
@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(3, 300), (77, 2048), (2, 130, 300), (3, 256, 128), (1, 64, 1)])
def test_kernels_quantize_as_plain_jax(shape, dtype, powers):
    """To the bit, but that NaN and its like may be any."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    x.reshape(-1)[:3] = 1e-42, -np.inf, np.nan
    for own in ("float32", "bfloat16"):
        operands = Quantize(jnp.asarray(x, own))
        options = {"stored_as": Format(jnp.dtype(dtype), powers)}
        product = QUANTIZE_ROWS if len(shape) == 2 else QUANTIZE_WEIGHTS
        if len(shape) == 3:
            options |= {"keeps": True, "transposes": True}
        got, want = (
            jax.jit(lambda operands, name=name: product(How(name, current_target()), operands, **options))(operands)  # noqa: B023
            for name in ("triton", "xla")
        )
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            np.testing.assert_array_equal(np.asarray(g, np.float32), np.asarray(w, np.float32))


@pytest.mark.parametrize("function", [jgg.grouped_gemm, jgg.grouped_gemm_forward])
def test_gradients_are_those_of_what_is_not_quantized(function):
    data = make_data(OPTIONS[-1], "bfloat16")
    x, w = quantized(data)
    weights = {name: jnp.asarray(getattr(data, name), "float32") for name in ("topk_weights", "bias")}

    def gradients(x, w):
        def product(x, w, weights):
            y = function(
                x,
                w,
                group_sizes=data.group_sizes,
                gather_indices=data.gather_indices,
                **weights,
                **OPTIONS[-1].options,
                preferred_element_type="float32",
            )
            return jnp.sum(y * data.dy.astype("float32"))

        return jax.jit(jax.grad(product, argnums=(0, 1, 2)))(x, w, weights)

    *of_quantized, got = gradients(x, w)
    want = gradients(x.dequantize("float32"), w.dequantize("float32"))[2]
    assert all((part == 0).all() for part in jax.tree.leaves(of_quantized))
    for name, gradient in want.items():
        np.testing.assert_allclose(got[name], gradient, rtol=1e-5, atol=1e-5 * np.max(np.abs(gradient)))


def test_errors_name_the_operand():
    x, w = jnp.ones((8, 256)), jnp.ones((2, 40, 256))
    sizes = jnp.array([3, 5])
    tokens, weights = jgg.quantize_tokens(x), jgg.quantize_weights(w)
    with pytest.raises(TypeError, match=r"^w must be a QuantizedArray, as x is, got"):
        jgg.grouped_gemm(tokens, w, sizes)
    with pytest.raises(ValueError, match=r"^w\.scales must be \[2, 1, 2\], for blocks of 128 x 128, got \[2, 2, 2\]"):
        jgg.grouped_gemm(tokens, jgg.QuantizedArray(weights.values, jnp.ones((2, 2, 2))), sizes)
    with pytest.raises(ValueError, match=r"^x\.scales must be \[8, 2\], for blocks of 1 x 128, got \[8, 1\]"):
        jgg.grouped_gemm(jgg.QuantizedArray(tokens.values, jnp.ones((8, 1))), weights, sizes)
    with pytest.raises(TypeError, match=r"^w\.values must be one of float8_e4m3fn, float8_e5m2, got int8"):
        jgg.grouped_gemm(tokens, jgg.QuantizedArray(weights.values.view(jnp.int8), weights.scales), sizes)
    with pytest.raises(TypeError, match=r"^w must be a QuantizedArray, as x is, got"):
        jgg.grouped_gemm_forward(tokens, w, group_sizes=sizes)
    with pytest.raises(ValueError, match=r"^w must be \[E, K, N\] with K equal to x's 256"):
        jgg.grouped_gemm(tokens, weights, sizes, w_layout="ekn")
    with pytest.raises(ValueError, match=r"^block_k of forward must be 128 in FP8, got 64"):
        jgg.grouped_gemm(
            tokens,
            weights,
            sizes,
            kernel_config_fwd=jgg.KernelConfigForward(),
            preferred_element_type="float16",
            implementation="interpret",
        )
    with pytest.raises(TypeError, match=r"^kernel_config must be a KernelConfigForward or None, got"):
        jgg.grouped_gemm_forward(tokens, weights, group_sizes=sizes, kernel_config=jgg.KernelConfigDX())


def test_the_product_alone():
    x, w, sizes = jnp.ones((8, 256)), jnp.ones((2, 40, 256)), jnp.array([3, 4])
    y = jgg.grouped_gemm_forward(jgg.quantize_tokens(x), jgg.quantize_weights(w), group_sizes=sizes)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, jnp.full((8, 40), 256).at[7].set(0))


def test_which_products_the_kernel_computes():
    def reasons(compute_capability=90, out_dtype="bfloat16", **sizes):
        sizes = {"num_rows": 4096, "in_features": 256, "out_features": 512, "num_experts": 8} | sizes
        problem = dataclasses.replace(gemm(dtype="float8_e4m3fn", **sizes), out_dtype=jnp.dtype(out_dtype))
        target = Target(compute_capability, 132)
        return why_not_quantized(problem, target), why_not("hopper", jgg.KernelConfigForward, problem, target)

    rows = "rows of K and of N elements must be multiples of 16 bytes"
    assert reasons() == (None, unlike(WARP_SPECIALIZED))
    assert reasons(in_features=264) == ("rows of K elements must be multiples of 16 bytes", rows)
    assert reasons(out_features=520) == (None, rows)
    assert reasons(out_dtype="float32") == (None, "they store products of 8-bit floats in 16 bits")
    assert reasons(compute_capability=89) == (None, "they are for compute capability 9.0")
    assert reasons(compute_capability=80)[0] == "kernels multiply in FP8 from compute capability 8.9 on"


@pytest.mark.parametrize("compute_capability", [89, 90, 100, 120])
def test_default_configurations_fit(compute_capability):
    target = Target(compute_capability, 132)
    for rows, features, options in itertools.product(
        (16, 500, 65_536), (256, 2880, 7168), ({}, {"permute_x": True}, {"biased": True, "weighted": True})
    ):
        problem = gemm(
            num_rows=rows, in_features=features, out_features=1536, num_experts=8, dtype="float8_e4m3fn", **options
        )
        chosen, plain = (
            choose(jgg.KernelConfigForward, problem, target) for choose in (heuristic_config, plain_config)
        )
        for config in (chosen, plain):
            assert config.block_k == 128
            assert can_run(problem, target, config)
        is_hopper = compute_capability == 90 and not unlike(WARP_SPECIALIZED)
        assert (chosen.kernel, plain.kernel) == ("hopper" if is_hopper else "plain", "plain")
