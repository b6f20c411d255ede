"""Products in FP8 as `jgg bench --dtype fp8` times them: operands quantized before, and what quantizing takes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.fp8 import quantize_tokens, quantize_weights
from jgg.grouped_gemm import grouped_gemm

BFLOAT16, QUANTIZE = "bfloat16", "quantize"  # the same product in bfloat16, and making rows of FP8


def add_quantized(op: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Operands of a product with what it multiplies in FP8, and in their own dtype what that dequantizes to.

    Scales are powers of two, so that bfloat16 holds those numbers and the same product of them is the reference.

    Args:
      op: "forward", with x gathered or not, or "dx".
      arrays: `workloads.operands`.
    """
    rows = _rows_of(op)
    quantized_rows = jax.jit(_quantize_rows)(arrays[rows])
    weights = jax.jit(lambda w: quantize_weights(w, power_of_2_scales=True))(arrays["w"])
    plain = {name: each.dequantize(arrays[name].dtype) for name, each in ((rows, quantized_rows), ("w", weights))}
    return arrays | plain | {"fp8_rows": quantized_rows, "fp8_w": weights}


def without_quantized(arrays: dict[str, Any]) -> dict[str, Any]:
    """The operands alone."""
    return {name: array for name, array in arrays.items() if not name.startswith("fp8_")}


def product(op: str, problem: GroupedGemmProblem, implementation: str | None) -> tuple[Callable, Callable]:
    """The function from those operands to y or dx, and the one that brings w into the layout that it reads."""

    def run(arrays):
        gathers = op == "forward" and problem.permute_x
        return grouped_gemm(
            arrays["fp8_rows"], arrays["fp8_w"], arrays["group_sizes"], problem.topk if gathers else 1,
            arrays.get("gather_indices"), permute_x=gathers, preferred_element_type=problem.out_dtype,
            implementation=implementation,
        )  # fmt: skip

    is_k_major = (op == "forward") == (problem.w_layout == "enk")
    return run, lambda w: w if is_k_major else QuantizedArray(jnp.copy(w.values.mT), w.scales.mT)


def dense(op: str, problem: GroupedGemmProblem) -> Callable:
    """All rows by the first expert's matrix, the same FLOPs, without scales."""

    def run(arrays):
        rows, w = arrays["fp8_rows"].values, arrays["fp8_w"].values[0]
        if problem.permute_x and op == "forward":
            rows = jnp.tile(rows, (problem.topk, 1))
        return jax.lax.dot_general(rows, w, (((1,), (1,)), ((), ())), preferred_element_type=problem.out_dtype)

    return run


def quantize(op: str) -> Callable:
    """The function that quantizes the rows again, from what they are in their own dtype."""
    return lambda arrays: _quantize_rows(arrays[_rows_of(op)])


def _quantize_rows(rows):
    return quantize_tokens(rows, power_of_2_scales=True)


def _rows_of(op):
    return "x" if op == "forward" else "dy"
