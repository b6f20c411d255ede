"""The peers with which `jgg bench` compares jgg: a dense product, XLA's ragged_dot, and bfloat16 for FP8 products."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jgg.core.problem import DTYPES, GroupedGemmProblem
from jgg.core.quantized import QuantizedArray
from jgg.measuring.timing import product
from jgg.measuring.ways import JaxProduct, Way, as_it_is
from jgg.measuring.workloads import FP8, gathered_rows

DENSE = "dense"  # the peer that is a dense product of the same FLOPs
FLOATS = tuple(jnp.dtype(dtype).name for dtype in DTYPES)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library or function with which jgg is compared.

    Attributes:
      prepare: function (op, problem, arrays) -> the ways in which the peer computes this product. `arrays` are made by
        `workloads.operands`; the function converts them to the layout that the peer needs. For a whole layer, problem
        is a `benchmarks.layer.LayerProblem` with its operands, and op one of `benchmarks.layer.PASSES`.
      dtypes: names of the dtypes for which the peer is measured.
      unavailable: function () -> why the peer cannot run here, in one line, or None if it can.
    """

    prepare: Callable[[str, Any, dict[str, Any]], Iterable[Way]]
    dtypes: tuple[str, ...] = FLOATS
    unavailable: Callable[[], str | None] = lambda: None


def _dense(op, problem, arrays):
    """Multiplies all rows by the first expert's matrix: the same FLOPs, and right if all rows are in the first group.

    For quantized operands it multiplies their values without the scales: as much work, but no result to check.
    """
    axes = problem.w_layout[1:]
    left, right, einsum = {
        "forward": ("x", "w", f"mk,{axes}->mn"),
        "dx": ("dy", "w", f"mn,{axes}->mk"),
        "dw": ("dy", "x", "mn,mk->nk") if axes == "nk" else ("x", "dy", "mk,mn->kn"),
    }[op]
    values = {name: each.values if isinstance(each, QuantizedArray) else each for name, each in arrays.items()}
    operands = values | {"x": gathered_rows(problem, values), "w": values["w"][0]}

    def run(arrays):
        precision, dtype = problem.precision, problem.out_dtype
        return jnp.einsum(einsum, arrays[left], arrays[right], precision=precision, preferred_element_type=dtype)

    def among_experts(result):
        return jnp.zeros(problem.w_shape, result.dtype).at[0].set(result)

    used = {name: operands[name] for name in (left, right, "group_sizes")}
    finish, is_checked = among_experts if op == "dw" else as_it_is, not isinstance(arrays["w"], QuantizedArray)
    return [JaxProduct(run, used, problem.flops, problem.bytes_accessed(op), finish, is_checked=is_checked)]


def ragged_dot(
    functions: Callable[[], dict[str, Callable]], op: str, problem: GroupedGemmProblem, arrays: dict[str, Any]
) -> list[JaxProduct]:
    """Prepares functions that take what jax.lax.ragged_dot takes; dX and dW come from jax.vjp.

    Args:
      functions: function () -> functions by the names of the ways in which they compute the product.
    """
    return [_ragged_dot(name, function, op, problem, arrays) for name, function in functions().items()]


def jax_functions() -> dict[str, Callable]:
    """XLA's grouped product."""
    return {"": jax.lax.ragged_dot}


def _ragged_dot(variant, function, op, problem, arrays):
    precision = None if problem.precision == jax.lax.Precision.DEFAULT else problem.precision
    swap = functools.partial(jnp.swapaxes, axis1=1, axis2=2) if problem.w_layout == "enk" else as_it_is

    def run(arrays):
        x = gathered_rows(problem, arrays)

        def product(x, w):
            return function(x, w, arrays["group_sizes"], precision=precision)

        if op == "forward":
            return product(x, arrays["w"])
        gradients = jax.vjp(product, x, arrays["w"])[1](arrays["dy"])
        return gradients[("dx", "dw").index(op)]

    operands = arrays | {"w": swap(arrays["w"])}
    finish, num_bytes = swap if op == "dw" else as_it_is, problem.bytes_accessed(op)
    return JaxProduct(run, operands, problem.flops, num_bytes, finish, variant=variant)


def _bfloat16(op, problem, arrays):
    """Prepares jgg's own product in bfloat16 of the dequantized operands, which bfloat16 can hold exactly."""
    plain = dataclasses.replace(problem, dtype=jnp.dtype("bfloat16"), is_quantized=False)
    floats = {name: each.dequantize("bfloat16") for name, each in arrays.items() if isinstance(each, QuantizedArray)}
    return [JaxProduct(product(op, plain, None), arrays | floats, plain.flops, plain.bytes_accessed(op))]


PEERS = {
    DENSE: Peer(_dense, (*FLOATS, FP8)),
    "ragged_dot": Peer(functools.partial(ragged_dot, jax_functions)),
    "bfloat16": Peer(_bfloat16, (FP8,)),
}
