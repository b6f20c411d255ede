"""The linear layer: `forward`, `dx` and `gradients`, whatever its matrices are made of.

Only these functions know a matrix's dense, quantized and low-rank parts, and which product multiplies by each. Where
`Linear.is_plain`, a layer computes in plain JAX, and JAX differentiates it. Otherwise products compute it, and a
custom_vjp calls the three functions: `jgg.linear.differentiable` for one layer, `jgg.experts.moe` for two layers and
the activation between them.

The matrix of a dense layer is [K, N] or [N, K], and so is its gradient; its bias is [N]. Only products see it as one
group, so a backward pass keeps the given matrix and no copy of it.
"""

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from jgg.core.matrix import Factors, Matrix
from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import QuantizedArray, ToQuantize
from jgg.linear.fp8 import both_forms
from jgg.linear.linear import Linear, Routes, Rows
from jgg.linear.weights import exchanged
from jgg.primitives.barrier import barrier
from jgg.products.activate import Activated, Hidden
from jgg.products.dw import DW, Dw
from jgg.products.dx import DX, Dx, DxResults
from jgg.products.forward import FORWARD, Forward
from jgg.products.low_rank import LowRankTerm
from jgg.products.quantize import QUANTIZE_ROWS, QUANTIZE_WEIGHTS, Quantize, with_quantized
from jgg.products.unpack import UNPACK, dequantized
from jgg.products.up import UP


def prepared(linear: Linear, matrix: Matrix, *, keeps: bool, name: str = "jgg_weights") -> Matrix:
    """The matrix with its weights as products read them.

    Dense weights get the dtype of the rows. With a recipe, they are quantized once for both passes if the recipe says
    so, or if they are wider than the rows and would take long to read again.

    Args:
      keeps: whether a backward pass will read the matrix.
      name: the name that `jax.checkpoint` policies use for the cast weights.
    """
    dense, dtype = matrix.dense, linear.problem.dtype
    if linear.recipe is None:
        if dense is None or dense.dtype == dtype:
            return matrix
        return matrix._replace(dense=checkpoint_name(dense.astype(dtype), name))
    if not keeps or matrix.is_quantized:
        return matrix
    is_quantized_once = linear.recipe.keeps_weights or dense.dtype.itemsize > dtype.itemsize
    return matrix.with_forms(both_forms(linear.how, dense, linear.recipe.format)) if is_quantized_once else matrix


def quantized_beside[Values](linear: Linear, matrix: Matrix, values: Values) -> tuple[Matrix, Values]:
    """The matrix in the form that `forward` reads with a recipe, and `values`, which may still be in transit meanwhile.

    Weights that are already quantized stay out of the barrier: XLA would copy whatever a barrier takes out of the
    stacked weights of all layers.
    """
    form = _read(linear, matrix, linear.problem.w_layout)
    if not isinstance(form, ToQuantize):
        return matrix, values
    quantized, values = barrier((with_quantized(form, functools.partial(QUANTIZE_WEIGHTS, linear.how)), values))
    matrix = matrix._replace(transposed=quantized) if form.is_transposed else matrix._replace(straight=quantized)
    return matrix, values


def kept(linear: Linear, matrix: Matrix) -> Matrix:
    """The parts of a prepared matrix that the backward pass reads."""
    if not matrix.is_quantized:
        return matrix
    if linear.recipe is None:
        return matrix._replace(dense=None)
    read, unread = ("transposed", "straight")[:: 1 if linear.problem.w_layout == "enk" else -1]
    return matrix._replace(dense=None, **{unread: None} if getattr(matrix, read) is not None else {})


def restored(linear: Linear, matrix: Matrix) -> Matrix:
    """What was `kept`, with quantized weights dequantized unless products multiply by them in FP8.

    This way the weights of a model's layers need not all be dense at once.
    """
    if linear.recipe is not None or matrix.straight is None:
        return matrix
    unpack = functools.partial(UNPACK, linear.how_or_plain)
    return matrix._replace(dense=dequantized(matrix.straight, linear.problem.dtype, unpack), straight=None)


def forward(
    linear: Linear,
    x: Rows,
    matrix: Matrix,
    routes: Routes,
    bias: jax.Array | None = None,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes y, and the rows x @ a that `gradients` takes, [M, r], or None without factors.

    Args:
      rows: x @ a, if it is computed already.
    """
    operands = _operands(linear, x, matrix, routes, bias, rows)
    problem = linear.problem.quantized if isinstance(operands.x, QuantizedArray) else linear.problem
    y = FORWARD(linear.how_or_plain, operands, linear.configs.forward, problem=problem)
    return y, _kept_rows(operands)


def rows_of_a(linear: Linear, x: Rows, a: jax.Array, routes: Routes) -> jax.Array:
    """Computes the rows x @ a [M, r], in expert order."""
    problem = linear.problem_of_a(a).unweighted
    indices = routes.gather_indices if problem.permute_x else None
    operands = Forward(x, _of_groups(linear, a.astype(problem.dtype)), routes.bounds, indices)
    return FORWARD(linear.how_or_plain, operands, problem=problem)


def forward_activated(
    linear: Linear,
    x: Rows,
    matrix: Matrix,
    routes: Routes,
    bias: jax.Array | None,
    hidden: Hidden,
) -> tuple[Activated, jax.Array | None]:
    """Computes the activation of y, y if it `keeps` y, and the rows x @ a. Results are stored in the rows' format."""
    operands = _operands(linear, x, matrix, routes, bias)
    hidden = hidden._replace(stored_as=linear.row_format)
    problem = linear.problem if linear.row_format is None else linear.problem.quantized
    return UP(linear.how, operands, problem=problem, hidden=hidden), _kept_rows(operands)


def dx(
    linear: Linear,
    dy: jax.Array,
    matrix: Matrix,
    routes: Routes,
    *,
    x: jax.Array | None = None,
    quantized_dy: QuantizedArray | None = None,
) -> tuple[DxResults, jax.Array | None]:
    """Computes the gradient of x, and the rows dy @ b that `gradients` takes, [M, r], or None without factors.

    Args:
      matrix: `prepared` or `restored`.
      x: the layer's x, if row sums for the gradient of topk_weights are wanted.
      quantized_dy: dy in the recipe's format for gradients, if the layer has a recipe.
    """
    factors, matrix, term = matrix.factors, _of_groups(linear, matrix), None
    if factors is not None:
        rows = rows_of_b(linear, dy, factors.b, routes)
        term = LowRankTerm(rows, _of_groups(linear, factors.a.astype(linear.problem.dtype)))
    if quantized_dy is not None:
        problem = linear.transposed_problem
        w = _read(linear, matrix, problem.w_layout)
        operands = Forward(quantized_dy, w, routes.bounds, routes.gather_indices, low_rank=_in_enk(term, problem))
        return DxResults(FORWARD(linear.how, operands, problem=problem.quantized)), term and term.rows
    of_dx = Dx(dy, matrix.dense, routes.bounds, x, routes.gather_indices, routes.topk_weights, term)
    return DX(linear.how_or_plain, of_dx, linear.configs.dx, problem=linear.problem), term and term.rows


def rows_of_b(linear: Linear, dy: jax.Array, b: jax.Array, routes: Routes) -> jax.Array:
    """Computes the rows dy @ b [M, r], in expert order."""
    problem = linear.problem_of_b(b).unweighted
    indices = routes.gather_indices if problem.permute_y else None
    operands = Dx(dy, _of_groups(linear, b.astype(problem.dtype)), routes.bounds, gather_indices=indices)
    return DX(linear.how_or_plain, operands, problem=problem).dx


def gradients(
    linear: Linear,
    x: jax.Array,
    dy: jax.Array,
    matrix: Matrix,
    routes: Routes,
    rows: jax.Array | None = None,
    d_rows: jax.Array | None = None,
) -> Matrix:
    """Computes the gradients of a matrix's dense weights and factors, in their dtypes.

    Gradients that nobody asks for cost nothing: JAX drops their products as dead code.

    Args:
      rows: x @ a, as `forward` returns it.
      d_rows: dy @ b, as `dx` returns it.
    """
    factors = factor_gradients(linear, x, dy, matrix, routes, rows, d_rows)
    return Matrix(dense=weight_gradient(linear, x, dy, routes), factors=factors)


def weight_gradient(linear: Linear, x: Rows, dy: jax.Array, routes: Routes) -> jax.Array | None:
    """Computes the gradient of dense weights; None for quantized weights."""
    if not linear.trains:
        return None
    operands = _outer_operands(linear.problem, x, dy, routes)
    dw = DW(linear.how_or_plain, operands, linear.configs.dw, problem=linear.problem)
    return _of_matrix(linear, dw)


def factor_gradients(
    linear: Linear,
    x: Rows,
    dy: jax.Array,
    matrix: Matrix,
    routes: Routes,
    rows: jax.Array | None,
    d_rows: jax.Array | None,
) -> Factors | None:
    """Computes the gradients of the factors, if there are any; arguments as in `gradients`."""
    if matrix.factors is None:
        return None
    assert rows is not None and d_rows is not None
    da = gradient_of_a(linear, x, d_rows, matrix.factors.a, routes)
    return Factors(da, gradient_of_b(linear, rows, dy, matrix.factors.b, routes))


def gradient_of_a(linear: Linear, x: Rows, d_rows: jax.Array, a: jax.Array, routes: Routes) -> jax.Array:
    """Computes the gradient of a; d_rows are the rows dy @ b."""
    problem = linear.problem_of_a(a)
    return _of_matrix(linear, DW(linear.how_or_plain, _outer_operands(problem, x, d_rows, routes), problem=problem))


def gradient_of_b(linear: Linear, rows: jax.Array, dy: jax.Array, b: jax.Array, routes: Routes) -> jax.Array:
    """Computes the gradient of b; rows are x @ a."""
    problem = linear.problem_of_b(b)
    return _of_matrix(linear, DW(linear.how_or_plain, _outer_operands(problem, rows, dy, routes), problem=problem))


def _kept_rows(operands: Forward) -> jax.Array | None:
    """The rows x @ a for the backward pass.

    Without the barrier, XLA launches their kernel twice in a scan: once for the product, and once to write the rows
    into the stack that the scan keeps.
    """
    return None if operands.low_rank is None else barrier(operands.low_rank.rows)


def _of_groups[Arrays](linear: Linear, arrays: Arrays) -> Arrays:
    """A layer's matrix or bias as products take it; a dense layer's becomes the matrix or bias of one group."""
    is_one_group = linear.problem.is_dense and not linear.is_plain
    return jax.tree.map(lambda array: array[None], arrays) if is_one_group else arrays


def _of_matrix[Arrays](linear: Linear, arrays: Arrays) -> Arrays:
    """What DW returns, as gradients of a layer's matrix: for a dense layer, its single group's."""
    return jax.tree.map(lambda array: array[0], arrays) if linear.problem.is_dense else arrays


def _outer_operands(problem: GroupedGemmProblem, x: Rows, dy: jax.Array, routes: Routes) -> Dw:
    reads_indices = problem.permute_x or problem.permute_y or problem.has_topk_weights
    return Dw(x, dy, routes.bounds, routes.gather_indices if reads_indices else None, routes.topk_weights)


def _operands(
    linear: Linear,
    x: Rows,
    matrix: Matrix,
    routes: Routes,
    bias: jax.Array | None,
    rows: jax.Array | None = None,
) -> Forward:
    """The operands of the forward product: rows and weights quantized if the layer has a recipe, and the term."""
    bounds, gather_indices, topk_weights = routes
    factors, term = matrix.factors, None
    matrix, bias = _of_groups(linear, matrix), _of_groups(linear, bias)
    if factors is not None:
        rows = rows_of_a(linear, x, factors.a, routes) if rows is None else rows
        term = LowRankTerm(rows, _of_groups(linear, factors.b.astype(linear.problem.dtype)))
    if linear.row_format is not None and not isinstance(x, QuantizedArray):
        x = QUANTIZE_ROWS(linear.how, Quantize(x), stored_as=linear.row_format)
    if isinstance(x, QuantizedArray):
        term = _in_enk(term, linear.problem)
        read = _read(linear, matrix, linear.problem.w_layout)
        return Forward(x, read, bounds, gather_indices, topk_weights, bias, term)
    w = matrix.dense if matrix.straight is None else matrix.straight
    return Forward(x, w, bounds, gather_indices, topk_weights, bias, term)


def _read(linear: Linear, matrix: Matrix, w_layout: str) -> QuantizedArray | ToQuantize:
    """Weights [E, N, K] for a product of quantized rows; made of another form if the one that it needs is missing."""
    is_transposed = w_layout == "ekn"
    form, other = (matrix.transposed, matrix.straight)[:: 1 if is_transposed else -1]
    if form is not None:
        return form
    if other is not None and linear.recipe is not None:
        return exchanged(other)
    if linear.recipe is None:  # quantized weights as they were given, in either layout
        return matrix.straight.mT
    return ToQuantize(matrix.dense, is_transposed, linear.recipe.format)


def _in_enk(term: LowRankTerm | None, problem: GroupedGemmProblem) -> LowRankTerm | None:
    """A term for weights in the problem's layout, in the layout of quantized weights, which are [E, N, K]."""
    return term if term is None or problem.w_layout == "enk" else term._replace(matrices=term.matrices.mT)
