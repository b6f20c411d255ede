"""The definition of truth: grouped GEMM and its gradients in NumPy float64, a loop over groups."""

from typing import NamedTuple

import numpy as np


class Gradients(NamedTuple):
    """Gradients of sum(dy * y) in the operands; None for an operand that was not given."""

    x: np.ndarray
    w: np.ndarray
    topk_weights: np.ndarray | None
    bias: np.ndarray | None


class Specified(NamedTuple):
    """For y and each gradient the elements whose value the contract fixes, broadcastable to them."""

    y: np.ndarray
    x: np.ndarray
    w: np.ndarray
    topk_weights: np.ndarray
    bias: np.ndarray


def group_ranges(group_sizes, num_rows):
    """The rows of each group: a negative size counts as 0, and no group passes num_rows."""
    ranges, start = [], 0
    for size in group_sizes:
        end = min(start + max(int(size), 0), num_rows)
        ranges.append(range(start, end))
        start = end
    return ranges


def grouped_gemm(
    x,
    w,
    group_sizes,
    topk=1,
    gather_indices=None,
    permute_x=False,
    permute_y=False,
    topk_weights=None,
    bias=None,
    w_layout="enk",
):
    """y [M, N]. Of rows written twice the last wins; rows that no index names stay zero."""
    num_rows = x.shape[0] * topk if permute_x else x.shape[0]
    matrices = _in_by_out(w, w_layout)
    positions = _positions(gather_indices, num_rows)
    y = np.zeros((num_rows, matrices.shape[2]))
    for group, rows in enumerate(group_ranges(group_sizes, num_rows)):
        for row in rows:
            product = _x_row(x, positions[row], row, topk, permute_x) @ matrices[group]
            if bias is not None:
                product = product + _float64(bias)[group]
            product = product * _scale(topk_weights, positions[row])
            if not permute_y:
                y[row] = product
            elif positions[row] is not None:
                y[positions[row]] = product
    return y


def gradients(
    dy,
    x,
    w,
    group_sizes,
    topk=1,
    gather_indices=None,
    permute_x=False,
    permute_y=False,
    topk_weights=None,
    bias=None,
    w_layout="enk",
):
    """Gradients of sum(dy * y). Of rows written twice each counts as if it had been the one."""
    num_rows = dy.shape[0]
    matrices = _in_by_out(w, w_layout)
    positions = _positions(gather_indices, num_rows)
    dx = np.zeros(x.shape)
    dw = np.zeros(matrices.shape)
    d_topk_weights = None if topk_weights is None else np.zeros(num_rows)
    dbias = None if bias is None else np.zeros(bias.shape)
    for group, rows in enumerate(group_ranges(group_sizes, num_rows)):
        for row in rows:
            position = positions[row]
            if permute_y and position is None:
                continue  # this row of the product was written nowhere
            dy_row = _float64(dy[position if permute_y else row])
            x_row = _x_row(x, position, row, topk, permute_x)
            scale = _scale(topk_weights, position)
            if not permute_x:
                dx[row] = matrices[group] @ dy_row * scale
            elif position is not None:
                dx[position // topk] += matrices[group] @ dy_row * scale
            dw[group] += np.outer(x_row, dy_row * scale)
            if bias is not None:
                dbias[group] += dy_row * scale
            if topk_weights is not None and position is not None:
                product = x_row @ matrices[group]
                if bias is not None:
                    product = product + _float64(bias)[group]
                d_topk_weights[position] += dy_row @ product
    if topk_weights is not None:
        d_topk_weights = d_topk_weights.reshape(topk_weights.shape)
    return Gradients(dx, _in_by_out(dw, w_layout), d_topk_weights, dbias)


def specified(
    x,
    w,
    group_sizes,
    topk=1,
    gather_indices=None,
    permute_x=False,
    permute_y=False,
    topk_weights=None,
    bias=None,
    w_layout="enk",
):
    """What the contract fixes: not rows of y that no index names, nor what a repeated index leads to."""
    num_rows = x.shape[0] * topk if permute_x else x.shape[0]
    positions = _positions(gather_indices, num_rows)
    times_named = np.bincount([p for p in positions if p is not None], minlength=num_rows)
    named_once_at_most = times_named <= 1
    row_is_unique = np.array([p is None or times_named[p] == 1 for p in positions], bool)

    y = times_named == 1 if permute_y else np.ones(num_rows, bool)
    dx = row_is_unique if permute_y else np.ones(num_rows, bool)
    if permute_x:
        dx = named_once_at_most.reshape(-1, topk).all(axis=1)
    groups = np.ones(len(w), bool)
    if permute_y:
        for group, rows in enumerate(group_ranges(group_sizes, num_rows)):
            groups[group] = all(row_is_unique[row] for row in rows)
    shape = () if topk_weights is None else topk_weights.shape
    d_topk_weights = named_once_at_most.reshape(shape) if shape else None
    return Specified(y[:, None], dx[:, None], groups[:, None, None], d_topk_weights, groups[:, None])


def ragged_dot(lhs, rhs, group_sizes, group_offset=0):
    """out[i] = lhs[i] @ rhs[g - group_offset] for the rows i of each group g that rhs has a matrix for."""
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for group, rows in enumerate(group_ranges(group_sizes, lhs.shape[0])):
        if group_offset <= group < group_offset + len(rhs):
            for row in rows:
                out[row] = _float64(lhs[row]) @ _float64(rhs[group - group_offset])
    return out


def _float64(array):
    return np.asarray(array).astype(np.float64)


def _in_by_out(w, w_layout):
    """w as [E, K, N]; for a gradient of w, which is computed so, the way back."""
    return _float64(w) if w_layout == "ekn" else _float64(w).swapaxes(1, 2)


def _positions(gather_indices, num_rows):
    """For each row in expert order its position in token order, None where the index is out of range."""
    if gather_indices is None:
        return list(range(num_rows))
    return [int(index) if 0 <= index < num_rows else None for index in gather_indices]


def _x_row(x, position, row, topk, permute_x):
    if not permute_x:
        return _float64(x[row])
    return np.zeros(x.shape[1]) if position is None else _float64(x[position // topk])


def _scale(topk_weights, position):
    if topk_weights is None:
        return 1.0
    return 0.0 if position is None else _float64(topk_weights).reshape(-1)[position]


def ragged_dot_general(lhs, rhs, group_sizes, numbers):
    """A function (lhs, rhs, ct) -> (out, d lhs, d rhs) of jax.lax.ragged_dot_general, each by one sum of products."""
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    is_contracted = ragged in lhs_contracted
    lhs_axes, rhs_axes = list("abcdefgh"[: lhs.ndim]), list("mnopqrst"[: rhs.ndim])
    for i, j in zip(lhs_contracted + lhs_batch, rhs_contracted + rhs_batch, strict=True):
        rhs_axes[j] = lhs_axes[i]
    for axis in numbers.rhs_group_dimensions:
        rhs_axes[axis] = "z"
    free = [i for i in range(lhs.ndim) if i not in lhs_contracted + lhs_batch]
    columns = [axis for axis in rhs_axes if axis not in ["z", *lhs_axes]]
    out_axes = ["z"] * is_contracted + [lhs_axes[i] for i in (*lhs_batch, *free)] + columns

    before = lhs_contracted[: lhs_contracted.index(ragged)] if is_contracted else [i for i in free if i < ragged]
    before = [*lhs_batch, *before]
    shape = tuple(lhs.shape[i] for i in before)
    is_member = np.zeros((*shape, lhs.shape[ragged], group_sizes.shape[-1]))
    for index in np.ndindex(shape):
        sizes = group_sizes if group_sizes.ndim == 1 else group_sizes[index]
        for group, rows in enumerate(group_ranges(sizes, lhs.shape[ragged])):
            is_member[(*index, slice(rows.start, rows.stop), group)] = 1
    member_axes = [lhs_axes[i] for i in (*before, ragged)] + ["z"]

    def multiply(left, left_axes, right, right_axes, axes):
        sides = ",".join("".join(part) for part in (left_axes, member_axes, right_axes))
        return np.einsum(f"{sides}->{''.join(axes)}", _float64(left), is_member, _float64(right), optimize=True)

    def products(lhs, rhs, ct):
        return (
            multiply(lhs, lhs_axes, rhs, rhs_axes, out_axes),
            multiply(ct, out_axes, rhs, rhs_axes, lhs_axes),
            multiply(lhs, lhs_axes, ct, out_axes, rhs_axes),
        )

    return products
