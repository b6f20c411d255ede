"""The gradients of the gated delta rule, in chunks of tokens.

With the formulas of `jgg.models.operations.delta_rule_plain`, E = V - exp(b) K S, N = (I + A)^-1 beta E, weights P, R
the gradient of the state after a chunk, and G the results' gradient:

    dN = P^T G + exp(b_C - b) K R                   dX = (I + A)^-T dN              dV = beta dX
    the gradient of S is exp(b_C) R + scale (exp(b) Q)^T G - (exp(b) K)^T dV        dA = -dX N^T,    dP = G N^T

`delta_rule_backward_kernel` takes a head's chunks from the last to the first and keeps dX and R;
`delta_rule_gradients_kernel` computes all others from them, for all chunks side by side.
"""

import triton
import triton.language as tl

from .delta_rule import decays_of, factors_of, root_of, state_decays_of, sums_of
from .tiles import add, row_pointers


@triton.jit
def delta_rule_backward_kernel(
    q,
    k,
    inverses,
    weights,
    factors,
    totals,
    dy,
    d_last_state,
    dx,
    d_states,
    d_state,
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
    """The gradients of corrections and states.

    Arrays: q, k, inverses, weights, factors and totals as in `delta_rule_kernel`; dy and dx [B, length, h,
    VALUE_FEATURES]; d_last_state and d_state float32 [B, h, FEATURES, VALUE_FEATURES]; d_states [B, h, chunks,
    FEATURES, VALUE_FEATURES] in the dtype of q, for the states after each chunk. The grid is (blocks of columns, h, B).
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
    acc = tl.load(d_last_state + number * (FEATURES * VALUE_FEATURES) + in_state, mask=is_in_state, other=0.0)
    of_keys = sequence * length * STRIDE + head // GROUP * FEATURES
    of_values = sequence * length * (HEADS * VALUE_FEATURES) + head * VALUE_FEATURES
    for step in tl.range(0, chunks):
        chunk = chunks - 1 - step
        places = chunk * CHUNK + tokens
        exists = (places < length)[:, None]
        at_keys = of_keys + places.to(tl.int64)[:, None] * STRIDE + features[None, :]
        at_values = of_values + places.to(tl.int64)[:, None] * (HEADS * VALUE_FEATURES) + columns[None, :]
        at_matrix = (number * chunks + chunk) * (CHUNK * CHUNK) + in_matrix
        k_block = tl.load(k + at_keys, mask=exists & is_feature, other=0.0)
        q_block = tl.load(q + at_keys, mask=exists & is_feature, other=0.0)
        dy_block = tl.load(dy + at_values, mask=exists & is_column, other=0.0)
        inverse = tl.load(inverses + at_matrix)
        weight = tl.load(weights + at_matrix)
        betas, recall, read, write, total = factors_of(factors, totals, number, chunk, chunks, places, CHUNK)

        after = acc.to(k_block.dtype)
        at_state = (number * chunks + chunk) * (FEATURES * VALUE_FEATURES) + in_state
        tl.store(d_states + at_state, after, mask=is_in_state)
        d_news = tl.dot(k_block, after, input_precision=PRECISION) * write[:, None]
        d_news = tl.dot(weight.T, dy_block, d_news, input_precision=PRECISION)
        dx_block = tl.dot(inverse.T, d_news.to(k_block.dtype), input_precision=PRECISION)
        d_read = (dy_block.to(tl.float32) * read[:, None]).to(k_block.dtype)
        d_recalled = (dx_block * (-betas * recall)[:, None]).to(k_block.dtype)
        acc = tl.dot(q_block.T, d_read, acc * total, input_precision=PRECISION)
        acc = tl.dot(k_block.T, d_recalled, acc, input_precision=PRECISION)
        tl.store(dx + at_values, dx_block.to(dx.dtype.element_ty), mask=exists & is_column)
    tl.store(d_state + number * (FEATURES * VALUE_FEATURES) + in_state, acc, mask=is_in_state)


@triton.jit
def dot_rows(acc, at, mask):
    """The product of each row of acc and the row at `at`. It loads them again: registers are few."""
    return tl.reduce(acc * tl.load(at, mask=mask, other=0.0).to(tl.float32), 1, add)


@triton.jit
def normalization_gradient(d_normalized, x, root):
    """The gradient of x [rows, features], given d(x * root), where root is 1 / sqrt(sum of squares + epsilon)."""
    x = x.to(tl.float32)
    product = tl.reduce(d_normalized * x, 1, add) * root * root
    return (d_normalized - x * product[:, None]) * root[:, None]


@triton.jit
def add_by_matrices(
    dq_acc,
    d_recalling,
    d_writing,
    d_weights,
    d_own,
    d_a,
    decays,
    betas,
    q_block,
    k_block,
    q_root,
    k_root,
    tokens,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds the gradients of q and k by way of P = scale q k^T decays and A = beta k k^T decays, of the normalized ones.

    The gradient of P's diagonal, where no decays are, is d_own. Also returns the decays times their gradients.
    """
    is_before = tokens[None, :] < tokens[:, None]
    d_weights = tl.where(is_before, d_weights * decays, 0.0) * SCALE
    qk = tl.dot(q_block, k_block.T, input_precision=PRECISION)
    of_decays = d_weights * qk * (q_root[:, None] * k_root[None, :])
    d_weights = tl.where(tokens[None, :] == tokens[:, None], (d_own * SCALE)[:, None], d_weights)
    d_weights_k = (d_weights * k_root[None, :]).to(k_block.dtype)
    dq_acc = tl.dot(d_weights_k, k_block, dq_acc, input_precision=PRECISION)
    d_weights_q = (d_weights * q_root[:, None]).to(k_block.dtype)
    d_writing = tl.dot(d_weights_q.T, q_block, d_writing, input_precision=PRECISION)
    d_a = tl.where(is_before, d_a * decays, 0.0) * -betas[:, None]
    kk = tl.dot(k_block, k_block.T, input_precision=PRECISION)
    of_decays += d_a * kk * (k_root[:, None] * k_root[None, :])
    d_a_k = ((d_a + d_a.T) * k_root[None, :]).to(k_block.dtype)
    d_recalling = tl.dot(d_a_k, k_block, d_recalling, input_precision=PRECISION)
    return dq_acc, d_recalling, d_writing, of_decays


@triton.jit
def delta_rule_gradients_kernel(
    q,
    k,
    log_decay,
    beta,
    resets,
    states,
    corrections,
    dy,
    dx,
    d_states,
    dq,
    dk,
    dv,
    d_log_decay,
    d_beta,
    length,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE_FEATURES: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """The gradients of all operands but the state.

    Arrays: dq, dk, dv, d_log_decay and d_beta as q, k, v, log_decay and beta, and those and the others as in the
    kernels before. The grid is (chunks, KEY_HEADS, B).
    """
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    chunk, key_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    tokens, features = tl.arange(0, CHUNK), tl.arange(0, BLOCK_FEATURES)
    places = chunk * CHUNK + tokens
    exists = places < length
    last = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
    rows = sequence * length + places
    at_keys = row_pointers(key_head * FEATURES, rows, features, KEY_HEADS * FEATURES)
    is_key = exists[:, None] & (features < FEATURES)[None, :]
    k_block = tl.load(k + at_keys, mask=is_key, other=0.0)
    q_block = tl.load(q + at_keys, mask=is_key, other=0.0)
    dtype: tl.constexpr = k_block.dtype
    k_root, q_root = root_of(k_block, tokens, EPSILON, PRECISION), root_of(q_block, tokens, EPSILON, PRECISION)
    # of normalized queries, and of normalized keys: where they recall, and where they write
    dq_acc = tl.full([CHUNK, BLOCK_FEATURES], 0.0, tl.float32)
    d_recalling = tl.full([CHUNK, BLOCK_FEATURES], 0.0, tl.float32)
    d_writing = tl.full([CHUNK, BLOCK_FEATURES], 0.0, tl.float32)
    of_q, of_recalling, of_writing = q_root * 0, q_root * 0, q_root * 0  # their products with queries or keys
    d_own = q_root * 0  # of the weights of tokens' own corrections, for all heads
    for number in tl.range(0, GROUP, num_stages=1):
        head = key_head * GROUP + number
        at = rows * HEADS + head
        of_chunk = (sequence * HEADS + head) * tl.num_programs(0) + chunk
        sums, total, count, all_resets = sums_of(log_decay, resets, at, rows, exists, tokens)
        since_start, until_end, total = state_decays_of(sums, total, count, all_resets)
        betas = tl.load(beta + at, mask=exists, other=0.0)
        d_weights = tl.full([CHUNK, CHUNK], 0.0, tl.float32)
        d_a = tl.full([CHUNK, CHUNK], 0.0, tl.float32)
        d_betas = tl.full([CHUNK], 0.0, tl.float32)
        d_total = tl.full([BLOCK_FEATURES], 0.0, tl.float32)
        for first in tl.range(0, VALUE_FEATURES, BLOCK_COLUMNS):
            columns = first + tl.arange(0, BLOCK_COLUMNS)
            is_column = (columns < VALUE_FEATURES)[None, :]
            is_value = exists[:, None] & is_column
            at_values = row_pointers(head * VALUE_FEATURES, rows, columns, HEADS * VALUE_FEATURES)
            at_state = of_chunk * (FEATURES * VALUE_FEATURES) + features[:, None] * VALUE_FEATURES + columns[None, :]
            is_in_state = (features < FEATURES)[:, None] & is_column
            before = tl.load(states + at_state, mask=is_in_state, other=0.0)
            after = tl.load(d_states + at_state, mask=is_in_state, other=0.0)
            correction = tl.load(corrections + at_values, mask=is_value, other=0.0).to(tl.float32)
            dy_block = tl.load(dy + at_values, mask=is_value, other=0.0)
            dx_block = tl.load(dx + at_values, mask=is_value, other=0.0)

            d_betas += tl.reduce(dx_block.to(tl.float32) * correction, 1, add)
            news = correction * betas[:, None]
            dv_block = dx_block.to(tl.float32) * betas[:, None]
            tl.store(dv + at_values, dv_block.to(dv.dtype.element_ty), mask=is_value)
            d_total += tl.reduce(before.to(tl.float32) * after.to(tl.float32), 1, add)
            rounded = news.to(dtype)
            d_weights = tl.dot(dy_block, rounded.T, d_weights, input_precision=PRECISION)
            d_a = tl.dot(dx_block, rounded.T, d_a, input_precision=PRECISION)
            d_read = (dy_block.to(tl.float32) * (since_start * SCALE)[:, None]).to(dtype)
            dq_acc = tl.dot(d_read, before.T, dq_acc, input_precision=PRECISION)
            d_recalled = (dv_block * -since_start[:, None]).to(dtype)
            d_recalling = tl.dot(d_recalled, before.T, d_recalling, input_precision=PRECISION)
            written = (news * until_end[:, None]).to(dtype)
            d_writing = tl.dot(written, after.T, d_writing, input_precision=PRECISION)

        # of the sums of log decays, by way of the state: what a decay is multiplied by times that product's gradient
        d_sums = dot_rows(dq_acc, q + at_keys, is_key) * q_root - of_q
        d_sums += dot_rows(d_recalling, k + at_keys, is_key) * k_root - of_recalling
        d_until_end = dot_rows(d_writing, k + at_keys, is_key) * k_root - of_writing
        # no log decay is between the last token and the end, and its gradient would hide smaller ones
        d_until_end = tl.where(tokens == last, 0.0, d_until_end)
        d_sums -= d_until_end
        d_last_sum = tl.reduce(d_until_end, 0, add) + tl.reduce(d_total, 0, add) * total

        # no decays are in them, and they would hide smaller gradients from the next head: the last one adds them
        d_own += tl.reduce(tl.where(tokens[None, :] == tokens[:, None], d_weights, 0.0), 1, add)
        dq_acc, d_recalling, d_writing, of_decays = add_by_matrices(
            dq_acc,
            d_recalling,
            d_writing,
            d_weights,
            tl.where(number == GROUP - 1, d_own, 0.0),
            d_a,
            decays_of(sums, count, tokens),
            betas,
            q_block,
            k_block,
            q_root,
            k_root,
            tokens,
            SCALE,
            PRECISION,
        )
        of_q = dot_rows(dq_acc, q + at_keys, is_key) * q_root
        of_recalling = dot_rows(d_recalling, k + at_keys, is_key) * k_root
        of_writing = dot_rows(d_writing, k + at_keys, is_key) * k_root

        # a token's log decay is in the sums from it on
        d_sums += tl.reduce(of_decays, 1, add) - tl.reduce(of_decays, 0, add)
        d_log = tl.associative_scan(d_sums, 0, add, reverse=True)
        tl.store(d_log_decay + at, d_log + d_last_sum, mask=exists)
        tl.store(d_beta + at, d_betas, mask=exists)
    dq_block = normalization_gradient(dq_acc, tl.load(q + at_keys, mask=is_key, other=0.0), q_root)
    dk_block = normalization_gradient(d_recalling + d_writing, tl.load(k + at_keys, mask=is_key, other=0.0), k_root)
    tl.store(dq + at_keys, dq_block.to(dq.dtype.element_ty), mask=is_key)
    tl.store(dk + at_keys, dk_block.to(dk.dtype.element_ty), mask=is_key)
