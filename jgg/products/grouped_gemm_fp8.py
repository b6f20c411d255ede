"""`grouped_gemm` of operands that are both quantized."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_arrays, check_instance
from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.problem import GroupedGemmProblem, check_problem
from jgg.core.quantized import BLOCK, QuantizedArray, check_blocks
from jgg.core.schedule import as_indices, group_bounds
from jgg.launching.choice import How, how_of
from jgg.products.forward import FORWARD, Forward


def multiply_quantized(
    implementation: str | None, config: object, *, x: QuantizedArray, w: object, group_sizes: ArrayLike, topk: int,
    gather_indices: ArrayLike | None, permute_x: bool, permute_y: bool, topk_weights: ArrayLike | None,
    bias: ArrayLike | None, w_layout: str, precision: jax.lax.PrecisionLike, out_dtype: DTypeLike | None,
) -> jax.Array:  # fmt: skip
    """y, with the arguments of `grouped_gemm` checked; x and w get no gradient, the others that in plain JAX.

    Args:
      config: of the forward kernel, or None.

    Raises: TypeError, ValueError: as `grouped_gemm`, and for blocks other than of `quantize_tokens` and
      `quantize_weights`.
    """
    check_instance("w", w, QuantizedArray, "a QuantizedArray, as x is")
    assert isinstance(w, QuantizedArray)
    given = {"group_sizes": group_sizes, "gather_indices": gather_indices, "topk_weights": topk_weights, "bias": bias}
    arrays = as_arrays(given, may_be_none=("gather_indices", "topk_weights", "bias"))
    dense = {name: jax.ShapeDtypeStruct(array.shape, jnp.bfloat16) for name, array in (("x", x), ("w", w))}
    problem = check_problem(
        **arrays, x=dense["x"], w=dense["w"], topk=topk, permute_x=permute_x, permute_y=permute_y, w_layout=w_layout,
        precision=precision, out_dtype=jnp.bfloat16 if out_dtype is None else out_dtype,
    )  # fmt: skip
    check_blocks("x", x, 1)
    check_blocks("w", w, BLOCK)
    how = how_of(problem, implementation)._replace(config=config)
    w = w if problem.w_layout == "enk" else w.mT
    return _run(problem.quantized, how, x, w, **arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run(
    problem: GroupedGemmProblem, how: How, x: QuantizedArray, w: QuantizedArray, group_sizes: jax.Array,
    gather_indices: jax.Array | None, topk_weights: jax.Array | None, bias: jax.Array | None,
) -> jax.Array:  # fmt: skip
    bounds = group_bounds(group_sizes, problem.num_rows)
    x, w = jax.tree.map(jax.lax.stop_gradient, (x, w))
    operands = Forward(x, w, bounds, as_indices(gather_indices), topk_weights, bias)
    axes = varying_axes(*jax.tree.leaves(operands))
    operands = jax.tree.map(lambda array: vary_over(axes, array), operands)
    return FORWARD(how, operands, problem=problem)
