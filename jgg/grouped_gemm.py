"""The public operations: grouped_gemm and the three products alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jgg.configs.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.core.arguments import as_arrays, check_instance
from jgg.core.manual_axes import vary_over, varying_axes
from jgg.core.problem import GroupedGemmProblem, check_problem
from jgg.core.quantized import QuantizedArray, dense_weights
from jgg.core.schedule import GroupBounds, as_indices, group_bounds, group_of_rows, guarded, inverse_permutation
from jgg.launching.choice import How, how_of, is_plain_jax
from jgg.primitives.product import Product
from jgg.products.dbias import DBIAS, Dbias
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx, DxResults
from jgg.products.forward import FORWARD, Forward
from jgg.products.grouped_gemm_fp8 import multiply_quantized
from jgg.products.plain import grouped_gemm as plain


def grouped_gemm(
    x: ArrayLike | QuantizedArray,
    w: ArrayLike | QuantizedArray,
    group_sizes: ArrayLike,
    topk: int = 1,
    gather_indices: ArrayLike | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    kernel_config_fwd: KernelConfigForward | None = None,
    kernel_config_bwd_dx: KernelConfigDX | None = None,
    kernel_config_bwd_dw: KernelConfigDW | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each expert's rows of `x` by that expert's matrix.

    Computes `y[i] = (x[i] @ w[e]^T + bias[e]) * topk_weights[i]` for every row i of each expert e, accumulating in
    float32. Differentiable in x, w, topk_weights and bias, to any order; what the kernels compute is differentiated a
    second time in plain JAX.

    Shapes: T tokens, k experts per token, M = T * k routed rows, E experts, K in-features, N out-features. Rows are in
    expert order (sorted by expert, as `sort_by_expert` sorts them) or in token order (row t * k + j is token t's j-th
    choice).

    Args:
      x: float32, float16 or bfloat16 [M, K] in expert order, or [T, K] in token order with `permute_x`. Or what
        `quantize_tokens` makes of such an array.
      w: [E, N, K] or, with `w_layout="ekn"`, [E, K, N], in the dtype of x; copied in neither case. Or a QuantizedArray
        of this shape: then a quantized x is multiplied in FP8 (on GPUs of compute capability 8.9 and newer, for K a
        multiple of 16; "ekn" copies w), and w is dequantized first for any other. Neither of them gets a gradient.
      group_sizes: integer [E], rows of each expert. A negative or too large size is clamped so that the rows end at M.
      topk: k.
      gather_indices: integer [M], for each row in expert order its position t * k + j in token order. An index outside
        [0, M) reads as zero and writes nowhere; of indices that repeat, any one may write. Gradients are those of
        indices that name each position at most once, which `check` makes sure of.
      permute_x: read row i of x at token `gather_indices[i] // topk`.
      permute_y: write row i of y at `gather_indices[i]`, so that y is in token order. Rows that no index names are
        unspecified.
      topk_weights: float [M] or [T, k] in token order; row i is scaled by `topk_weights[gather_indices[i]]`, or by
        `topk_weights[i]` without gather_indices, in float32.
      bias: float [E, N], added before the scaling.
      w_layout: "enk" as PyTorch keeps weights, "ekn" as JAX does.
      precision: for float32, as in `jax.lax.dot`: on a GPU "default" multiplies in TF32, "high" in three TF32 passes
        and "highest" in IEEE float32. A `jax.lax.DotAlgorithmPreset` counts as the first of these that is as precise.
      preferred_element_type: dtype of the result; by default that of x, or bfloat16 for a quantized one. The cotangent
        of a result in another dtype is not rounded to that of x: "xla" multiplies it in float32, the kernels as the
        sum of two terms in the dtype of x, of which they leave out the second where that is zero.
      kernel_config_fwd, kernel_config_bwd_dx, kernel_config_bwd_dw: configurations of the Triton kernels; by default
        chosen from the shapes and the device.
      implementation: "triton" (CUDA, compute capability 8.0 or newer), "xla" (any platform; in forward mode too) or
        "interpret" (the Triton kernels on the CPU, float32 and float16); by default "triton" where the program is
        compiled for such a GPU and "xla" elsewhere.

    Returns:
      y [M, N]. Rows past `sum(group_sizes)` are zero, whatever such rows of x hold.

    Raises:
      ValueError: shapes disagree, or an option is none of those listed.
      TypeError: a dtype is unsupported, those of x and w differ, or what must be an array, an int or a flag is none.
    """
    _check_config("kernel_config_fwd", kernel_config_fwd, FORWARD)
    _check_config("kernel_config_bwd_dx", kernel_config_bwd_dx, DX)
    _check_config("kernel_config_bwd_dw", kernel_config_bwd_dw, DW)
    return checked_grouped_gemm(
        implementation, (kernel_config_fwd, kernel_config_bwd_dx, kernel_config_bwd_dw), x=x, w=w,
        group_sizes=group_sizes, topk=topk, gather_indices=gather_indices, permute_x=permute_x, permute_y=permute_y,
        topk_weights=topk_weights, bias=bias, w_layout=w_layout, precision=precision, out_dtype=preferred_element_type,
    )  # fmt: skip


def grouped_gemm_forward(
    x: ArrayLike | QuantizedArray, w: ArrayLike | QuantizedArray, group_sizes: ArrayLike, topk: int = 1,
    gather_indices: ArrayLike | None = None, permute_x: bool = False, permute_y: bool = False,
    topk_weights: ArrayLike | None = None, bias: ArrayLike | None = None, *, w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None, preferred_element_type: DTypeLike | None = None,
    kernel_config: KernelConfigForward | None = None, implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """The forward product of `grouped_gemm` alone; its derivative is plain JAX. Same arguments, one `kernel_config`."""
    arguments: dict[str, Any] = {
        "x": x, "w": w, "group_sizes": group_sizes, "topk": topk, "gather_indices": gather_indices,
        "permute_x": permute_x, "permute_y": permute_y, "topk_weights": topk_weights, "bias": bias,
        "w_layout": w_layout, "precision": precision, "out_dtype": preferred_element_type,
    }  # fmt: skip
    if isinstance(x, QuantizedArray):
        _check_config("kernel_config", kernel_config, FORWARD)
        return multiply_quantized(implementation, kernel_config, **arguments)
    return _product(FORWARD, kernel_config, implementation, **arguments)


def grouped_gemm_dx(
    dy: ArrayLike, w: ArrayLike | QuantizedArray, gather_indices: ArrayLike | None, group_sizes: ArrayLike,
    topk: int = 1, permute_x: bool = False, permute_y: bool = False, topk_weights: ArrayLike | None = None, *,
    w_layout: str = "enk", precision: jax.lax.PrecisionLike = None, kernel_config: KernelConfigDX | None = None,
    implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """The gradient of `grouped_gemm` in x alone; its own derivative is plain JAX.

    Computes `dx[i] = (dy[i] @ w[e]) * topk_weights[i]` for every row i of each expert e, and with `permute_x` the sum
    of each token's rows.

    Args:
      dy: [M, N] in the order of y: in token order with `permute_y`, else in expert order.
      w, gather_indices, group_sizes, topk, permute_x, permute_y, topk_weights, w_layout, precision, implementation: as
        in `grouped_gemm`.
      kernel_config: a KernelConfigDX; by default chosen from the shapes and the device.

    Returns: dx in the shape of x, [M, K] or with `permute_x` [T, K], in the dtype of dy.
    Raises: as `grouped_gemm`.
    """
    return _product(
        DX, kernel_config, implementation, dy=dy, w=w, group_sizes=group_sizes, topk=topk,
        gather_indices=gather_indices, permute_x=permute_x, permute_y=permute_y, topk_weights=topk_weights,
        w_layout=w_layout, precision=precision,
    )  # fmt: skip


def grouped_gemm_dw(
    x: ArrayLike, dy: ArrayLike, group_sizes: ArrayLike, gather_indices: ArrayLike | None = None, topk: int = 1,
    permute_x: bool = False, permute_y: bool = False, topk_weights: ArrayLike | None = None, *, w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None, kernel_config: KernelConfigDW | None = None,
    implementation: str | None = None,
) -> jax.Array:  # fmt: skip
    """The gradient of `grouped_gemm` in w alone; its own derivative is plain JAX.

    Computes `dw[e] = sum of topk_weights[i] * dy[i]^T x[i]` over the rows i of each expert e; zero for an expert
    without rows.

    Args:
      x: as in `grouped_gemm`.
      dy: [M, N] in the order of y: in token order with `permute_y`, else in expert order.
      group_sizes, gather_indices, topk, permute_x, permute_y, topk_weights, w_layout, precision, implementation: as in
        `grouped_gemm`.
      kernel_config: a KernelConfigDW; by default chosen from the shapes and the device.

    Returns: dw [E, N, K] or, with `w_layout="ekn"`, [E, K, N], in the dtype of x.
    Raises: as `grouped_gemm`.
    """
    return _product(
        DW, kernel_config, implementation, x=x, dy=dy, group_sizes=group_sizes, topk=topk,
        gather_indices=gather_indices, permute_x=permute_x, permute_y=permute_y, topk_weights=topk_weights,
        w_layout=w_layout, precision=precision,
    )  # fmt: skip


_Hows = tuple[How, How, How]  # of the forward product, dX and dW
_MAY_BE_NONE = ("gather_indices", "topk_weights", "bias", "group_offset")


def checked_grouped_gemm(
    implementation: str | None, configs: tuple[object, object, object] = (None, None, None), **arguments: Any
) -> jax.Array:
    """y by the differentiable operation, with the arguments of `check_problem` checked; for `ragged_dot` too."""
    if isinstance(arguments["x"], QuantizedArray):
        return multiply_quantized(implementation, configs[0], **arguments)
    problem, how, arrays = _checked(implementation, arguments)
    forward, dx, dw = (how._replace(config=config) for config in configs)
    if not _is_plain(problem, how):
        # before `_apply`: jax.debug_nans would report rows of no group in what is named, and so made, inside
        arrays["x"] = checkpoint_name(arrays["x"], "jgg_x")
    return _apply(problem, (forward, dx, dw), **arrays)


def _is_plain(problem: GroupedGemmProblem, how: How) -> bool:
    """Whether a product is plain JAX, with the derivatives of that."""
    return problem.is_empty or is_plain_jax(how.implementation)


def _checked(
    implementation: str | None, arguments: dict[str, Any]
) -> tuple[GroupedGemmProblem, How, dict[str, Any]]:  # fmt: skip
    """The problem, how to compute it, and those of the arguments that are arrays."""
    names = [name for name in ("x", "dy", "w", "group_sizes", *_MAY_BE_NONE) if name in arguments]
    rows = "x" if "x" in arguments else "dy"
    dense = dense_weights(rows, arguments[rows], {name: arguments[name] for name in names})
    arrays = as_arrays(dense, _MAY_BE_NONE)
    problem = check_problem(**arguments | arrays)
    return problem, how_of(problem, implementation), arrays


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    problem: GroupedGemmProblem, hows: _Hows, x: jax.Array, w: jax.Array, group_sizes: jax.Array,
    gather_indices: jax.Array | None = None, topk_weights: jax.Array | None = None, bias: jax.Array | None = None,
    group_offset: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    axes = varying_axes(x, w, topk_weights, bias, group_sizes, group_offset, gather_indices)
    bounds = group_bounds(vary_over(axes, group_sizes), problem.num_rows, group_offset, problem.num_experts)
    gather_indices = as_indices(gather_indices)
    x, w, topk_weights, bias, gather_indices = (vary_over(axes, a) for a in (x, w, topk_weights, bias, gather_indices))
    operands = Forward(x, w, bounds, gather_indices, topk_weights, bias)
    if _is_plain(problem, hows[0]):
        return plain.grouped_gemm(problem, *operands)
    return _differentiable(problem, hows, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(problem: GroupedGemmProblem, hows: _Hows, operands: Forward) -> jax.Array:
    return FORWARD(hows[0], operands, problem=problem)


def _forward(problem: GroupedGemmProblem, hows: _Hows, operands: Forward) -> tuple[jax.Array, Forward]:
    return _differentiable(problem, hows, operands), operands


def _backward(problem: GroupedGemmProblem, hows: _Hows, operands: Forward, dy: jax.Array) -> tuple[Forward]:
    x, w, bounds, gather_indices, topk_weights, bias = operands
    _, how_dx, how_dw = hows
    if problem.dtype == jnp.float32:  # which holds every dtype; 16-bit operands would round dy
        dy = dy.astype(problem.dtype)
    x_if_weighted = None if topk_weights is None else x
    dx, row_sums = DX(how_dx, Dx(dy, w, bounds, x_if_weighted, gather_indices, topk_weights), problem=problem)
    dw = DW(how_dw, Dw(x, dy, bounds, gather_indices, topk_weights), problem=problem)
    d_topk_weights = dbias = None
    if topk_weights is not None:
        assert row_sums is not None  # x was given
        if bias is not None:
            row_sums += bias_row_sums(problem, dy, bias, bounds, gather_indices)
        if gather_indices is not None:
            at = guarded(inverse_permutation(gather_indices), len(row_sums))
            row_sums = row_sums.at[at].get(mode="fill", fill_value=0)
        d_topk_weights = row_sums.reshape(topk_weights.shape).astype(topk_weights.dtype)
    if bias is not None:
        how = how_dw._replace(config=None)
        dbias = DBIAS(how, Dbias(dy, bounds, gather_indices, topk_weights), problem=problem)
        dbias = dbias.astype(bias.dtype)
    return (Forward._make((dx, dw, None, None, d_topk_weights, dbias)),)


_differentiable.defvjp(_forward, _backward)


def bias_row_sums(
    problem: GroupedGemmProblem, dy: jax.Array, bias: jax.Array, bounds: GroupBounds, gather_indices: jax.Array | None
) -> jax.Array:
    """For each row in expert order the sum of dy * bias[its expert], which topk_weights scale too; [M] float32."""
    experts = group_of_rows(bounds, problem.num_rows)
    in_group = experts < problem.num_experts
    experts = jnp.where(in_group, experts, 0)  # rather than clipped by `at`, which checkify reports
    if problem.permute_y:
        dy = dy.at[guarded(gather_indices, problem.num_rows)].get(mode="fill", fill_value=0)
    sums = jnp.sum(dy.astype(jnp.float32) * bias[experts].astype(jnp.float32), axis=1)
    return jnp.where(in_group, sums, 0)


def _product(product: Product[Any], config: object, implementation: str | None, **arguments: Any) -> jax.Array:
    """Checks the arguments, then computes one product of them."""
    _check_config("kernel_config", config, product)
    problem, how, arrays = _checked(implementation, arguments)
    return _run_product(product, problem, how._replace(config=config), **arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_product(
    product: Product[Any], problem: GroupedGemmProblem, how: How, group_sizes: jax.Array,
    gather_indices: jax.Array | None, **arrays: jax.Array | None,
) -> jax.Array:  # fmt: skip
    bounds = group_bounds(group_sizes, problem.num_rows)
    operands = product.operands(**arrays, bounds=bounds, gather_indices=as_indices(gather_indices))
    result = product(how, operands, problem=problem)
    return result.dx if isinstance(result, DxResults) else result


def _check_config(name: str, config: object, product: Product[Any]) -> None:
    kind = product.config_type
    if config is not None and kind is not None:
        check_instance(name, config, kind, f"a {kind.__name__} or None")
