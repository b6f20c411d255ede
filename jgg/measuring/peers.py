"""What `jgg bench` measures jgg against: a dense product, XLA's ragged_dot, and bfloat16 for products in FP8."""

import dataclasses
import functools
import importlib
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
    """What jgg is compared with.

    Attributes:
      prepare: (op, problem, arrays) -> the ways in which it computes that product of operands (`workloads.operands`),
        which it brings into the layout that it wants.
      dtypes: names of those for which it is measured.
      unavailable: () -> why it cannot run here, in one line, or None.
    """

    prepare: Callable[[str, GroupedGemmProblem, dict[str, Any]], Iterable[Way]]
    dtypes: tuple[str, ...] = FLOATS
    unavailable: Callable[[], str | None] = lambda: None


def _dense(op, problem, arrays):
    """The first expert's matrix with all rows, the same FLOPs; right where all rows are in the first group.

    The product of quantized operands is one of their values alone, which is as large, but no result to check.
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
    return [JaxProduct(run, used, problem.flops, problem.bytes_accessed, finish, is_checked=is_checked)]


def ragged_dot(module: str, op: str, problem: GroupedGemmProblem, arrays: dict[str, Any]) -> list[JaxProduct]:
    """Prepares a module's function with the interface of jax.lax.ragged_dot, on w [E, K, N]; gradients by jax.vjp."""
    function = importlib.import_module(module).ragged_dot
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
    return [JaxProduct(run, operands, problem.flops, problem.bytes_accessed, swap if op == "dw" else as_it_is)]


def _bfloat16(op, problem, arrays):
    """jgg's own product of the numbers that the operands stand for, which bfloat16 can hold."""
    plain = dataclasses.replace(problem, dtype=jnp.dtype("bfloat16"))
    floats = {name: each.dequantize("bfloat16") for name, each in arrays.items() if isinstance(each, QuantizedArray)}
    return [JaxProduct(product(op, plain, None), arrays | floats, plain.flops, plain.bytes_accessed)]


PEERS = {
    DENSE: Peer(_dense, (*FLOATS, FP8)),
    "ragged_dot": Peer(functools.partial(ragged_dot, "jax.lax")),
    "bfloat16": Peer(_bfloat16, (FP8,)),
}
