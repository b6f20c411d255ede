"""The steps in which kernels compute a product, as plans decide them without launching a kernel."""

import dataclasses

import jax.numpy as jnp
import pytest

from jgg.core import versions
from jgg.core.activations import ACTIVATIONS
from jgg.core.gpu_target import Target
from jgg.core.quantized import Format
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.products.launches.activations import Hidden
from jgg.products.launches.plans import plan_dw, plan_dx, plan_forward, plan_up
from jgg.tuning.workloads import gemm

AMPERE, ADA, HOPPER = Target(80, 108), Target(89, 142), Target(90, 132)
SIZES = {"num_rows": 4096, "in_features": 512, "out_features": 768, "num_experts": 8, "topk": 4}
FORWARD_TILE = {"block_m": 256, "block_n": 128, "block_k": 64, "kernel": "hopper"}
DX_TILE = {"block_m": 256, "block_n": 64, "block_k": 128, "kernel": "hopper"}
DW_TILE = {"block_m": 64, "block_n": 256, "block_k": 256, "kernel": "hopper"}


@pytest.fixture(autouse=True)
def hopper_kernel_compiles(monkeypatch):
    monkeypatch.setattr(versions, "installed", {"triton": "3.9.0", "jax-triton": "0.4.1"}.get)


def summed(problem):
    return dataclasses.replace(problem, combine_y=True)


def test_a_kernel_that_gathers_and_scatters_takes_one_step():
    problem = gemm(permute_x=True, permute_y=True, weighted=True, **SIZES)
    config = KernelConfigForward()
    plan = plan_forward(problem, AMPERE, config)
    assert plan.problem == problem and plan.config == config
    assert not (plan.dequantizes or plan.copies_x or plan.reorders_y or plan.part_columns)


def test_other_kernels_permute_what_the_kernel_does_not():
    problem = gemm(permute_x=True, permute_y=True, **SIZES)
    plan = plan_forward(problem, AMPERE, KernelConfigForward(fuse_gather=False, fuse_scatter=False))
    assert plan.copies_x and plan.reorders_y
    assert not (plan.problem.permute_x or plan.problem.permute_y)
    plan = plan_forward(problem, HOPPER, KernelConfigForward(**FORWARD_TILE))
    assert plan.problem.permute_x and not plan.copies_x
    assert plan.reorders_y and not plan.problem.permute_y  # the warp-specialized kernel never scatters


def test_rows_that_are_added_up_are_multiplied_without_weights():
    problem = summed(gemm(weighted=True, **SIZES | {"out_features": 2048, "num_rows": 65536}))
    plan = plan_forward(problem, HOPPER)
    assert plan.part_columns and plan.part_columns % 256 == 0 and plan.part_columns < problem.out_features
    assert not plan.problem.combine_y and not plan.problem.has_topk_weights


@pytest.mark.parametrize(("target", "in_features"), [(AMPERE, 512), (ADA, 520)])
def test_quantized_operands_that_no_kernel_multiplies_are_dequantized(target, in_features):
    problem = gemm(**SIZES | {"in_features": in_features}, dtype="fp8")
    plan = plan_forward(problem, target, KernelConfigForward(block_k=128))
    assert plan.dequantizes and plan.problem.dtype == problem.out_dtype == jnp.bfloat16
    assert plan.config == plan_forward(plan.problem, target).config  # not the one that was asked for in FP8
    assert not plan_forward(gemm(**SIZES, dtype="fp8"), ADA).dequantizes


def test_quantized_weights_are_read_as_they_are_where_groups_have_few_rows():
    config = KernelConfigForward(block_k=64, num_stages=4)
    few = gemm(**SIZES | {"num_rows": 128})
    plan = plan_forward(few, ADA, config, w_block=(128, 32))
    assert not plan.dequantizes
    assert (plan.config.block_k, plan.config.num_stages) == (32, 8)  # a step within a scale, as many features ahead
    plan = plan_forward(few, ADA, config, w_block=(128, 1))
    assert plan.dequantizes and plan.config == config  # each feature has a scale of its own
    assert plan_forward(few, AMPERE, config, w_block=(128, 128)).dequantizes
    packed = {"w_block": (1, 32), "w_is_packed": True}
    plan = plan_forward(few, AMPERE, config, **packed)  # which has no FP8
    assert not plan.dequantizes and plan.config.block_k == config.block_k
    assert plan_forward(few, ADA, config, w_block=(32, 1), w_is_packed=True).dequantizes
    assert plan_forward(gemm(**SIZES), ADA, config, **packed).dequantizes
    assert plan_forward(gemm(**SIZES), ADA, config, w_block=(128, 128)).dequantizes


@pytest.mark.parametrize(
    ("activation", "interleaved", "options", "is_one"),
    [
        ("swiglu", False, {}, True),
        ("swiglu", False, {"out_features": 760}, False),  # rows of hidden are no multiple of 16 bytes
        ("geglu", False, {"permute_x": True}, False),  # too many registers
        ("geglu", False, {}, True),
        ("swiglu", False, {"dtype": "fp8", "permute_x": True}, True),
        ("swiglu", True, {"dtype": "fp8", "permute_x": True}, False),
        ("swiglu", False, {"dtype": "fp8"}, False),  # the kernel does not gather
        ("swiglu", False, {"dtype": "fp8", "permute_x": True, "out_features": 640}, False),
    ],
)
def test_when_one_kernel_multiplies_and_activates(activation, interleaved, options, is_one):
    problem = gemm(**SIZES | options)
    tile = FORWARD_TILE | ({"block_n": 256, "block_k": 128} if problem.is_quantized else {})
    stored_as = Format() if problem.is_quantized else None
    hidden = Hidden(ACTIVATIONS[activation], interleaved, stored_as=stored_as)
    plan = plan_up(problem, HOPPER, hidden, KernelConfigForward(**tile))
    assert (plan is not None) == is_one
    assert plan_up(problem, AMPERE, hidden) is None


def test_the_kernel_that_quantizes_hidden_features_always_gathers():
    problem = gemm(**SIZES, dtype="fp8", permute_x=True)
    config = KernelConfigForward(**FORWARD_TILE | {"block_n": 256, "block_k": 128, "fuse_gather": False})
    hidden = Hidden(ACTIVATIONS["swiglu"], False, stored_as=Format())
    assert plan_forward(problem, HOPPER, config).copies_x
    plan = plan_up(problem, HOPPER, hidden, config)
    assert plan is not None and plan.problem == problem and not plan.copies_x


def test_dx_is_added_up_in_parts_unless_whole_rows_are_summed():
    problem = gemm(permute_x=True, permute_y=True, **SIZES | {"in_features": 2048, "num_rows": 65536})
    plan = plan_dx(problem, HOPPER, sums_rows=False, config=KernelConfigDX(**DX_TILE, fuse_gather=False))
    assert plan.part_columns and plan.copies_dy and not plan.problem.permute_y and not plan.adds_up
    plan = plan_dx(problem, HOPPER, sums_rows=True, config=KernelConfigDX())
    assert plan.part_columns is None and plan.adds_up and not plan.copies_dy
    plan = plan_dx(gemm(**SIZES), HOPPER, sums_rows=False)
    assert plan.part_columns is None and not plan.adds_up


@pytest.mark.parametrize(
    ("config", "scales_dy", "copies"),
    [
        (KernelConfigDW(), False, (False, False, None)),
        (KernelConfigDW(), True, (False, True, None)),
        (KernelConfigDW(fuse_gather=False), False, (True, True, None)),
        (KernelConfigDW(**DW_TILE), False, (False, True, None)),  # it gathers only one of the two
        (KernelConfigDW(**DW_TILE, fuse_gather=False), False, (True, True, 512)),
    ],
)
def test_what_is_copied_for_dw(config, scales_dy, copies):
    problem = gemm(permute_x=True, permute_y=True, **SIZES)
    plan = plan_dw(problem, HOPPER, scales_dy, config)
    assert (plan.copies_x, plan.copies_dy, plan.part_features) == copies
    assert plan.problem.permute_x != plan.copies_x and plan.problem.permute_y != plan.copies_dy


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"num_rows": 8192, "in_features": 2048, "out_features": 16, "num_experts": 1}, 16),
        ({"num_rows": 8192, "in_features": 16, "out_features": 512, "num_experts": 1}, 32),  # of two steps each
        ({"num_rows": 8192, "in_features": 2048, "out_features": 16, "num_experts": 128}, 1),  # tiles enough
        ({"num_rows": 200, "in_features": 2048, "out_features": 16, "num_experts": 1}, 1),
    ],
)
def test_in_how_many_parts_rows_are_reduced_for_dw(sizes, parts):
    problem = gemm(w_layout="ekn", dtype="bfloat16", topk=1, **sizes)
    assert plan_dw(problem, HOPPER, scales_dy=False).row_parts == parts
