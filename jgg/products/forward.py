"""The forward product: y[i] = (x[i] @ w[e] + bias[e]) * topk_weights, for the rows i of each expert e.

Operands may be quantized; where no kernel multiplies quantized operands, they are dequantized first.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgg.configs.kernel_configs import KernelConfigForward
from jgg.configs.requirements import FP8_COMPUTE_CAPABILITY, why_not_quantized
from jgg.configs.tuned_configs import choose_config
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import BLOCK, QuantizedArray, ToQuantize, block_of, is_quantized, values_and_scales
from jgg.core.schedule import GroupBounds
from jgg.launching.choice import How, Launcher
from jgg.launching.launch import flat, x_by_tma
from jgg.primitives import vmap
from jgg.primitives.partitioning import Letters
from jgg.primitives.product import Product, array_type
from jgg.products.combine import expert_order, gather, sum_by_token, token_order
from jgg.products.launches import hopper, hopper_quantized, row_tiles
from jgg.products.launches.pieces import Pieces
from jgg.products.launches.row_tiles import WHOLE_PRODUCT, Part
from jgg.products.low_rank import LowRankTerm
from jgg.products.plain import dense
from jgg.products.plain import grouped_gemm as plain
from jgg.products.quantize import QUANTIZE_WEIGHTS, with_quantized

_FEW_ROWS = 32  # rows of a group, on average, for which weights are converted as they are read
_MOST_STAGES = 8
_LEAST_STEP = 32  # features that share a scale, at least


class Forward(NamedTuple):
    """The arrays as `grouped_gemm` takes them, and bounds, the rows of each group.

    x and w may both be QuantizedArrays, with a scale for 128 features of a row of x and for each 128 x 128 block of w
    [E, N, K]; the problem's dtype is then the dtype of their values. With a quantized x, w may also be ToQuantize.
    Beside an x that is not quantized, a QuantizedArray w of any blocks stands for what it dequantizes to.
    """

    x: jax.Array | QuantizedArray
    w: jax.Array | QuantizedArray | ToQuantize
    bounds: GroupBounds
    gather_indices: jax.Array | None = None
    topk_weights: jax.Array | None = None
    bias: jax.Array | None = None
    low_rank: LowRankTerm | None = None


def _plain(operands: Forward, problem: GroupedGemmProblem):
    operands = _with_dense_weights(operands, problem)
    if problem.is_dense:
        return dense.forward(problem, operands.x, operands.w, operands.low_rank, operands.bias)
    if problem.is_quantized:  # in float32, so that only sums are rounded differently than in the kernels
        problem = dataclasses.replace(problem, precision=jax.lax.Precision.HIGHEST)
    return plain.grouped_gemm(problem, *operands)


def _dequantized(operands: Forward, problem: GroupedGemmProblem, dtype: Any) -> tuple[Forward, GroupedGemmProblem]:
    """Quantized operands dequantized to a dtype, and the problem with that dtype."""
    operands = operands._replace(x=operands.x.dequantize(dtype), w=operands.w.dequantize(dtype))
    return operands, dataclasses.replace(problem, dtype=jnp.dtype(dtype))


def _with_dense_weights(operands: Forward, problem: GroupedGemmProblem) -> Forward:
    """The operands, with w dequantized if it is quantized and x is not."""
    is_alone = is_quantized(operands.w) and not problem.is_quantized
    return operands._replace(w=operands.w.dequantize(problem.dtype)) if is_alone else operands


def with_readable_weights(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem
) -> tuple[Launcher, Forward]:
    """The operands, with w dequantized if it is quantized and x is not, unless the kernel converts it as it reads.

    The kernel converts w where groups have few rows, since the product then takes the time of reading w. With more rows
    it would convert w again for each row tile. Where it does, the launcher's configuration has steps of at most as many
    features as share a scale.
    """
    if not is_quantized(operands.w) or problem.is_quantized:
        return launcher, operands
    config = choose_config(KernelConfigForward, problem, launcher.target, launcher.config)
    scaled_features = block_of(operands.w)[1 if problem.w_layout == "enk" else 0]
    is_read = config.kernel == "plain" and launcher.target.compute_capability >= FP8_COMPUTE_CAPABILITY
    is_read &= scaled_features >= _LEAST_STEP and problem.num_rows <= _FEW_ROWS * problem.num_experts
    if not is_read:
        return launcher, _with_dense_weights(operands, problem)
    block_k = min(config.block_k, scaled_features)
    stages = min(_MOST_STAGES, config.num_stages * config.block_k // block_k)  # as many features on their way
    config = dataclasses.replace(config, block_k=block_k, num_stages=stages)
    return launcher._replace(config=config), operands


def _launch(launcher: Launcher, operands: Forward, problem: GroupedGemmProblem):
    """Launches the product; with combine_y one range of columns after the other, each range added up by token."""
    launcher, operands = with_readable_weights(launcher, operands, problem)
    if problem.is_quantized and why_not_quantized(problem, launcher.target) is not None:
        operands, problem = _dequantized(operands, problem, problem.out_dtype)
        launcher = launcher._replace(config=None)
    elif problem.is_quantized:
        quantize_weights = functools.partial(QUANTIZE_WEIGHTS.launch, launcher)
        operands = operands._replace(w=with_quantized(operands.w, quantize_weights))
    product = problem
    if problem.combine_y:
        product = dataclasses.replace(problem, combine_y=False, has_topk_weights=False)
    launcher, x, product = choose(launcher, operands, product)
    if not problem.combine_y:
        return _multiply_rows(launcher, operands._replace(x=x), product)
    _, w, bounds, gather_indices, topk_weights, bias, low_rank = operands
    read_at = gather_indices if product.permute_x else None

    def multiply(x, columns):
        part_of_product = dataclasses.replace(product, out_features=len(columns))
        own_bias = None if bias is None else bias[:, columns.start : columns.stop]
        own = Forward(x, w, bounds, read_at, None, own_bias, low_rank)
        return _multiply_rows(launcher, own, part_of_product, Part(columns.start, zeroes=False))

    return sum_by_token(launcher, problem, multiply, x, problem.out_features, bounds, gather_indices, topk_weights)


def choose(
    launcher: Launcher, operands: Forward, problem: GroupedGemmProblem
) -> tuple[Launcher, Any, GroupedGemmProblem]:
    """Chooses a configuration; if its kernel does not gather, copies x to expert order.

    Returns: (the launcher with the configuration, x, the problem of that x).
    """
    x = operands.x
    launcher = launcher._replace(config=choose_config(KernelConfigForward, problem, launcher.target, launcher.config))
    if problem.permute_x and not launcher.config.fuse_gather:
        x = jax.tree.map(lambda part: expert_order(launcher, part, operands.gather_indices, problem.topk), x)
        problem = dataclasses.replace(problem, permute_x=False)
    return launcher, x, problem


def _multiply_rows(launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, part: Part = WHOLE_PRODUCT):
    """Computes y [M, N]; `problem` and `part` may describe a range of a product's columns."""
    config = launcher.config
    scatter_after = problem.permute_y and (config.kernel == "hopper" or not config.fuse_scatter)
    if scatter_after:
        problem = dataclasses.replace(problem, permute_y=False)
    operands = operands._replace(topk_weights=flat(operands.topk_weights))
    if config.kernel != "hopper":
        y = _multiply_on_every_gpu(launcher, operands, problem, part)
    elif problem.is_quantized:
        y = hopper_quantized.multiply_rows(launcher, problem, *operands, part=part)
    else:
        x, w, bounds, gather_indices, topk_weights, bias, low_rank = operands
        y = hopper.multiply_rows(
            launcher,
            problem,
            Pieces(x),
            w,
            bounds,
            gather_indices,
            topk_weights,
            bias,
            gathers=problem.permute_x,
            part=part,
            low_rank=low_rank,
        )["y"]
    return token_order(launcher, y, operands.gather_indices) if scatter_after else y


def _multiply_on_every_gpu(launcher: Launcher, operands: Forward, problem: GroupedGemmProblem, part: Part):
    """Computes y by `forward_kernel`, which runs on every GPU."""
    from jgg.kernels.forward import forward_kernel

    (x, x_scales), (w, w_scales) = map(values_and_scales, operands[:2])
    _, _, bounds, gather_indices, topk_weights, bias, low_rank = operands
    config, target = launcher.config, launcher.target
    if problem.is_quantized and config.block_k != BLOCK:
        raise ValueError(f"block_k of {config.op} must be {BLOCK} in FP8, got {config.block_k}.")
    own = {
        "x_scales": x_scales,
        "w_scales": w_scales,
        "bias": bias,
        "topk_weights": topk_weights,
        "gather_indices": gather_indices,
    }
    scaled = (0, 0) if w_scales is None else block_of(operands.w)
    scaled_columns, scaled_reduced = scaled if problem.w_layout == "enk" else scaled[::-1]
    rows = row_tiles.Rows("x", x, config.use_tma_load_x and x_by_tma(target, problem))
    outputs = {"y": jax.ShapeDtypeStruct(problem.y_shape, problem.out_dtype)}
    return row_tiles.multiply(
        launcher,
        forward_kernel,
        problem,
        part,
        rows,
        w,
        bounds,
        own,
        outputs,
        low_rank=low_rank,
        GATHER=problem.permute_x,
        SCATTER=problem.permute_y,
        SCALED_REDUCED=scaled_reduced,
        SCALED_COLUMNS=scaled_columns,
    )["y"]


def _several(how: How, operands: Forward, problem: GroupedGemmProblem):
    """Computes on several devices: quantized operands are dequantized first, a term of low rank is computed apart."""
    if operands.low_rank is not None:
        compute = lambda operands, problem: FORWARD(how._replace(config=None), operands, problem=problem)  # noqa: E731
        return _add_term(compute, operands, problem)
    if not problem.is_quantized:
        return FORWARD(how._replace(config=None), _with_dense_weights(operands, problem), problem=problem)
    operands, problem = _dequantized(operands, problem, problem.out_dtype)
    return FORWARD(how._replace(config=None), operands, problem=problem)


def _add_term(compute: Callable[[Forward, GroupedGemmProblem], jax.Array], operands: Forward, problem):
    """Computes a product and its term of low rank one after the other, and adds them in float32."""
    low_rank = operands.low_rank
    assert low_rank is not None
    in_float32 = dataclasses.replace(problem, out_dtype=jnp.dtype(jnp.float32))
    y = compute(operands._replace(low_rank=None), in_float32)
    of_term = dataclasses.replace(
        in_float32, dtype=low_rank.rows.dtype, in_features=low_rank.rank, permute_x=False, has_bias=False
    )
    term = operands._replace(x=low_rank.rows, w=low_rank.matrices, bias=None, low_rank=None)
    return (y + compute(term, of_term)).astype(problem.out_dtype)


def merge_shared_weights(product: Product, how: How, operands: Forward, batched: Forward, **parameters):
    """Computes a quantized product under `vmap` in a loop; weights that all elements share are quantized once, first.

    Returns None for other weights.
    """
    if not isinstance(operands.w, ToQuantize) or batched.w.array:
        return None
    operands = operands._replace(w=with_quantized(operands.w, functools.partial(QUANTIZE_WEIGHTS, how)))
    axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched._replace(w=None))
    return jax.vmap(lambda operands: product(how, operands, **parameters), in_axes=(axes,))(operands)


def _merge_batch(how: How, operands: Forward, batched: Forward, problem: GroupedGemmProblem):
    if problem.is_quantized:
        return merge_shared_weights(FORWARD, how, operands, batched, problem=problem)
    if is_quantized(operands.w):
        return None
    batch = vmap.Batch.of(problem, operands, batched, "x")
    if batch is None or (batched.bias and not batched.w) or operands.low_rank is not None:
        return None
    return (_more_groups if batched.w else _more_rows)(how, batch, operands, batched)


def _more_groups(how, batch, operands, batched):
    y = vmap.more_groups(FORWARD, how, batch, operands, batched, ("x", "w"))
    if batch.problem.combine_y:
        return batch.split(y)
    written = batch.in_group
    if batch.problem.permute_y:
        positions = batch.positions_in_groups()
        at = jnp.where(positions < 0, len(positions), positions)
        written = jnp.zeros_like(written).at[at].set(True, mode="drop")
    return batch.split(vmap.where_rows(written, y))


def _more_rows(how, batch, operands, batched):
    problem = batch.problem
    bounds, _, row_at = batch.merged_order()
    writes_permuted = problem.permute_y or problem.combine_y
    topk = problem.topk if problem.permute_x else 1
    rows = vmap.flat(operands.x)
    x, write, in_place = batch.read_in_order(problem.permute_x, writes_permuted, row_at, rows, gather(how, topk))
    all_rows = dataclasses.replace(
        batch.all_rows(),
        topk=problem.topk if problem.permute_x or problem.combine_y else 1,
        permute_x=in_place,
        permute_y=not problem.combine_y,
    )
    weights = batch.topk_weights if writes_permuted else batch.row_weights()
    return batch.split(FORWARD(how, Forward(x, operands.w, bounds, write, weights, operands.bias), problem=all_rows))


def _letters(operands: Forward, problem: GroupedGemmProblem):
    if problem.is_quantized or is_quantized(operands.w) or operands.low_rank is not None:
        return None
    rows = {"x": ".k", "w": problem.w_layout, "gather_indices": ".", "topk_weights": None, "bias": "en"}
    return Letters(rows, (".n",), ("ek",))


FORWARD: Product[jax.Array] = Product(
    "forward",
    Forward,
    result_types=lambda operands, problem: array_type(problem.y_shape, problem.out_dtype),
    plain=_plain,
    launch=_launch,
    letters=_letters,
    several=_several,
    merge_batch=_merge_batch,
    config_type=KernelConfigForward,
)
"""y of `problem.y_shape`; the parameter is the problem."""
