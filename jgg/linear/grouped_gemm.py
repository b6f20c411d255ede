"""The public operations: grouped_gemm and its three products. They check arguments; `products` computes."""

from typing import Any, NamedTuple, TypedDict, Unpack

import jax
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_array_or_none, check_instance, check_keywords
from jgg.core.problem import GroupedGemmProblem
from jgg.core.problem_checks import check_problem
from jgg.core.quantized import QuantizedArray, as_dense
from jgg.launching.choice import how_of
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.linear.differentiable import Arrays, Order, compute_dw, compute_dx, compute_forward, compute_grouped_gemm
from jgg.linear.linear import Configs, Linear
from jgg.linear.low_rank import LowRank, checked_beside
from jgg.linear.weights import as_matrix


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
    low_rank: LowRank | None = None,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    kernel_config_fwd: KernelConfigForward | None = None,
    kernel_config_bwd_dx: KernelConfigDX | None = None,
    kernel_config_bwd_dw: KernelConfigDW | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Multiplies each expert's rows of `x` by the expert's matrix.

    Computes `y[i] = (x[i] @ w[e]^T + bias[e]) * topk_weights[i]` for every row i of each expert e, accumulating in
    float32. Differentiable in x, w, topk_weights and bias, to any order; second and higher derivatives are computed in
    plain JAX.

    Shapes: T tokens, k experts per token, M = T * k routed rows, E experts, K in-features, N out-features. Rows are in
    expert order (sorted by expert, as `sort_by_expert` sorts them) or in token order (row t * k + j is token t's j-th
    choice).

    Args:
      x: float32, float16 or bfloat16 [M, K] in expert order, or [T, K] in token order with `permute_x`. Or a
        QuantizedArray, such as `quantize_tokens` returns for such an array.
      w: [E, N, K] or, with `w_layout="ekn"`, [E, K, N], in the dtype of x; no layout needs a copy. Or a QuantizedArray
        of this shape. If x is quantized too, they are multiplied in FP8 (on GPUs of compute capability 8.9 and newer,
        if K is a multiple of 16; "ekn" copies w); otherwise w is dequantized first. A QuantizedArray gets no gradient.
      group_sizes: integer [E], rows of each expert. A negative or too large size is clamped so that the rows end at M.
      topk: k, experts per token.
      gather_indices: integer [M], for each row in expert order its position t * k + j in token order. An index outside
        [0, M) reads zero and writes nowhere; if an index repeats, any one of its rows may write. Gradients are correct
        only if no index repeats; `jgg.check` reports repeats.
      permute_x: read row i of x at token `gather_indices[i] // topk`.
      permute_y: write row i of y at `gather_indices[i]`, so that y is in token order. Rows that no index names are
        unspecified.
      topk_weights: float [M] or [T, k] in token order; row i is scaled by `topk_weights[gather_indices[i]]`, or by
        `topk_weights[i]` without gather_indices, in float32.
      bias: float [E, N], added before the scaling.
      low_rank: a LoRA term for w, a `jgg.LowRank` in `w_layout`, of any float dtype: `scale * (x[i] @ a[e]^T) @
        b[e]^T` is added to the float32 sums before the bias. Rows of `x @ a^T` are rounded to the dtype of x. Then a
        and b get gradients; w gets none, and no time is spent on one. x must not be quantized.
      w_layout: "enk" as PyTorch keeps weights, "ekn" as JAX does.
      precision: for float32, as in `jax.lax.dot`: on a GPU "default" multiplies in TF32, "high" in three TF32 passes
        and "highest" in IEEE float32. A `jax.lax.DotAlgorithmPreset` counts as the first of these that keeps at least
        as many bits.
      preferred_element_type: dtype of the result; by default the dtype of x, or bfloat16 if x is quantized. If the
        result and x differ in dtype, y's cotangent is not rounded to the dtype of x: "xla" multiplies it in float32,
        and the kernels multiply the sum of two pieces in the dtype of x, skipping the second where it is zero.
      kernel_config_fwd, kernel_config_bwd_dx, kernel_config_bwd_dw: configurations of the Triton kernels; by default
        chosen from the shapes and the device.
      implementation: "triton" (CUDA, compute capability 8.0 or newer), "xla" (any platform; in forward mode too) or
        "interpret" (the Triton kernels on the CPU, float32 and float16); by default "triton" if the program is compiled
        for such a GPU and "xla" elsewhere.

    Returns:
      y [M, N]. Rows past `sum(group_sizes)` are zero, whatever such rows of x hold.

    Raises:
      ValueError: shapes disagree, or an option is not one of those listed.
      TypeError: a dtype is unsupported, x and w differ in dtype, or an argument is not the array, int or flag that it
        must be.
    """
    configs = Configs(
        _checked_config("kernel_config_fwd", kernel_config_fwd, KernelConfigForward),
        _checked_config("kernel_config_bwd_dx", kernel_config_bwd_dx, KernelConfigDX),
        _checked_config("kernel_config_bwd_dw", kernel_config_bwd_dw, KernelConfigDW),
    )
    options = Options(
        topk=topk,
        gather_indices=gather_indices,
        permute_x=permute_x,
        permute_y=permute_y,
        topk_weights=topk_weights,
        w_layout=w_layout,
        precision=precision,
    )
    x, w = _factors(x, w)
    bias = as_array_or_none("bias", bias)
    problem, order = _checked(group_sizes, options, x=x, w=w, bias=bias, out_dtype=preferred_element_type)
    arrays = Arrays(x, as_matrix("w", w), *order, bias)
    if low_rank is not None:
        check_instance("x", arrays.x, jax.Array, "no QuantizedArray with low_rank")
        matrix = checked_beside("low_rank", arrays.matrix, low_rank, problem.w_layout)
        arrays = arrays._replace(matrix=matrix)
    linear = Linear(problem, how_of(problem, implementation), configs, trains=arrays.matrix.is_trained)
    return compute_grouped_gemm(linear, arrays)


class Options(TypedDict, total=False):
    """The keyword arguments that `grouped_gemm` and its three products share, but for `group_sizes`."""

    topk: int
    gather_indices: ArrayLike | None
    permute_x: bool
    permute_y: bool
    topk_weights: ArrayLike | None
    w_layout: str
    precision: jax.lax.PrecisionLike


def grouped_gemm_forward(
    x: ArrayLike | QuantizedArray,
    w: ArrayLike | QuantizedArray,
    *,
    group_sizes: ArrayLike,
    bias: ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    kernel_config: KernelConfigForward | None = None,
    implementation: str | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Only the forward product of `grouped_gemm`; its derivative is plain JAX.

    Args:
      x, w, group_sizes, bias, preferred_element_type, implementation: as in `grouped_gemm`.
      kernel_config: by default chosen from the shapes and the device.
      options: any of topk, gather_indices, permute_x, permute_y, topk_weights, w_layout and precision, as in
        `grouped_gemm`.

    Returns: y, as `grouped_gemm`.
    Raises: as `grouped_gemm`.
    """
    configs = Configs(forward=_checked_config("kernel_config", kernel_config, KernelConfigForward))
    x, w = _factors(x, w)
    bias = as_array_or_none("bias", bias)
    problem, order = _checked(group_sizes, options, x=x, w=w, bias=bias, out_dtype=preferred_element_type)
    arrays = Arrays(x, as_matrix("w", w), *order, bias)
    return compute_forward(Linear(problem, how_of(problem, implementation), configs), arrays)


def grouped_gemm_dx(
    dy: ArrayLike,
    w: ArrayLike | QuantizedArray,
    *,
    group_sizes: ArrayLike,
    kernel_config: KernelConfigDX | None = None,
    implementation: str | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Only the gradient of `grouped_gemm` in x; its own derivative is plain JAX.

    Computes `dx[i] = (dy[i] @ w[e]) * topk_weights[i]` for every row i of each expert e, and with `permute_x` the sum
    of each token's rows.

    Args:
      dy: [M, N] in the order of y: in token order with `permute_y`, else in expert order.
      w, group_sizes, kernel_config, implementation, options: as in `grouped_gemm_forward`.

    Returns: dx in the shape of x, [M, K] or with `permute_x` [T, K], in the dtype of dy.
    Raises: as `grouped_gemm`.
    """
    configs = Configs(dx=_checked_config("kernel_config", kernel_config, KernelConfigDX))
    dy = as_array("dy", dy)
    w = as_dense("w", w, dy.dtype)
    problem, order = _checked(group_sizes, options, dy=dy, w=w)
    return compute_dx(Linear(problem, how_of(problem, implementation), configs), dy, w, order)


def grouped_gemm_dw(
    x: ArrayLike,
    dy: ArrayLike,
    *,
    group_sizes: ArrayLike,
    preferred_element_type: DTypeLike | None = None,
    kernel_config: KernelConfigDW | None = None,
    implementation: str | None = None,
    **options: Unpack[Options],
) -> jax.Array:
    """Only the gradient of `grouped_gemm` in w; its own derivative is plain JAX.

    Computes `dw[e] = sum of topk_weights[i] * dy[i]^T x[i]` over the rows i of each expert e; zero for an expert
    without rows.

    Args:
      x, group_sizes, kernel_config, implementation, options: as in `grouped_gemm_forward`.
      dy: [M, N] in the order of y: in token order with `permute_y`, else in expert order.
      preferred_element_type: dtype of dw, float32, bfloat16 or float16; None for the dtype of x. Sums are float32.

    Returns: dw [E, N, K] or, with `w_layout="ekn"`, [E, K, N].
    Raises: as `grouped_gemm`.
    """
    configs = Configs(dw=_checked_config("kernel_config", kernel_config, KernelConfigDW))
    x, dy = as_array("x", x), as_array("dy", dy)
    problem, order = _checked(group_sizes, options, x=x, dy=dy, dw_dtype=preferred_element_type)
    return compute_dw(Linear(problem, how_of(problem, implementation), configs), x, dy, order)


class _Checked(NamedTuple):
    """What an operation's arguments give: the problem, and where the rows of its operands are."""

    problem: GroupedGemmProblem
    order: Order


def _checked(group_sizes: ArrayLike, options: Options, **operands: Any) -> _Checked:
    """Raises if an argument is wrong; `operands` are further arguments of `check_problem`, arrays by now."""
    check_keywords(options, Options)
    order = Order(
        as_array("group_sizes", group_sizes),
        as_array_or_none("gather_indices", options.get("gather_indices")),
        as_array_or_none("topk_weights", options.get("topk_weights")),
    )
    return _Checked(check_problem(**operands, **{**options, **order._asdict()}), order)


def _factors(
    x: ArrayLike | QuantizedArray, w: ArrayLike | QuantizedArray
) -> tuple[jax.Array, jax.Array] | tuple[QuantizedArray, QuantizedArray]:
    """x and w as arrays; w stays quantized only if x is."""
    if isinstance(x, QuantizedArray):
        check_instance("w", w, QuantizedArray, "a QuantizedArray, as x is")
        assert isinstance(w, QuantizedArray)
        return x, w
    x = as_array("x", x)
    return x, as_dense("w", w, x.dtype)


def _checked_config[Kind](name: str, config: Kind | None, kind: type[Kind]) -> Kind | None:
    if config is not None:
        check_instance(name, config, kind, f"a {kind.__name__} or None")
    return config
