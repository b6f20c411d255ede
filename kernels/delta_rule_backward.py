"""The gradients of the gated delta rule, in chunks of tokens.

With the formulas of `jgg.products.plain.delta_rule`, E = V - exp(b) K S, N = (I + A)^-1 beta E, weights P, R the
gradient of the state after a chunk, and G that of the results:

    dN = P^T G + exp(b_C - b) K R                   dX = (I + A)^-T dN              dV = beta dX
    the gradient of S is exp(b_C) R + scale (exp(b) Q)^T G - (exp(b) K)^T dV        dA = -dX N^T,    dP = G N^T

`delta_rule_backward_kernel` takes a head's chunks from the last to the first and keeps dX and R;
`delta_rule_gradients_kernel` computes all others from them, for all chunks side by side.
"""

import triton
import triton.language as tl

from .delta_rule import BETA, FACTORS, READ, RECALL, WRITE, decays_of, root_of
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
    stride = chunks * CHUNK
    of_factors = factors + number * FACTORS * stride
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
        betas = tl.load(of_factors + BETA * stride + places)
        recall = tl.load(of_factors + RECALL * stride + places)
        read = tl.load(of_factors + READ * stride + places)
        write = tl.load(of_factors + WRITE * stride + places)
        total = tl.load(totals + number * chunks + chunk)

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
def normalization_gradient(d_normalized, x, root):
    """The gradient of x [rows, features] from that of x * root, where root is 1 / sqrt(sum of squares + epsilon)."""
    x = x.to(tl.float32)
    product = tl.reduce(d_normalized * x, 1, add) * root * root
    return (d_normalized - x * product[:, None]) * root[:, None]


@triton.jit
def delta_rule_gradients_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    resets,
    inverses,
    states,
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
    rows = sequence * length + places
    at_keys = row_pointers(key_head * FEATURES, rows, features, KEY_HEADS * FEATURES)
    is_key = exists[:, None] & (features < FEATURES)[None, :]
    k_block = tl.load(k + at_keys, mask=is_key, other=0.0)
    q_block = tl.load(q + at_keys, mask=is_key, other=0.0)
    dtype: tl.constexpr = k_block.dtype
    k_root, q_root = root_of(k_block, EPSILON), root_of(q_block, EPSILON)
    # of the normalized keys and queries
    dk_acc = tl.full([CHUNK, BLOCK_FEATURES], 0.0, tl.float32)
    dq_acc = tl.full([CHUNK, BLOCK_FEATURES], 0.0, tl.float32)
    is_strictly_before = tokens[None, :] < tokens[:, None]
    for number in tl.range(0, GROUP, num_stages=1):
        head = key_head * GROUP + number
        at = rows * HEADS + head
        of_chunk = (sequence * HEADS + head) * tl.num_programs(0) + chunk
        decays, since_start, until_end, total = decays_of(log_decay, resets, at, rows, exists, tokens)
        betas = tl.load(beta + at, mask=exists, other=0.0)
        inverse = tl.load(inverses + of_chunk * (CHUNK * CHUNK) + tokens[:, None] * CHUNK + tokens[None, :])
        recall = since_start * k_root
        d_weights = tl.full([CHUNK, CHUNK], 0.0, tl.float32)
        d_a = tl.full([CHUNK, CHUNK], 0.0, tl.float32)
        d_betas = tl.full([CHUNK], 0.0, tl.float32)
        d_since_start = tl.full([CHUNK], 0.0, tl.float32)
        d_until_end = tl.full([CHUNK], 0.0, tl.float32)
        d_total = 0.0
        for first in tl.range(0, VALUE_FEATURES, BLOCK_COLUMNS):
            columns = first + tl.arange(0, BLOCK_COLUMNS)
            is_column = (columns < VALUE_FEATURES)[None, :]
            is_value = exists[:, None] & is_column
            at_values = row_pointers(head * VALUE_FEATURES, rows, columns, HEADS * VALUE_FEATURES)
            at_state = of_chunk * (FEATURES * VALUE_FEATURES) + features[:, None] * VALUE_FEATURES + columns[None, :]
            is_in_state = (features < FEATURES)[:, None] & is_column
            before = tl.load(states + at_state, mask=is_in_state, other=0.0)
            after = tl.load(d_states + at_state, mask=is_in_state, other=0.0)
            v_block = tl.load(v + at_values, mask=is_value, other=0.0)
            dy_block = tl.load(dy + at_values, mask=is_value, other=0.0)
            dx_block = tl.load(dx + at_values, mask=is_value, other=0.0)

            errors = v_block.to(tl.float32) - tl.dot(k_block, before, input_precision=PRECISION) * recall[:, None]
            d_betas += tl.reduce(dx_block.to(tl.float32) * errors, 1, add)
            news = tl.dot(inverse, (errors * betas[:, None]).to(dtype), input_precision=PRECISION).to(dtype)
            dv_block = dx_block.to(tl.float32) * betas[:, None]
            tl.store(dv + at_values, dv_block.to(dv.dtype.element_ty), mask=is_value)
            d_weights = tl.dot(dy_block, news.T, d_weights, input_precision=PRECISION)
            d_a = tl.dot(dx_block, news.T, d_a, input_precision=PRECISION)
            d_total += tl.reduce(tl.reduce(before.to(tl.float32) * after.to(tl.float32), 1, add), 0, add)

            d_read = tl.dot(dy_block, before.T, input_precision=PRECISION) * SCALE
            d_since_start += tl.reduce(d_read * q_block.to(tl.float32), 1, add) * q_root
            dq_acc += d_read * since_start[:, None]
            d_recalled = tl.dot(dv_block.to(dtype), before.T, input_precision=PRECISION)
            d_since_start -= tl.reduce(d_recalled * k_block.to(tl.float32), 1, add) * k_root
            dk_acc -= d_recalled * since_start[:, None]
            d_written = tl.dot(news, after.T, input_precision=PRECISION)
            d_until_end += tl.reduce(d_written * k_block.to(tl.float32), 1, add) * k_root
            dk_acc += d_written * until_end[:, None]

        # P = scale q k^T decays, and A = beta k k^T decays below the diagonal, of the normalized ones
        qk = tl.dot(q_block, k_block.T, input_precision=PRECISION)
        kk = tl.dot(k_block, k_block.T, input_precision=PRECISION)
        d_weights = d_weights * decays * SCALE
        d_a = tl.where(is_strictly_before, -d_a * decays, 0.0)
        in_a = d_a * kk * (k_root[:, None] * k_root[None, :])
        d_betas += tl.reduce(in_a, 1, add)
        of_decays = d_weights * qk * (q_root[:, None] * k_root[None, :]) + in_a * betas[:, None]
        d_weights_k = (d_weights * k_root[None, :]).to(dtype)
        dq_acc = tl.dot(d_weights_k, k_block, dq_acc, input_precision=PRECISION)
        d_weights_q = (d_weights * q_root[:, None]).to(dtype)
        dk_acc = tl.dot(d_weights_q.T, q_block, dk_acc, input_precision=PRECISION)
        d_a = d_a * betas[:, None]
        d_a = ((d_a + d_a.T) * k_root[None, :]).to(dtype)
        dk_acc = tl.dot(d_a, k_block, dk_acc, input_precision=PRECISION)

        # of the sums of log decays, first; a token's log decay is in those from it on
        d_until_end = d_until_end * until_end
        d_sums = d_since_start * since_start - d_until_end + tl.reduce(of_decays, 1, add)
        by_column = tl.reduce(of_decays, 0, add)
        is_from = tokens[:, None] >= tokens[None, :]
        d_log = tl.reduce(tl.where(is_from, d_sums[:, None], 0.0), 0, add)
        by_column = tl.reduce(tl.where(tokens[:, None] <= tokens[None, :], by_column[None, :], 0.0), 1, add)
        d_log_at_end = d_total * total + tl.reduce(d_until_end, 0, add)
        tl.store(d_log_decay + at, d_log - by_column + d_log_at_end, mask=exists)
        tl.store(d_beta + at, d_betas, mask=exists)
    dq_block = normalization_gradient(dq_acc, q_block, q_root)
    dk_block = normalization_gradient(dk_acc, k_block, k_root)
    tl.store(dq + at_keys, dq_block.to(dq.dtype.element_ty), mask=is_key)
    tl.store(dk + at_keys, dk_block.to(dk.dtype.element_ty), mask=is_key)
