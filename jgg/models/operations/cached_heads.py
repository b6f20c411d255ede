"""Keys and values as caches hold them: in the dtype of the computation, or in FP8.

In FP8, each head of a token has a scale, with which its largest feature is kept as it was: keys often have features
that are far larger than all others, and decide most of a product with a query. A power of two would round them too.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg.core.arguments import check
from jgg.core.gpu_target import FP8_COMPUTE_CAPABILITY, Target
from jgg.core.quantized import E4M3, Format, QuantizedArray, as_bits, from_bits, quantize_rows

type Heads = jax.Array | QuantizedArray  # [..., heads, D]; in FP8 with scales [..., heads, 1]


def empty_heads(shape: Sequence[int], dtype: DTypeLike) -> Heads:
    """Heads [..., D] of zeros, with scales if the dtype is float8_e4m3fn."""
    values = jnp.zeros(shape, dtype)
    return QuantizedArray(values, jnp.zeros((*shape[:-1], 1), jnp.float32)) if values.dtype == E4M3 else values


def stored_as(cache: Heads, heads: jax.Array) -> Heads:
    """Heads [..., D] in the form that the cache has."""
    return quantize_rows(heads, Format()) if isinstance(cache, QuantizedArray) else heads


def dense(heads: Heads, dtype: DTypeLike) -> jax.Array:
    """The heads in the dtype of the computation."""
    if not isinstance(heads, QuantizedArray):
        return heads
    return (jnp.asarray(heads.values, jnp.float32) * heads.scales).astype(dtype)


def put(cache: jax.Array, at: tuple[jax.Array | int, ...], own: jax.Array) -> jax.Array:
    """A part of a cache with others' numbers at these indices; as bits, since XLA may convert a whole array in FP8."""
    return from_bits(as_bits(cache).at[at].set(as_bits(own)), cache.dtype)


def check_gpu(target: Target) -> None:
    """Raises ValueError for a GPU whose kernels cannot read FP8."""
    check(
        target.compute_capability >= FP8_COMPUTE_CAPABILITY,
        f"cache_dtype must be None on GPUs below compute capability {FP8_COMPUTE_CAPABILITY / 10}, which do not "
        f"convert FP8, got {E4M3} on {target.compute_capability / 10}.",
    )
