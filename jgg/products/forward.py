"""The forward product: y[i] = (x[i] @ w[e] + bias[e]) * topk_weights, for the rows i of each expert e.

Operands may be quantized; where no kernel multiplies quantized operands, they are dequantized first.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray, ToQuantize, block_of, is_quantized
from jgg.core.schedule import GroupBounds, Rows
from jgg.launching.choice import How, Launcher
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.launching.launch import flat
from jgg.primitives import vmap
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import Letters
from jgg.products.combine import Combine, Place, combine, expert_order, gather, positions_of_tokens, token_order
from jgg.products.launches import column_parts, every_gpu, hopper, hopper_quantized
from jgg.products.launches.operands import RowProduct
from jgg.products.launches.pieces import Pieces
from jgg.products.launches.plans import ForwardPlan, plan_forward
from jgg.products.low_rank import LowRankTerm
from jgg.products.plain import dense
from jgg.products.plain import rows as plain
from jgg.products.plain.multilinear import rows_dot
from jgg.products.quantize import QUANTIZE_WEIGHTS, with_quantized
from jgg.products.unpack import UNPACK, dequantized


class Forward(NamedTuple):
    """The arrays as `grouped_gemm` takes them, and bounds, the rows of each group.

    x and w may both be QuantizedArrays, with a scale for 128 features of a row of x and for each 128 x 128 block of w
    [E, N, K]; the problem's dtype is then the dtype of their values. With a quantized x, w may also be ToQuantize.
    In a problem that is not quantized, one of them may be a QuantizedArray, which stands for what it dequantizes to: an
    x as above, or a w of any blocks.
    """

    x: jax.Array | QuantizedArray
    w: jax.Array | QuantizedArray | ToQuantize
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None
    low_rank: LowRankTerm | None = None


def _plain(operands: Forward, problem: GroupedGemmProblem) -> jax.Array:
    operands = _dequantized(operands, problem)
    if problem.is_dense:
        arrays: tuple[Any, Any] = operands.x, operands.w
        return dense.forward(problem, *arrays, operands.low_rank, operands.bias)
    if problem.is_quantized:  # in float32, so that only sums are rounded differently than in the kernels
        problem = dataclasses.replace(problem, precision=jax.lax.Precision.HIGHEST)
    gather_indices, low_rank = operands.gather_indices, operands.low_rank
    options = {
        "scales": plain.row_scales(problem, operands.bounds, gather_indices, operands.topk_weights),
        "write_at": plain.y_rows(problem, gather_indices),
        "adds": problem.combine_y,
        "shape": problem.y_shape,
        "transpose_w": problem.w_layout == "enk",
        "precision": problem.precision,
        "out_dtype": problem.out_dtype if low_rank is None else jnp.float32,
    }
    # w may have another float dtype than x; each matrix is then rounded to the dtype of x where it is multiplied
    rows, w_dtype = (
        Rows(operands.x, plain.x_rows(problem, gather_indices)),
        None if problem.is_quantized else problem.dtype,
    )
    y = rows_dot(rows, operands.w, operands.bounds, bias=operands.bias, w_dtype=w_dtype, **options)
    if low_rank is None:
        return y
    return (y + rows_dot(Rows(low_rank.rows), low_rank.matrices, operands.bounds, **options)).astype(problem.out_dtype)


def _dequantized(operands: Forward, problem: GroupedGemmProblem) -> Forward:
    """The operands, dequantized unless the problem is quantized."""
    if problem.is_quantized:
        return operands
    return operands._replace(x=_dense(operands.x, problem.dtype), w=_dense(operands.w, problem.dtype))


def _dense(array: jax.Array | QuantizedArray | ToQuantize, dtype: DTypeLike) -> jax.Array:
    """An operand, dequantized if it is quantized."""
    return array.dequantize(dtype) if isinstance(array, QuantizedArray | ToQuantize) else array


def plan_of_w(operands: Forward, problem: GroupedGemmProblem) -> dict[str, Any]:
    """What `plan_forward` is told about quantized weights of an x that is not quantized."""
    if problem.is_quantized or not isinstance(operands.w, QuantizedArray):
        return {}
    return {"w_block": block_of(operands.w), "w_is_packed": operands.w.is_packed}


def prepared(launcher: Launcher, plan: ForwardPlan, operands: Forward) -> RowProduct:
    """What the multiplying kernel computes, after the steps of the plan that come before it."""
    x, w = operands.x, operands.w
    if plan.dequantizes and isinstance(w, QuantizedArray):
        x = _dense(x, plan.problem.dtype)
        w = dequantized(w, plan.problem.dtype, functools.partial(UNPACK.launch, launcher))
    elif plan.dequantizes:
        x, w = _dense(x, plan.problem.dtype), _dense(w, plan.problem.dtype)
    elif isinstance(w, ToQuantize):
        w = with_quantized(w, functools.partial(QUANTIZE_WEIGHTS.launch, launcher))
    if plan.copies_x:
        x = jax.tree.map(lambda part: expert_order(launcher, part, operands.gather_indices, plan.problem.topk), x)
    is_summed = plan.part_columns is not None  # rows are then scaled while they are added up
    return RowProduct(
        plan.problem,
        plan.config,
        x if isinstance(x, QuantizedArray) else Pieces(x),
        w,
        operands.bounds,
        None if is_summed and not plan.problem.permute_x else operands.gather_indices,
        None if is_summed else flat(operands.topk_weights),
        operands.bias,
        operands.low_rank,
    )


def _launch(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, config: KernelConfigForward | None = None
) -> jax.Array:
    x_is_quantized = isinstance(operands.x, QuantizedArray)
    plan = plan_forward(problem, launcher.target, config, **plan_of_w(operands, problem), x_is_quantized=x_is_quantized)
    product = prepared(launcher, plan, operands)
    multiply = every_gpu.multiply_forward
    if plan.config.kernel == "hopper":
        multiply = hopper_quantized.multiply if plan.problem.is_quantized else hopper.multiply
    gather_indices = operands.gather_indices
    y: Any = None
    if plan.part_columns is None:
        y = multiply(launcher, product)
        return token_order(launcher, y, gather_indices) if plan.reorders_y else y
    positions, scales = positions_of_tokens(problem, operands.bounds, gather_indices), flat(operands.topk_weights)
    for columns in column_parts.ranges(problem.out_features, plan.part_columns):
        product, y = product.after(y)
        part = Combine(multiply(launcher, product.of_columns(columns)), positions, scales)
        y = combine(launcher, part, problem.topk, Place(y, columns.start, problem.out_features))
    return y


def _several(how: How, operands: Forward, problem: GroupedGemmProblem) -> jax.Array:
    """Computes on several devices: quantized operands are dequantized first, a term of low rank is computed apart."""
    if operands.low_rank is not None:
        return _add_term(functools.partial(FORWARD, how), operands, problem)
    if not problem.is_quantized:
        return FORWARD(how, _dequantized(operands, problem), problem=problem)
    operands = operands._replace(x=_dense(operands.x, problem.out_dtype), w=_dense(operands.w, problem.out_dtype))
    return FORWARD(how, operands, problem=problem.dequantized)


def _add_term(compute: Callable[..., jax.Array], operands: Forward, problem: GroupedGemmProblem) -> jax.Array:
    """Computes a product and its term of low rank one after the other, and adds them in float32."""
    low_rank = operands.low_rank
    assert low_rank is not None
    in_float32 = dataclasses.replace(problem, out_dtype=jnp.dtype(jnp.float32))
    y = compute(operands._replace(low_rank=None), problem=in_float32)
    of_term = dataclasses.replace(
        in_float32,
        dtype=low_rank.rows.dtype,
        in_features=low_rank.rank,
        permute_x=False,
        has_bias=False,
        is_quantized=False,
    )
    term = operands._replace(x=low_rank.rows, w=low_rank.matrices, bias=None, low_rank=None)
    return (y + compute(term, problem=of_term)).astype(problem.out_dtype)


def merge_shared_weights[Results](
    compute: Callable[[Forward], Results], how: How, operands: Forward, batched: Forward
) -> Results | None:
    """Computes a quantized product under `vmap` in a loop; weights that all elements share are quantized once before.

    Returns None for other weights.
    """
    w_batched: Any = batched.w
    if not isinstance(operands.w, ToQuantize) or w_batched.array:
        return None
    operands = operands._replace(w=with_quantized(operands.w, functools.partial(QUANTIZE_WEIGHTS, how)))
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)._replace(w=None)
    return jax.vmap(compute, in_axes=(axes,))(operands)


def _merge_batch(
    how: How,
    operands: Forward,
    batched: Forward,
    problem: GroupedGemmProblem,
    config: KernelConfigForward | None = None,
) -> jax.Array | None:
    compute = functools.partial(FORWARD, how, config=config)
    if problem.is_quantized:
        return merge_shared_weights(functools.partial(compute, problem=problem), how, operands, batched)
    if is_quantized(operands.x) or is_quantized(operands.w):
        return None
    batch = vmap.Batch.of(problem, operands, batched, "x")
    if batch is None or (batched.bias and not batched.w) or operands.low_rank is not None:
        return None
    if batched.w:
        return _more_groups(compute, batch, operands, batched)
    return _more_rows(compute, how, batch, operands)


def _more_groups(
    compute: Callable[..., jax.Array], batch: vmap.Batch, operands: Forward, batched: Forward
) -> jax.Array:
    y = vmap.more_groups(compute, batch, operands, batched)
    if batch.problem.combine_y:
        return batch.split(y)
    written = batch.in_group
    if batch.problem.permute_y:
        positions = batch.positions_in_groups()
        assert positions is not None
        at = jnp.where(positions < 0, len(positions), positions)
        written = jnp.zeros_like(written).at[at].set(True, mode="drop")
    return batch.split(vmap.where_rows(written, y))


def _more_rows(compute: Callable[..., jax.Array], how: How, batch: vmap.Batch, operands: Forward) -> jax.Array:
    problem = batch.problem
    bounds, _, row_at = batch.merged_order()
    writes_permuted = problem.permute_y or problem.combine_y
    topk = problem.topk if problem.permute_x else 1
    assert isinstance(operands.x, jax.Array)
    rows = vmap.flat(operands.x)
    x, write, in_place = batch.read_in_order(problem.permute_x, writes_permuted, row_at, rows, gather(how, topk))
    all_rows = dataclasses.replace(
        problem.repeated(batch.size),
        topk=problem.topk if problem.permute_x or problem.combine_y else 1,
        permute_x=in_place,
        permute_y=not problem.combine_y,
    )
    weights = batch.topk_weights if writes_permuted else batch.row_weights()
    return batch.split(compute(Forward(x, operands.w, bounds, write, weights, operands.bias), problem=all_rows))


def _letters(operands: Forward, problem: GroupedGemmProblem) -> Letters | None:
    if is_quantized(operands.x) or is_quantized(operands.w) or operands.low_rank is not None:
        return None
    rows = {"x": ".k", "w": problem.w_layout, "gather_indices": ".", "topk_weights": None, "bias": "en"}
    return Letters(rows, (".n",), ("ek",))


FORWARD: Operation[jax.Array] = Operation(
    "forward",
    Forward,
    result_types=lambda operands, problem: array_type(problem.y_shape, problem.out_dtype),
    plain=_plain,
    launch=_launch,
    vmap=_merge_batch,
    mesh=_letters,
    several=_several,
)
"""y of `problem.y_shape`; the parameter is the problem."""
