"""The gated delta rule in chunks of tokens; `jgg.models.operations.delta_rule_plain` has the formulas.

`chunk_matrices_kernel` computes what no state decides, for all chunks side by side. `delta_rule_kernel` then takes a
head's chunks one after the other, with some columns of the state in registers: columns do not depend on each other.

q and k are multiplied unscaled. The factors of their norms are applied to results or to the other operand in
float32, as are decays, so that an operand of a product is rounded once.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464.
"""

import triton
import triton.language as tl

from .tiles import add, row_pointers

BETA, RECALL, READ, WRITE = (tl.constexpr(number) for number in range(4))
FACTORS = tl.constexpr(4)
LEAST_LOG_DECAY = tl.constexpr(-104.0)  # exp of less is 0 in float32
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def root_of(x, tokens, EPSILON: tl.constexpr, PRECISION: tl.constexpr):
    """1 / sqrt(sum of squares + EPSILON) of each row; the sums are a product's diagonal, which takes least time."""
    products = tl.dot(x, x.T, input_precision=PRECISION)
    squares = tl.reduce(tl.where(tokens[:, None] == tokens[None, :], products, 0.0), 1, add)
    return tl.rsqrt(squares + EPSILON)


@triton.jit
def sums_of(log_decay, resets, at, rows, exists, tokens):
    """Sums of log2 decays from a chunk's first token to each token and to the last, and the same sums of resets.

    The sums of decays are float64: after a strong decay, their differences are small numbers between large ones.
    """
    log_decays = tl.load(log_decay + at, mask=exists, other=0.0)
    # bounded first: the sum of two finite numbers may be infinite, and the difference of such sums NaN
    log2_decays = tl.where(log_decays < LEAST_LOG_DECAY, LEAST_LOG_DECAY, log_decays).to(tl.float64) * LOG2_E
    sums, total = tl.associative_scan(log2_decays, 0, add), tl.reduce(log2_decays, 0, add)
    count, all_resets = tokens * 0, 0
    if resets is not None:
        is_reset = (tl.load(resets + rows, mask=exists, other=0) != 0).to(tl.int32)
        count, all_resets = tl.associative_scan(is_reset, 0, add), tl.reduce(is_reset, 0, add)
    return sums, total, count, all_resets


@triton.jit
def decays_of(sums, count, tokens):
    """The decay from each token (column) to each (row), 0 to those before it and to those of other sequences."""
    is_before = (tokens[None, :] <= tokens[:, None]) & (count[:, None] == count[None, :])
    # each sum as two float32: there are few sums and many differences
    high = sums.to(tl.float32)
    low = (sums - high.to(tl.float64)).to(tl.float32)
    exponents = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    # masked first: above the diagonal the exponents are large
    return tl.exp2(tl.where(is_before, exponents, float("-inf")))


@triton.jit
def state_decays_of(sums, total, count, all_resets):
    """The decays from the state before a chunk to each token, from each token to the end, and from start to end."""
    since_start = tl.where(count == 0, tl.exp2(sums.to(tl.float32)), 0.0)
    until_end = tl.where(count == all_resets, tl.exp2((total - sums).to(tl.float32)), 0.0)
    return since_start, until_end, tl.where(all_resets == 0, tl.exp2(total.to(tl.float32)), 0.0)


@triton.jit
def inverse_of(a, tokens, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a)^-1 [2 ** LEVELS, 2 ** LEVELS] in float32, where `a` is zero from the diagonal on.

    The elements of a and of its inverse lie between -2 and 2, so that float16 rounds them less than bfloat16 would.
    """
    dtype: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16
    row, column = tokens[:, None], tokens[None, :]
    a = a.to(dtype)
    below = ((row & 1) == 1) & (column == row - 1)
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(below, a, 0.0).to(tl.float32)
    for level in tl.range(1, LEVELS, num_stages=1):
        # of blocks of 2 ** level tokens, two make one of twice the size
        below = (((row >> level) & 1) == 1) & ((column >> level) == (row >> level) - 1)
        rounded = inverse.to(dtype)
        product = tl.dot(tl.where(below, a, 0.0).to(dtype), rounded, input_precision=PRECISION)
        inverse -= tl.dot(rounded, product.to(dtype), input_precision=PRECISION)
    return inverse


@triton.jit
def chunk_matrices_kernel(
    q,
    k,
    log_decay,
    beta,
    resets,
    inverses,
    weights,
    factors,
    totals,
    length,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    PRECISION: tl.constexpr,
    LEVELS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    """The matrices and factors of each chunk of C = 2 ** LEVELS tokens, for value heads h = KEY_HEADS * GROUP.

    Arrays: q, k [B, length, KEY_HEADS, FEATURES]; log_decay, beta float32 [B, length, h]; resets bool [B, length] or
    None; inverses and weights [B, h, chunks, C, C] in the dtype of q: (I + A)^-1, A with the betas of columns rather
    than of rows if BY_COLUMN, and the factors of beta times the corrections in the results; factors float32 [B, h, 4,
    chunks * C], for each token: beta; the factors of k S in what is recalled, of q S in the result, and of beta times
    its correction in the next state; totals float32 [B, h, chunks], the decay of the state. The grid is (h, chunks, B).
    """
    CHUNK: tl.constexpr = 1 << LEVELS
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    head, chunk, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens, features = tl.arange(0, CHUNK), tl.arange(0, BLOCK_FEATURES)
    places = chunk * CHUNK + tokens
    exists = places < length
    rows = sequence * length + places
    at = row_pointers(head // GROUP * FEATURES, rows, features, KEY_HEADS * FEATURES)
    mask = exists[:, None] & (features < FEATURES)[None, :]
    k_block = tl.load(k + at, mask=mask, other=0.0)
    k_root = root_of(k_block, tokens, EPSILON, PRECISION)
    in_matrix = tokens[:, None] * CHUNK + tokens[None, :]
    sums, total, count, all_resets = sums_of(log_decay, resets, rows * HEADS + head, rows, exists, tokens)
    decays = decays_of(sums, count, tokens)
    betas = tl.load(beta + rows * HEADS + head, mask=exists, other=0.0)
    of_chunk = (sequence * HEADS + head) * tl.num_programs(1) + chunk
    at_matrix = of_chunk * (CHUNK * CHUNK) + in_matrix
    q_block = tl.load(q + at, mask=mask, other=0.0)
    q_root = root_of(q_block, tokens, EPSILON, PRECISION) * SCALE
    qk = tl.dot(q_block, k_block.T, input_precision=PRECISION) * (q_root[:, None] * k_root[None, :])
    tl.store(weights + at_matrix, (qk * decays).to(weights.dtype.element_ty))
    kk = tl.dot(k_block, k_block.T, input_precision=PRECISION) * (k_root[:, None] * k_root[None, :])
    a = tl.where(tokens[None, :] < tokens[:, None], kk * decays, 0.0) * (
        betas[None, :] if BY_COLUMN else betas[:, None]
    )
    inverse = inverse_of(a, tokens, LEVELS, PRECISION)
    tl.store(inverses + at_matrix, inverse.to(inverses.dtype.element_ty))
    since_start, until_end, total = state_decays_of(sums, total, count, all_resets)
    of_head = factors + ((sequence * HEADS + head) * FACTORS * tl.num_programs(1) + chunk) * CHUNK + tokens
    stride = tl.num_programs(1) * CHUNK
    tl.store(of_head + BETA * stride, betas)
    tl.store(of_head + RECALL * stride, since_start * k_root)
    tl.store(of_head + READ * stride, since_start * q_root)
    tl.store(of_head + WRITE * stride, until_end * k_root)
    tl.store(totals + of_chunk, total)


@triton.jit
def factors_of(factors, totals, number, chunk, chunks, places, CHUNK: tl.constexpr):
    """What `chunk_matrices_kernel` leaves of the tokens at these places of a chunk, and the decay of its state."""
    stride = chunks * CHUNK
    of_head = factors + number * FACTORS * stride
    betas = tl.load(of_head + BETA * stride + places)
    recall = tl.load(of_head + RECALL * stride + places)
    read = tl.load(of_head + READ * stride + places)
    write = tl.load(of_head + WRITE * stride + places)
    return betas, recall, read, write, tl.load(totals + number * chunks + chunk)


@triton.jit
def delta_rule_kernel(
    q,
    k,
    v,
    inverses,
    weights,
    factors,
    totals,
    state,
    y,
    last_state,
    states,
    corrections,
    length,
    chunks,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The results and the states.

    Arrays: q, k, and what `chunk_matrices_kernel` gives with BY_COLUMN, as there; v and y [B, length, h,
    VALUE_FEATURES]; state and last_state float32 [B, h, FEATURES, VALUE_FEATURES], state None for zeros; states [B, h,
    chunks, FEATURES, VALUE_FEATURES] in the dtype of q, those before each chunk, and corrections like v, or both None.
    The grid is (blocks of columns, h, B).
    """
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    STRIDE: tl.constexpr = KEY_HEADS * FEATURES
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens, features = tl.arange(0, CHUNK), tl.arange(0, BLOCK_FEATURES)
    columns = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_feature, is_column = (features < FEATURES)[None, :], (columns < VALUE_FEATURES)[None, :]
    in_state = features[:, None] * VALUE_FEATURES + columns[None, :]
    is_in_state = (features < FEATURES)[:, None] & is_column
    in_matrix = tokens[:, None] * CHUNK + tokens[None, :]
    number = sequence * HEADS + head
    acc = tl.full([BLOCK_FEATURES, BLOCK_COLUMNS], 0.0, tl.float32)
    if state is not None:
        acc = tl.load(state + number * (FEATURES * VALUE_FEATURES) + in_state, mask=is_in_state, other=0.0)
    of_keys = sequence * length * STRIDE + head // GROUP * FEATURES
    of_values = sequence * length * (HEADS * VALUE_FEATURES) + head * VALUE_FEATURES
    for chunk in tl.range(0, chunks):
        places = chunk * CHUNK + tokens
        exists = (places < length)[:, None]
        at_keys = of_keys + places.to(tl.int64)[:, None] * STRIDE + features[None, :]
        at_values = of_values + places.to(tl.int64)[:, None] * (HEADS * VALUE_FEATURES) + columns[None, :]
        at_matrix = (number * chunks + chunk) * (CHUNK * CHUNK) + in_matrix
        k_block = tl.load(k + at_keys, mask=exists & is_feature, other=0.0)
        q_block = tl.load(q + at_keys, mask=exists & is_feature, other=0.0)
        v_block = tl.load(v + at_values, mask=exists & is_column, other=0.0)
        inverse = tl.load(inverses + at_matrix)
        weight = tl.load(weights + at_matrix)
        betas, recall, read, write, total = factors_of(factors, totals, number, chunk, chunks, places, CHUNK)

        before = acc.to(k_block.dtype)
        if states is not None:
            at_state = (number * chunks + chunk) * (FEATURES * VALUE_FEATURES) + in_state
            tl.store(states + at_state, before, mask=is_in_state)
        recalled = tl.dot(k_block, before, input_precision=PRECISION)
        result = tl.dot(q_block, before, input_precision=PRECISION) * read[:, None]
        errors = v_block.to(tl.float32) - recalled * recall[:, None]
        news = tl.dot(inverse, errors.to(k_block.dtype), input_precision=PRECISION)
        if corrections is not None:
            tl.store(corrections + at_values, news.to(corrections.dtype.element_ty), mask=exists & is_column)
        news *= betas[:, None]
        written = (news * write[:, None]).to(k_block.dtype)
        acc = tl.dot(k_block.T, written, acc * total, input_precision=PRECISION)
        result = tl.dot(weight, news.to(k_block.dtype), result, input_precision=PRECISION)
        tl.store(y + at_values, result.to(y.dtype.element_ty), mask=exists & is_column)
    tl.store(last_state + number * (FEATURES * VALUE_FEATURES) + in_state, acc, mask=is_in_state)
