"""The gated delta rule in chunks of tokens, in plain JAX that can be differentiated; float32 inside.

A head has a state S [K, V]. Each token t first forgets a share of it, and then corrects what its key k_t recalls:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) k_t^T S_(t-1))^T,    y_t = scale q_t^T S_t

Within a chunk of C tokens, let b be the sums of g from the chunk's first token on, D_ij = exp(b_i - b_j) for j <= i,
and S the state before the chunk. Each b_i - b_j is computed without rounding errors of b, which a strong decay before
both tokens makes large. The corrections M [C, V] of all its tokens solve a triangular system:

    (I + A) M = V - exp(b) K S,                          A_ij = (k_i . k_j) D_ij beta_j for j < i
    Y = scale (exp(b) Q S + (Q K^T * D) beta M),         the next S = exp(b_C) S + K^T (exp(b_C - b) beta M)

A token before which the state is reset begins a sequence: where i and j are in two sequences, D_ij is 0, and so are the
other factors that cross the reset.

Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, https://arxiv.org/abs/2412.06464; for the triangular
system, Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, https://arxiv.org/abs/2406.06484.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.manual_axes import alike

CHUNK = 64  # tokens
_PRECISION = jax.lax.Precision.HIGHEST


class _Chunks(NamedTuple):
    """What does not depend on states: N chunks of C tokens, H key heads, each with G value heads.

    Attributes:
      q, k: [N, B, C, H, K], normalized; q times the scale.
      own: [N, B, H, G, C, V], the corrections without a state before.
      recalled: [N, B, H, G, C, K]; its product with the state before is subtracted from `own`.
      weights: [N, B, H, G, C, C], the factors of the corrections in the results.
      read: [N, B, H, G, C], the factors of q times the state before in the results.
      write: [N, B, H, G, C], the factors of the corrections in the next state.
      total: [N, B, H, G, 1, 1], the decay of the state.
    """

    q: jax.Array
    k: jax.Array
    own: jax.Array
    recalled: jax.Array
    weights: jax.Array
    read: jax.Array
    write: jax.Array
    total: jax.Array


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array | None,
    resets: jax.Array | None,
    scale: float,
    epsilon: float,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Results [B, S, value heads, V] in the dtype of v, and the last states, float32 [B, value heads, K, V].

    After these come, in the dtype of v, the states before each chunk of CHUNK tokens, [B, value heads, chunks, K, V],
    and the corrections without beta, like v.
    The arguments are those of `jgg.models.delta_rule.delta_rule`.
    """
    q, k, v, log_decay, beta, state, resets = alike((q, k, v, log_decay, beta, state, resets))
    (batch, length, key_heads, features), (value_heads, value_features) = k.shape, v.shape[2:]
    group = value_heads // key_heads
    shape = batch, value_heads, features, value_features
    states = jnp.zeros(shape, jnp.float32) if state is None else state.astype(jnp.float32)
    if length == 0:
        return v, states, jnp.zeros((batch, value_heads, 0, features, value_features), v.dtype), v
    size = min(CHUNK, length)
    q, k, chunks_of_v, log_decay, beta, resets = (_split(array, size) for array in (q, k, v, log_decay, beta, resets))
    chunks = _chunks(q, k, chunks_of_v, log_decay, beta, resets, scale, epsilon)
    states = alike((states.reshape(batch, key_heads, group, features, value_features), chunks.k))[0]
    next_states = jax.checkpoint(functools.partial(_next, dtype=v.dtype), prevent_cse=False)
    if length == size:
        last, of_chunk = _next(states, jax.tree.map(lambda array: array[0], chunks), v.dtype)
        of_chunks = tuple(array[None] for array in of_chunk)
    else:
        last, of_chunks = jax.lax.scan(next_states, states, chunks)
    befores, *results = of_chunks
    y, corrections = (
        jnp.transpose(array, (1, 0, 4, 2, 3, 5)).reshape(batch, -1, *v.shape[2:])[:, :length].astype(v.dtype)
        for array in results  # [N, B, H, G, C, V]
    )
    befores = jnp.moveaxis(befores, 0, 3).reshape(batch, value_heads, -1, features, value_features)
    return y, last.reshape(shape), befores, corrections


def normalized(x: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(sum(x ** 2) + epsilon) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + epsilon)


def _split(array: jax.Array | None, size: int) -> jax.Array | Any:
    """An array [B, S, ...] as [N, B, size, ...], with zeros after the last token."""
    if array is None:
        return None
    padding = -array.shape[1] % size
    array = jnp.pad(array, ((0, 0), (0, padding), *[(0, 0)] * (array.ndim - 2)))
    return jnp.moveaxis(array.reshape(array.shape[0], -1, size, *array.shape[2:]), 1, 0)


def _chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    resets: jax.Array | None,
    scale: float,
    epsilon: float,
) -> _Chunks:
    q, k = normalized(q, epsilon) * scale, normalized(k, epsilon)
    size, key_heads = k.shape[2:4]
    v = v.astype(jnp.float32).reshape(*v.shape[:3], key_heads, -1, v.shape[4])
    log_decay, beta = (_of_heads(array.astype(jnp.float32), key_heads) for array in (log_decay, beta))
    tokens = jnp.arange(size, dtype=jnp.int32)
    mask = (tokens[:, None] >= tokens[None]).reshape(1, 1, 1, 1, size, size)
    between = _sums_between(log_decay)  # [N, B, H, G, C, C]
    since_start, until_end = jnp.exp(jnp.cumsum(log_decay, axis=-1)), jnp.exp(between[..., -1, :])
    total = since_start[..., -1:]
    if resets is not None:
        count = jnp.cumsum(resets, axis=2, dtype=jnp.int32)[:, :, None, None]  # [N, B, 1, 1, C]
        mask &= count[..., :, None] == count[..., None, :]
        since_start = jnp.where(count == 0, since_start, 0)
        until_end = jnp.where(count == count[..., -1:], until_end, 0)
        total = jnp.where(count[..., -1:] == 0, total, 0)
    decays = jnp.exp(jnp.where(mask, between, -jnp.inf))
    kk = jnp.einsum("nbchk,nbshk->nbhcs", k, k, precision=_PRECISION)[:, :, :, None]
    qk = jnp.einsum("nbchk,nbshk->nbhcs", q, k, precision=_PRECISION)[:, :, :, None]
    inverse = _inverse(kk * decays * beta[..., None, :])
    return _Chunks(
        q=q,
        k=k,
        own=jnp.einsum("nbhgcs,nbshgv->nbhgcv", inverse, v, precision=_PRECISION),
        recalled=jnp.einsum("nbhgcs,nbshk->nbhgck", inverse * since_start[..., None, :], k, precision=_PRECISION),
        weights=qk * decays * beta[..., None, :],
        read=since_start,
        write=until_end * beta,
        total=total[..., None],
    )


def _sums_between(log_decay: jax.Array) -> jax.Array:
    """Sums [..., C, C] of the log decays after each token (column) up to each later one (row).

    Each is a sum of its own. Differences of sums since the first token would have their rounding errors, which are
    large after a strong decay.
    """
    size = log_decay.shape[-1]
    rows = jnp.broadcast_to(log_decay[..., :, None], (*log_decay.shape, size))
    return jnp.cumsum(jnp.tril(rows, -1), axis=-2)


def _of_heads(array: jax.Array, key_heads: int) -> jax.Array:
    """[N, B, C, value heads] as [N, B, H, G, C]."""
    return jnp.moveaxis(array.reshape(*array.shape[:3], key_heads, -1), 2, -1)


def _inverse(a: jax.Array) -> jax.Array:
    """(I + A)^-1 [..., C, C], where A is what `a` has below its diagonal.

    It inverts blocks of 1, 2, 4, ... tokens on the diagonal: two inverses and what lies below the first block give the
    inverse of a block of twice the size. Unlike a triangular solve, this uses only products, which XLA can split over
    devices.
    """
    size = a.shape[-1]
    tokens = jnp.arange(size, dtype=jnp.int32)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    block = 1
    while block < size:
        row, column = tokens[:, None] // block, tokens[None] // block
        below = jnp.broadcast_to((row % 2 == 1) & (column == row - 1), a.shape)
        product = jnp.matmul(jnp.where(below, a, 0), inverse, precision=_PRECISION)
        inverse -= jnp.matmul(inverse, product, precision=_PRECISION)
        block *= 2
    return inverse


def _next(state: jax.Array, chunk: _Chunks, dtype: DTypeLike) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The state after a chunk; and the state before it in a dtype, the chunk's results and its corrections."""
    before = state.astype(dtype)
    corrections = chunk.own - jnp.einsum("bhgck,bhgkv->bhgcv", chunk.recalled, state, precision=_PRECISION)
    y = jnp.einsum("bchk,bhgkv->bhgcv", chunk.q, state, precision=_PRECISION) * chunk.read[..., None]
    y += jnp.einsum("bhgcs,bhgsv->bhgcv", chunk.weights, corrections, precision=_PRECISION)
    state *= chunk.total
    state += jnp.einsum("bchk,bhgcv->bhgkv", chunk.k, corrections * chunk.write[..., None], precision=_PRECISION)
    return state, (before, y, corrections)
