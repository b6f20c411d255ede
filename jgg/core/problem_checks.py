"""Checks the arguments of a grouped GEMM, its shapes, dtypes and options, and describes it as a problem."""

from collections.abc import Mapping

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.arguments import (
    Shaped,
    as_dtype,
    as_flag,
    as_int,
    as_precision,
    check,
    check_integers,
    check_one_of,
    check_rank,
)
from jgg.core.choices import W_LAYOUTS
from jgg.core.problem import DTYPES, MAX_ROWS, GroupedGemmProblem
from jgg.core.quantized import BLOCK, QUANTIZED_DTYPE, QuantizedArray, check_blocks


def check_problem(
    *,
    x: Shaped | QuantizedArray | None = None,
    dy: Shaped | None = None,
    w: Shaped | QuantizedArray | None = None,
    group_sizes: Shaped,
    topk: int = 1,
    gather_indices: Shaped | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: Shaped | None = None,
    bias: Shaped | None = None,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    out_dtype: DTypeLike | None = None,
    group_offset: Shaped | None = None,
    some_choices: bool = False,
    dw_dtype: DTypeLike | None = None,
) -> GroupedGemmProblem:
    """The problem that the given arrays describe, checked; arrays that an operation does not take are None.

    Args:
      x, w: both are quantized, or neither is.
      out_dtype: dtype of y; by default the dtype of x, or bfloat16 if x is quantized.
      some_choices: gather_indices name only some of the positions in the token order of x.
      dw_dtype: dtype of dW; by default the dtype of x.

    Raises:
      ValueError: a shape or an option is wrong; the message names the argument, what was expected and what came.
      TypeError: a dtype is wrong.
    """
    check_one_of("w_layout", w_layout, W_LAYOUTS)
    topk = as_int("topk", topk, least=1)
    permute_x, permute_y = as_flag("permute_x", permute_x), as_flag("permute_y", permute_y)
    operands = {name: array for name, array in (("x", x), ("dy", dy), ("w", w)) if array is not None}
    dtype = check_operands(operands, {"x": "[M, K]", "dy": "[M, N]", "w": "[E, N, K] or [E, K, N]"})
    check_integers("group_sizes", group_sizes)
    check_rank("group_sizes", group_sizes, "[E]")
    check_known_groups(group_sizes)
    num_experts = group_sizes.shape[0] if w is None else w.shape[0]
    if group_offset is None:
        check(
            group_sizes.shape[0] == num_experts,
            f"group_sizes must be [E] with E equal to w's {num_experts}, got {list(group_sizes.shape)}.",
        )
    num_rows = _check_rows(x, dy, topk, gather_indices, permute_x, permute_y, some_choices)
    in_features, out_features = _check_features(x, dy, w, w_layout)
    num_tokens = x.shape[0] if some_choices and x is not None else None
    _check_topk_weights(topk_weights, num_rows if num_tokens is None else num_tokens * topk, topk)
    check_bias("bias", bias, (num_experts, out_features))
    if out_dtype is None:
        out_dtype = jnp.dtype(jnp.bfloat16) if isinstance(x, QuantizedArray) else dtype
    else:
        out_dtype = as_dtype("preferred_element_type", out_dtype, DTYPES)
    if isinstance(x, QuantizedArray):
        check_blocks("x", x, 1)
        check_blocks("w", w, BLOCK)
    return GroupedGemmProblem(
        num_rows=num_rows,
        num_experts=num_experts,
        in_features=in_features,
        out_features=out_features,
        topk=topk,
        dtype=dtype,
        out_dtype=out_dtype,
        w_layout=w_layout,
        permute_x=permute_x,
        permute_y=permute_y,
        has_topk_weights=topk_weights is not None,
        has_bias=bias is not None,
        precision=as_precision(precision),
        num_tokens=num_tokens,
        dw_dtype=None if dw_dtype is None else as_dtype("preferred_element_type", dw_dtype, DTYPES),
        is_quantized=isinstance(x, QuantizedArray),
    )


def _check_rows(
    x: Shaped | QuantizedArray | None,
    dy: Shaped | None,
    topk: int,
    gather_indices: Shaped | None,
    permute_x: bool,
    permute_y: bool,
    some_choices: bool,
) -> int:
    if gather_indices is not None:
        check_integers("gather_indices", gather_indices)
        check_rank("gather_indices", gather_indices, "[M]")
    elif permute_x or permute_y:
        raise ValueError("gather_indices must be given with permute_x or permute_y: int32 [M], got None.")
    rows: dict[str, int] = {}
    if x is not None:
        rows["x"] = x.shape[0] * (topk if permute_x else 1)
    if dy is not None:
        rows["dy"] = dy.shape[0]
    if gather_indices is not None:
        rows["gather_indices"] = gather_indices.shape[0]
    (first, num_rows), *others = rows.items()
    check_num_rows(first, num_rows)
    if some_choices:
        return rows["gather_indices"]
    of_x = f"x's {x.shape[0]} tokens times topk {topk}" if permute_x and x is not None else f"{first}'s {num_rows}"
    for name, count in others:
        check(count == num_rows, f"{name} must have M rows with M equal to {of_x}, got {count}.")
    check(not permute_x or num_rows % topk == 0, f"dy must have a multiple of topk {topk} rows, got {num_rows}.")
    return rows[first]


def check_known_groups(group_sizes: Shaped) -> None:
    """Raises where the number of groups is known only when an exported program is run."""
    check(
        not jax.export.is_symbolic_dim(group_sizes.shape[0]),
        f"group_sizes must have a known number of groups, got {list(group_sizes.shape)}.",
    )


def check_num_rows(name: str, num_rows: int) -> None:
    """Raises if an argument has more routed rows than kernels can number."""
    is_known = not jax.export.is_symbolic_dim(num_rows)
    check(not is_known or num_rows <= MAX_ROWS, f"{name} must have at most 2**30 - 1 routed rows, got {num_rows}.")


def _check_features(
    x: Shaped | QuantizedArray | None, dy: Shaped | None, w: Shaped | QuantizedArray | None, w_layout: str
) -> tuple[int, int]:
    if w is None:
        assert x is not None and dy is not None
        return x.shape[1], dy.shape[1]
    in_axis, out_axis = (2, 1) if w_layout == "enk" else (1, 2)
    layout = "[E, N, K]" if w_layout == "enk" else "[E, K, N]"
    for name, array, axis, letter in (("x", x, in_axis, "K"), ("dy", dy, out_axis, "N")):
        if array is not None:
            check(
                w.shape[axis] == array.shape[1],
                f"w must be {layout} with {letter} equal to {name}'s {array.shape[1]}, got w {list(w.shape)} "
                f"(w_layout={w_layout!r}).",
            )
    return w.shape[in_axis], w.shape[out_axis]


def _check_topk_weights(topk_weights: Shaped | None, num_rows: int, topk: int) -> None:
    if topk_weights is None:
        return
    as_dtype("topk_weights", topk_weights.dtype, DTYPES)
    shapes = [(num_rows,)] + ([(num_rows // topk, topk)] if num_rows % topk == 0 else [])
    expected = " or ".join(str(list(shape)) for shape in shapes)
    check(
        topk_weights.shape in shapes,
        f"topk_weights must be [M] or [T, topk], here {expected}, got {list(topk_weights.shape)}.",
    )


def check_operands(operands: Mapping[str, Shaped | QuantizedArray], axes: dict[str, str]) -> jnp.dtype:
    """The dtype that all operands share; raises if dtypes differ or an operand's number of axes is wrong."""
    dtypes: dict[str, jnp.dtype] = {}
    for name, array in operands.items():
        dtypes[name] = QUANTIZED_DTYPE if isinstance(array, QuantizedArray) else as_dtype(name, array.dtype, DTYPES)
        check_rank(name, array, axes[name])
    first = next(iter(dtypes))
    for name, dtype in dtypes.items():
        if dtype != dtypes[first]:
            raise TypeError(f"{name} must have the dtype of {first}, {dtypes[first]}, got {dtype}.")
    return dtypes[first]


def check_bias(name: str, bias: Shaped | None, shape: tuple[int, ...]) -> None:
    """Raises unless a bias, if there is one, is of floats and of this shape."""
    if bias is not None:
        as_dtype(name, bias.dtype, DTYPES)
        check(bias.shape == shape, f"{name} must be [E, N] = {list(shape)}, got {list(bias.shape)}.")
