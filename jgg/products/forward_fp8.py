"""The forward product of FP8 operands with block scales; dX is the same with turned weights."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.requirements import why_not_fp8
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import E4M3, QuantizedArray, ToQuantize
from jgg.launching.choice import How, Launcher
from jgg.primitives.product import Product
from jgg.products.forward import FORWARD, Forward
from jgg.products.quantize import QUANTIZE_WEIGHTS, Quantize


def in_dtype(operands: Forward, problem: GroupedGemmProblem, dtype) -> tuple[Forward, GroupedGemmProblem]:
    """The operands dequantized, and the problem of them."""
    dense = {name: getattr(operands, name).dequantize(dtype) for name in ("x", "w")}
    return operands._replace(**dense), dataclasses.replace(problem, dtype=jnp.dtype(dtype))


def _plain(operands: Forward, problem: GroupedGemmProblem):
    """In float32, so that only sums are rounded otherwise than the kernels'; no operand is dequantized whole."""
    exact = dataclasses.replace(problem, precision=jax.lax.Precision.HIGHEST)
    return FORWARD.plain(operands, problem=exact)


def _launch(launcher: Launcher, operands: Forward, problem: GroupedGemmProblem):
    if why_not_fp8(problem, launcher.target) is not None:
        operands, problem = in_dtype(operands, problem, problem.out_dtype)
        launcher = launcher._replace(config=None)
    else:
        operands = with_quantized_weights(operands, functools.partial(QUANTIZE_WEIGHTS.launch, launcher))
    return FORWARD.launch(launcher, operands, problem=problem)


def with_quantized_weights(operands: Forward, quantize_weights: Callable[..., list[jax.Array]]) -> Forward:
    """The operands with weights that are ToQuantize quantized.

    Args:
      quantize_weights: QUANTIZE_WEIGHTS, by the implementation of the product.
    """
    w = operands.w
    if not isinstance(w, ToQuantize):
        return operands
    options = {"dtype": E4M3, "power_of_2_scales": w.power_of_2_scales, "keeps": not w.turned, "turns": w.turned}
    first, second = quantize_weights(Quantize(w.array), **options)
    return operands._replace(w=QuantizedArray(second, first.mT) if w.turned else QuantizedArray(first, second))


def _several(how: How, operands: Forward, problem: GroupedGemmProblem):
    operands, problem = in_dtype(operands, problem, problem.out_dtype)
    return FORWARD(how._replace(config=None), operands, problem=problem)


def merge_shared_weights(product: Product, how: How, operands: Forward, batched: Forward, **parameters):
    """A product under `vmap`: in a loop, before which weights that all elements share are quantized once."""
    if not isinstance(operands.w, ToQuantize) or batched.w.array:
        return None
    operands = with_quantized_weights(operands, functools.partial(QUANTIZE_WEIGHTS, how))
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched._replace(w=None))
    return jax.vmap(lambda operands: product(how, operands, **parameters), in_axes=(axes,))(operands)


FORWARD_FP8: Product = Product(
    "forward_fp8",
    Forward,
    result_types=lambda operands, problem: [(problem.y_shape, problem.out_dtype)],
    plain=_plain,
    launch=_launch,
    several=_several,
    merge_batch=lambda *args, **parameters: merge_shared_weights(FORWARD_FP8, *args, **parameters),
    config_type=KernelConfigForward,
)
"""[y of `problem.y_shape`] of quantized x and w [E, N, K], with scales for 128 features of x and for 128 x 128 of w.

By FORWARD of what is dequantized to the dtype of y where no kernel multiplies in FP8.
"""
