"""The least time of a whole MoE layer: the sum over its passes over memory, each as `jgg.tuning.roofline` says.

The passes of forward, where T are tokens, M routed rows, H and I features, and what it reads is left of the arrow:

    router              x [T, H], w_router -> top-k weights and experts [T, k]
    up                  x [T, H], w_gate_up -> hidden [M, I] and, to be kept, the pre-activation [M, 2 * I]
    down                hidden [M, I], w_down -> rows [M, H]
    combination         rows [M, H] -> y [T, H]

The passes of backward:

    dX of down          dy [T, H], w_down, the pre-activation [M, 2 * I] -> its gradient [M, 2 * I]
    dW of down          dy [T, H], hidden [M, I] -> dW
    dX of up            the gradient [M, 2 * I], w_gate_up -> rows [M, H]
    dW of up            x [T, H], the gradient [M, 2 * I] -> dW
    combination of dX   rows [M, H] -> dx [T, H]
    router's gradients  x [T, H], w_router -> dw_router

The activation and its backward pass belong to the products before them, so they read and write nothing of their own.
Parameters of another dtype than x are cast once for both passes, and their dW is written in their dtype. With FP8,
weights, x and dy are quantized once, and products but dW read 8-bit operands and their scales; hidden, the
pre-activation and its gradient are stored in 8 bits by the product that makes them, and that gradient in the dtype of x
too, for dW. Matrices of experts without rows are neither cast nor read.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from benchmarks.layer import FORWARD, LayerProblem
from jgg.core.choices import FP8, OPS
from jgg.core.quantized import BLOCK
from jgg.tuning.roofline import least_seconds
from jgg.tuning.ways import dense
from jgg.tuning.workloads import computed_as, operands


class Part(NamedTuple):
    """A pass over memory; `product` is its name in `dense_times`, or "" if it multiplies nothing of note."""

    name: str
    num_bytes: int
    product: str = ""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The bytes of a layer's arrays.

    Attributes:
      experts: how many experts have rows; None for as many as can have some.
    """

    problem: LayerProblem
    experts: int | None = None

    def plain(self, rows: int, features: int) -> int:
        """Rows in the dtype of x."""
        return rows * features * jnp.dtype(self.problem.dtype).itemsize

    def multiplied(self, rows: int, features: int) -> int:
        """Rows as products other than dW read them."""
        if self.problem.quantization is None:
            return self.plain(rows, features)
        return rows * (features + 4 * -(-features // BLOCK))

    def matrices(self, name: str) -> int:
        """Weights of the experts that have rows, as products read them."""
        _, rows, columns = self.problem.shapes[name]
        if self.problem.quantization is None:
            return self.plain(self._used * rows, columns)
        return self._used * (rows * columns + 4 * -(-rows // BLOCK) * -(-columns // BLOCK))

    def converted(self, name: str) -> int:
        """What a cast or quantization of these weights reads and writes; 0 if products read them unchanged."""
        if self.problem.quantization is None and self._itemsize(name) == jnp.dtype(self.problem.dtype).itemsize:
            return 0
        _, rows, columns = self.problem.shapes[name]
        return self._used * rows * columns * self._itemsize(name) + self.matrices(name)

    def stored(self, name: str) -> int:
        """A parameter, or its gradient, in the parameter's dtype."""
        return math.prod(self.problem.shapes[name]) * self._itemsize(name)

    def _itemsize(self, name):
        return jnp.dtype(self.problem.dtype_of(name)).itemsize

    @property
    def _used(self):
        return min(self.problem.layer.experts, self.problem.num_rows) if self.experts is None else self.experts


def parts_of(problem: LayerProblem, which: str, experts: int | None = None) -> list[Part]:
    """The passes over memory of a layer's forward, or forward and backward; `experts` as in Sizes."""
    sizes, layer = Sizes(problem, experts), problem.layer
    x, choices = sizes.plain(layer.tokens, layer.hidden), 8 * problem.num_rows
    converted = sum(map(sizes.converted, ("w_gate_up", "w_down")))
    parts = [
        Part("router", x + sizes.stored("w_router") + choices),
        *([Part("weights converted", converted)] if converted else []),
        *forward_parts(sizes, keeps=which != FORWARD),
    ]
    if which != FORWARD:
        parts += [*dx_parts(sizes), *dw_parts(sizes), Part("router's gradients", x + 2 * sizes.stored("w_router"))]
    return parts


def forward_parts(sizes: Sizes, keeps: bool) -> list[Part]:
    """The passes of forward but for the router; `keeps` says whether the pre-activation is stored."""
    tokens, rows, features, hidden = _axes(sizes)
    pre_activation = sizes.multiplied(rows, 2 * hidden) if keeps else 0
    x, stored = sizes.multiplied(tokens, features), sizes.multiplied(rows, hidden)
    return [
        *_quantization(sizes, "x"),
        Part("up", x + sizes.matrices("w_gate_up") + stored + pre_activation, "up forward"),
        Part("down", stored + sizes.matrices("w_down") + sizes.plain(rows, features), "down forward"),
        Part("combination", sizes.plain(rows + tokens, features)),
    ]


def dx_parts(sizes: Sizes, keeps: bool = True) -> list[Part]:
    """The passes of backward that compute dx; `keeps` says whether dW or another product reads the gradient too."""
    tokens, rows, features, hidden = _axes(sizes)
    pre_activation, plain = sizes.multiplied(rows, 2 * hidden), sizes.plain(rows, 2 * hidden)
    gradient = pre_activation + (plain if keeps and sizes.problem.quantization is not None else 0)
    dy = sizes.multiplied(tokens, features)
    return [
        *_quantization(sizes, "dy"),
        Part("dX of down", dy + sizes.matrices("w_down") + pre_activation + gradient, "down dx"),
        Part("dX of up", pre_activation + sizes.matrices("w_gate_up") + sizes.plain(rows, features), "up dx"),
        Part("combination of dX", sizes.plain(rows + tokens, features)),
    ]


def dw_parts(sizes: Sizes) -> list[Part]:
    """The passes of backward that compute the gradients of the experts' weights."""
    tokens, rows, features, hidden = _axes(sizes)
    of_tokens, gradient = sizes.plain(tokens, features), sizes.plain(rows, 2 * hidden)
    return [
        Part("dW of down", of_tokens + sizes.multiplied(rows, hidden) + sizes.stored("w_down"), "down dw"),
        Part("dW of up", of_tokens + gradient + sizes.stored("w_gate_up"), "up dw"),
    ]


def _axes(sizes):
    layer = sizes.problem.layer
    return layer.tokens, sizes.problem.num_rows, layer.hidden, layer.expert_intermediate


def _quantization(sizes, name):
    """The pass that quantizes tokens, if the layer multiplies in FP8."""
    if sizes.problem.quantization is None:
        return []
    shape = sizes.problem.shapes[name]
    return [Part(f"{name} quantized", sizes.plain(*shape) + sizes.multiplied(*shape))]


def least_layer_seconds(
    parts: list[Part], copy_speed: float | None, dense_seconds: Mapping[str, float]
) -> float | None:
    """The sum of the least times of passes in seconds; None if a speed that one of them needs was not measured.

    Args:
      copy_speed: as in `least_seconds`.
      dense_seconds: the times of dense products that `dense_times` measured, by name.
    """
    times = [
        least_seconds(part.num_bytes, copy_speed, dense_seconds.get(part.product) if part.product else 0.0)
        for part in parts
    ]
    return None if None in times else math.fsum(time for time in times if time is not None)


def dense_times(problem: LayerProblem, seed: int, is_in_fp8: bool = False) -> dict[str, float]:
    """Measures a dense product as large as each of the experts' products, in seconds; the names are as "up forward".

    In FP8 there is no dW, which a layer does not compute in FP8.
    """
    one_expert = dataclasses.replace(problem.layer, experts=1, topk=1, tokens=problem.num_rows)
    dtype, w_layout, ops = (FP8, "enk", OPS[:2]) if is_in_fp8 else (problem.dtype, problem.w_layout, OPS)
    return {
        f"{name} {op}": _time_dense(*computed_as(op, gemm), seed)
        for op in ops
        for name, gemm in one_expert.gemms(dtype=dtype, w_layout=w_layout).items()
    }


def _time_dense(op, gemm, seed):
    return dense(op, gemm, operands(gemm, "one", seed)).measure().seconds
