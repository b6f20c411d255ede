"""The forward product of FP8 operands with block scales; dX is the same with turned weights."""

import dataclasses

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.requirements import why_not_fp8
from jgg.core.problem import GroupedGemmProblem
from jgg.launching.choice import How, Launcher
from jgg.primitives.product import Product
from jgg.products.forward import FORWARD, Forward


def in_dtype(operands: Forward, problem: GroupedGemmProblem, dtype) -> tuple[Forward, GroupedGemmProblem]:
    """The operands dequantized, and the problem of them."""
    dense = {name: getattr(operands, name).dequantize(dtype) for name in ("x", "w")}
    return operands._replace(**dense), dataclasses.replace(problem, dtype=jnp.dtype(dtype))


def _plain(operands: Forward, problem: GroupedGemmProblem):
    """In float32, so that only sums are rounded otherwise than the kernels'."""
    exact = dataclasses.replace(problem, precision=jax.lax.Precision.HIGHEST)
    operands, exact = in_dtype(operands, exact, "float32")
    return FORWARD.plain(operands, problem=exact)


def _launch(launcher: Launcher, operands: Forward, problem: GroupedGemmProblem):
    if why_not_fp8(problem, launcher.target) is not None:
        operands, problem = in_dtype(operands, problem, problem.out_dtype)
        launcher = launcher._replace(config=None)
    return FORWARD.launch(launcher, operands, problem=problem)


def _several(how: How, operands: Forward, problem: GroupedGemmProblem):
    operands, problem = in_dtype(operands, problem, problem.out_dtype)
    return FORWARD(how._replace(config=None), operands, problem=problem)


FORWARD_FP8 = Product(
    "forward_fp8",
    Forward,
    result_types=lambda operands, problem: [(problem.y_shape, problem.out_dtype)],
    plain=_plain,
    launch=_launch,
    several=_several,
    config_type=KernelConfigForward,
)
"""[y of `problem.y_shape`] of quantized x and w [E, N, K], with scales for 128 features of x and for 128 x 128 of w.

By FORWARD of what is dequantized to the dtype of y where no kernel multiplies in FP8.
"""
