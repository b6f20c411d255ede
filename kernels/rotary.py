"""The norm of each head of queries and keys with their rotary embedding, and its backward pass; float32 inside.

A row is one head of one token, D features: the first members of PAIRS pairs, their second members, and the rest, which
is not rotated. Programs compute the rows of queries and then those of keys.
"""

import triton
import triton.language as tl

from .tiles import add, ceil_div, row_pointers


@triton.jit
def load_part(array, rows, exists, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The columns [first, first + COUNT) of rows, float32 [rows, BLOCK], and zeros."""
    columns = tl.arange(0, BLOCK)
    mask = exists[:, None] & (columns < COUNT)[None, :]
    return tl.load(row_pointers(array, rows, first + columns, COLUMNS), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_part(array, value, rows, exists, first, COUNT: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Stores to where `load_part` loads from, in the dtype of the array."""
    columns = tl.arange(0, BLOCK)
    mask = exists[:, None] & (columns < COUNT)[None, :]
    tl.store(row_pointers(array, rows, first + columns, COLUMNS), value.to(array.dtype.element_ty), mask=mask)


@triton.jit
def load_factors(scale, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The factors [first, first + COUNT), float32 [1, BLOCK]."""
    columns = tl.arange(0, BLOCK)
    return tl.load(scale + first + columns, mask=columns < COUNT, other=0.0).to(tl.float32)[None, :]


@triton.jit
def rotate_rows(
    x,
    scale,
    cos,
    sin,
    y,
    rows,
    exists,
    position,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Normalizes rows, unless scale is None, and rotates them by the angles of their position."""
    REST: tl.constexpr = D - 2 * PAIRS
    a = load_part(x, rows, exists, 0, PAIRS, D, BLOCK_PAIRS)
    b = load_part(x, rows, exists, PAIRS, PAIRS, D, BLOCK_PAIRS)
    cosines = load_part(cos, position, exists, 0, PAIRS, PAIRS, BLOCK_PAIRS)
    sines = load_part(sin, position, exists, 0, PAIRS, PAIRS, BLOCK_PAIRS)
    if REST > 0:
        rest = load_part(x, rows, exists, 2 * PAIRS, REST, D, BLOCK_REST)
    if scale is not None:
        squares = tl.reduce(a * a + b * b, 1, add)
        if REST > 0:
            squares += tl.reduce(rest * rest, 1, add)
        root = tl.rsqrt(squares / D + EPSILON)[:, None]
        a *= root * load_factors(scale, 0, PAIRS, BLOCK_PAIRS)
        b *= root * load_factors(scale, PAIRS, PAIRS, BLOCK_PAIRS)
        if REST > 0:
            rest *= root * load_factors(scale, 2 * PAIRS, REST, BLOCK_REST)
    store_part(y, a * cosines - b * sines, rows, exists, 0, PAIRS, D, BLOCK_PAIRS)
    store_part(y, b * cosines + a * sines, rows, exists, PAIRS, PAIRS, D, BLOCK_PAIRS)
    if REST > 0:
        store_part(y, rest, rows, exists, 2 * PAIRS, REST, D, BLOCK_REST)


@triton.jit
def rotary_kernel(
    q,
    k,
    q_scale,
    k_scale,
    cos,
    sin,
    rotated_q,
    rotated_k,
    num_tokens,
    num_positions,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Each head of q and k, normalized if it has a scale, with its pairs rotated.

    Arrays: q, k and the results [num_tokens, heads * D]; q_scale and k_scale [D], or None for no norm; cos and sin
    float32 [num_positions, PAIRS], whose row for token t is t modulo num_positions. The grid is the blocks of
    BLOCK_ROWS rows of q and then those of k.
    """
    block = tl.program_id(0)
    blocks_q = ceil_div(num_tokens * HEADS_Q, BLOCK_ROWS)
    if block < blocks_q:
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        exists, position = rows < num_tokens * HEADS_Q, rows // HEADS_Q % num_positions
        rotate_rows(q, q_scale, cos, sin, rotated_q, rows, exists, position, D, PAIRS, EPSILON, BLOCK_PAIRS, BLOCK_REST)
    else:
        rows = (block - blocks_q) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        exists, position = rows < num_tokens * HEADS_K, rows // HEADS_K % num_positions
        rotate_rows(k, k_scale, cos, sin, rotated_k, rows, exists, position, D, PAIRS, EPSILON, BLOCK_PAIRS, BLOCK_REST)


@triton.jit
def store_sums(sums, value, first, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Stores the sum over the rows of value [rows, BLOCK]."""
    columns = tl.arange(0, BLOCK)
    tl.store(sums + first + columns, tl.reduce(value, 0, add), mask=columns < COUNT)


@triton.jit
def rotate_rows_back(
    x,
    scale,
    cos,
    sin,
    dy,
    dx,
    d_scale,
    rows,
    exists,
    position,
    block,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The gradients of rows of `rotate_rows`, and the part of this block of rows in the gradient of scale."""
    REST: tl.constexpr = D - 2 * PAIRS
    d_first = load_part(dy, rows, exists, 0, PAIRS, D, BLOCK_PAIRS)
    d_second = load_part(dy, rows, exists, PAIRS, PAIRS, D, BLOCK_PAIRS)
    cosines = load_part(cos, position, exists, 0, PAIRS, PAIRS, BLOCK_PAIRS)
    sines = load_part(sin, position, exists, 0, PAIRS, PAIRS, BLOCK_PAIRS)
    d_a = d_first * cosines + d_second * sines
    d_b = d_second * cosines - d_first * sines
    if REST > 0:
        d_rest = load_part(dy, rows, exists, 2 * PAIRS, REST, D, BLOCK_REST)
    if scale is not None:
        a = load_part(x, rows, exists, 0, PAIRS, D, BLOCK_PAIRS)
        b = load_part(x, rows, exists, PAIRS, PAIRS, D, BLOCK_PAIRS)
        squares = tl.reduce(a * a + b * b, 1, add)
        if REST > 0:
            rest = load_part(x, rows, exists, 2 * PAIRS, REST, D, BLOCK_REST)
            squares += tl.reduce(rest * rest, 1, add)
        root = tl.rsqrt(squares / D + EPSILON)[:, None]
        a *= root
        b *= root
        sums = d_scale + block.to(tl.int64) * D
        store_sums(sums, d_a * a, 0, PAIRS, BLOCK_PAIRS)
        store_sums(sums, d_b * b, PAIRS, PAIRS, BLOCK_PAIRS)
        d_a *= load_factors(scale, 0, PAIRS, BLOCK_PAIRS)
        d_b *= load_factors(scale, PAIRS, PAIRS, BLOCK_PAIRS)
        along = tl.reduce(d_a * a + d_b * b, 1, add)
        if REST > 0:
            rest *= root
            store_sums(sums, d_rest * rest, 2 * PAIRS, REST, BLOCK_REST)
            d_rest *= load_factors(scale, 2 * PAIRS, REST, BLOCK_REST)
            along += tl.reduce(d_rest * rest, 1, add)
        along = (along / D)[:, None]
        d_a = root * (d_a - along * a)
        d_b = root * (d_b - along * b)
        if REST > 0:
            d_rest = root * (d_rest - along * rest)
    store_part(dx, d_a, rows, exists, 0, PAIRS, D, BLOCK_PAIRS)
    store_part(dx, d_b, rows, exists, PAIRS, PAIRS, D, BLOCK_PAIRS)
    if REST > 0:
        store_part(dx, d_rest, rows, exists, 2 * PAIRS, REST, D, BLOCK_REST)


@triton.jit
def rotary_backward_kernel(
    q,
    k,
    q_scale,
    k_scale,
    cos,
    sin,
    d_rotated_q,
    d_rotated_k,
    dq,
    dk,
    d_q_scale,
    d_k_scale,
    num_tokens,
    num_positions,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """The gradients of q and k, and those of their scales in parts, float32 [blocks, D], which are to be added up.

    The other arrays and the grid are those of `rotary_kernel`; without norms q, k, the scales and their gradients are
    None.
    """
    block = tl.program_id(0)
    blocks_q = ceil_div(num_tokens * HEADS_Q, BLOCK_ROWS)
    if block < blocks_q:
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        exists, position = rows < num_tokens * HEADS_Q, rows // HEADS_Q % num_positions
        rotate_rows_back(
            q, q_scale, cos, sin, d_rotated_q, dq, d_q_scale,
            rows, exists, position, block, D, PAIRS, EPSILON, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
    else:
        block -= blocks_q
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        exists, position = rows < num_tokens * HEADS_K, rows // HEADS_K % num_positions
        rotate_rows_back(
            k, k_scale, cos, sin, d_rotated_k, dk, d_k_scale,
            rows, exists, position, block, D, PAIRS, EPSILON, BLOCK_PAIRS, BLOCK_REST,
        )  # fmt: skip
