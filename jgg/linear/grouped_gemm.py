"""The public operations: grouped_gemm and its three products. They check arguments; `products` computes."""

from typing import NamedTuple, Self

import jax
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_array_or_none, check_instance
from jgg.core.problem import GroupedGemmProblem, check_problem
from jgg.core.quantized import QuantizedArray, as_dense
from jgg.launching.choice import how_of
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.linear.differentiable import Arrays, compute_dw, compute_dx, compute_forward, compute_grouped_gemm
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
    _check_config("kernel_config_fwd", kernel_config_fwd, KernelConfigForward)
    _check_config("kernel_config_bwd_dx", kernel_config_bwd_dx, KernelConfigDX)
    _check_config("kernel_config_bwd_dw", kernel_config_bwd_dw, KernelConfigDW)
    order = _Order(group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights)
    problem, arrays = _checked(x, w, order, bias, w_layout, precision, preferred_element_type)
    if low_rank is not None:
        check_instance("x", arrays.x, jax.Array, "no QuantizedArray with low_rank")
        matrix = checked_beside("low_rank", arrays.matrix, low_rank, problem.w_layout)
        arrays = arrays._replace(matrix=matrix)
    configs = Configs(kernel_config_fwd, kernel_config_bwd_dx, kernel_config_bwd_dw)
    linear = Linear(problem, how_of(problem, implementation), configs, trains=arrays.matrix.is_trained)
    return compute_grouped_gemm(linear, arrays)


def grouped_gemm_forward(
    x: ArrayLike | QuantizedArray,
    w: ArrayLike | QuantizedArray,
    *,
    group_sizes: ArrayLike,
    topk: int = 1,
    gather_indices: ArrayLike | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    kernel_config: KernelConfigForward | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Only the forward product of `grouped_gemm`; its derivative is plain JAX.

    Args:
      x, w: as in `grouped_gemm`.
      kernel_config: by default chosen from the shapes and the device.
      group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, bias: as in `grouped_gemm`.
      w_layout, precision, preferred_element_type, implementation: as in `grouped_gemm`.

    Returns: y, as `grouped_gemm`.
    Raises: as `grouped_gemm`.
    """
    _check_config("kernel_config", kernel_config, KernelConfigForward)
    order = _Order(group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights)
    problem, arrays = _checked(x, w, order, bias, w_layout, precision, preferred_element_type)
    linear = Linear(problem, how_of(problem, implementation), Configs(forward=kernel_config))
    return compute_forward(linear, arrays)


def grouped_gemm_dx(
    dy: ArrayLike,
    w: ArrayLike | QuantizedArray,
    *,
    group_sizes: ArrayLike,
    topk: int = 1,
    gather_indices: ArrayLike | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: ArrayLike | None = None,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    kernel_config: KernelConfigDX | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Only the gradient of `grouped_gemm` in x; its own derivative is plain JAX.

    Computes `dx[i] = (dy[i] @ w[e]) * topk_weights[i]` for every row i of each expert e, and with `permute_x` the sum
    of each token's rows.

    Args:
      dy: [M, N] in the order of y: in token order with `permute_y`, else in expert order.
      w, group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, w_layout, precision, implementation: as
        in `grouped_gemm`.
      kernel_config: by default chosen from the shapes and the device.

    Returns: dx in the shape of x, [M, K] or with `permute_x` [T, K], in the dtype of dy.
    Raises: as `grouped_gemm`.
    """
    _check_config("kernel_config", kernel_config, KernelConfigDX)
    dy = as_array("dy", dy)
    w = as_dense("w", w, dy.dtype)
    order = _Order(group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights).as_arrays()
    problem = check_problem(dy=dy, w=w, **order._asdict(), w_layout=w_layout, precision=precision)
    linear = Linear(problem, how_of(problem, implementation), Configs(dx=kernel_config))
    return compute_dx(linear, dy, w, *order.arrays)


def grouped_gemm_dw(
    x: ArrayLike,
    dy: ArrayLike,
    *,
    group_sizes: ArrayLike,
    topk: int = 1,
    gather_indices: ArrayLike | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: ArrayLike | None = None,
    w_layout: str = "enk",
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    kernel_config: KernelConfigDW | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Only the gradient of `grouped_gemm` in w; its own derivative is plain JAX.

    Computes `dw[e] = sum of topk_weights[i] * dy[i]^T x[i]` over the rows i of each expert e; zero for an expert
    without rows.

    Args:
      x: as in `grouped_gemm`.
      dy: [M, N] in the order of y: in token order with `permute_y`, else in expert order.
      group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, w_layout, precision, implementation: as in
        `grouped_gemm`.
      preferred_element_type: dtype of dw, float32, bfloat16 or float16; None for the dtype of x. Sums are float32.
      kernel_config: by default chosen from the shapes and the device.

    Returns: dw [E, N, K] or, with `w_layout="ekn"`, [E, K, N].
    Raises: as `grouped_gemm`.
    """
    _check_config("kernel_config", kernel_config, KernelConfigDW)
    x, dy = as_array("x", x), as_array("dy", dy)
    order = _Order(group_sizes, topk, gather_indices, permute_x, permute_y, topk_weights).as_arrays()
    problem = check_problem(
        x=x, dy=dy, **order._asdict(), w_layout=w_layout, precision=precision, dw_dtype=preferred_element_type
    )
    linear = Linear(problem, how_of(problem, implementation), Configs(dw=kernel_config))
    return compute_dw(linear, x, dy, *order.arrays)


class _Order(NamedTuple):
    """Which rows belong to which expert and where they are, as arguments of `grouped_gemm`."""

    group_sizes: ArrayLike
    topk: int
    gather_indices: ArrayLike | None
    permute_x: bool
    permute_y: bool
    topk_weights: ArrayLike | None

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """group_sizes, gather_indices and topk_weights as arrays."""
        indices, weights = (as_array_or_none(name, getattr(self, name)) for name in ("gather_indices", "topk_weights"))
        return as_array("group_sizes", self.group_sizes), indices, weights

    def as_arrays(self) -> Self:
        """The same with arrays."""
        group_sizes, gather_indices, topk_weights = self.arrays
        return self._replace(group_sizes=group_sizes, gather_indices=gather_indices, topk_weights=topk_weights)


def _checked(
    x: ArrayLike | QuantizedArray,
    w: ArrayLike | QuantizedArray,
    order: _Order,
    bias: ArrayLike | None,
    w_layout: str,
    precision: jax.lax.PrecisionLike,
    out_dtype: DTypeLike | None,
) -> tuple[GroupedGemmProblem, Arrays]:
    """The problem and the arrays for the arguments of `grouped_gemm`; w stays quantized only if x is."""
    if isinstance(x, QuantizedArray):
        check_instance("w", w, QuantizedArray, "a QuantizedArray, as x is")
        assert isinstance(w, QuantizedArray)
    else:
        x = as_array("x", x)
        w = as_dense("w", w, x.dtype)
    order, bias = order.as_arrays(), as_array_or_none("bias", bias)
    problem = check_problem(
        x=x, w=w, bias=bias, **order._asdict(), w_layout=w_layout, precision=precision, out_dtype=out_dtype
    )
    return problem, Arrays(x, as_matrix("w", w), *order.arrays, bias)


def _check_config(name: str, config: object, kind: type) -> None:
    if config is not None:
        check_instance(name, config, kind, f"a {kind.__name__} or None")
