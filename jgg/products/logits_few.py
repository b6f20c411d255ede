"""The router's projection of few tokens, as in decoding: parts of it, which many programs compute side by side."""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from jgg.configs.kernel_configs import power_of_2
from jgg.launching.choice import How, Launcher, is_plain_jax
from jgg.launching.launch import Launch
from jgg.primitives import vmap
from jgg.primitives.product import Product, array_type, split_by_xla

_MOST_ROWS = 64
_PART = 256  # features of a program
_STEP = 128
_BLOCK_COLUMNS = 32


class LogitsFew(NamedTuple):
    """x [T, H] and w [H, E], of the same dtype."""

    x: jax.Array
    w: jax.Array


def logits_few(how: How, x: jax.Array, w: jax.Array) -> jax.Array:
    """Float32 x @ w of few rows; the bits of a row do not depend on the others."""
    parts = LOGITS_FEW(how, LogitsFew(x, w))
    return functools.reduce(operator.add, [parts[number] for number in range(len(parts))])


def are_few(x: jax.Array, w: jax.Array, how: How) -> bool:
    """Whether LOGITS_FEW takes x and w, and kernels may compute it."""
    is_known = not any(map(jax.export.is_symbolic_dim, (*x.shape, *w.shape)))
    if not is_known or how.implementation == "interpret" or is_plain_jax(how.implementation):
        return False
    is_split = any(names is not None for array in (x, w) for names in jax.typeof(array).sharding.spec)
    return not is_split and x.dtype == w.dtype == jnp.bfloat16 and 0 < x.shape[0] <= _MOST_ROWS and w.size > 0


def _result_types(operands: LogitsFew) -> jax.Array:
    (num_rows, reduced), columns = operands.x.shape, operands.w.shape[1]
    return array_type((math.ceil(reduced / _PART), num_rows, columns), jnp.float32)


def _plain(operands: LogitsFew) -> jax.Array:
    padding = -operands.x.shape[1] % _PART
    # in float32, as XLA for CPUs multiplies bfloat16 to float32 in some forms only
    x = jnp.pad(operands.x.astype(jnp.float32), ((0, 0), (0, padding)))
    w = jnp.pad(operands.w.astype(jnp.float32), ((0, padding), (0, 0)))
    x, w = x.reshape(x.shape[0], -1, _PART), w.reshape(-1, _PART, w.shape[1])
    return jnp.einsum("tph,phe->pte", x, w)


def _launch(launcher: Launcher, operands: LogitsFew) -> jax.Array:
    from jgg.kernels.logits_few import logits_few_kernel

    x, w = operands
    (num_rows, reduced), columns = x.shape, w.shape[1]
    parts = math.ceil(reduced / _PART)
    launch = Launch(
        operands={"x": x, "w": w, "num_rows": num_rows},
        outputs={"parts": jax.ShapeDtypeStruct((parts, num_rows, columns), jnp.float32)},
        constants={
            "REDUCED": reduced,
            "COLUMNS": columns,
            "PRECISION": "ieee" if x.dtype == jnp.float32 else "tf32",
            "PART": _PART,
            "BLOCK_ROWS": power_of_2(num_rows),
            "BLOCK_REDUCED": _STEP,
            "BLOCK_COLUMNS": _BLOCK_COLUMNS,
        },
        grid=(math.ceil(columns / _BLOCK_COLUMNS), parts),
        flops=2 * num_rows * w.size,
        bytes_accessed=(x.size + w.size) * w.dtype.itemsize + 4 * parts * num_rows * columns,
    )
    return launcher.run(logits_few_kernel, launch)["parts"]


def _merge_batch(how: How, operands: LogitsFew, batched: LogitsFew) -> jax.Array:
    x, w = operands
    if batched.w or x.shape[0] * x.shape[1] > _MOST_ROWS:
        return vmap.each_by_xla(_plain, operands, batched)
    parts = LOGITS_FEW(how, LogitsFew(vmap.flat(x), w))
    return jnp.moveaxis(parts.reshape(len(parts), *x.shape[:2], w.shape[1]), 1, 0)


LOGITS_FEW: Product[jax.Array] = Product(
    "logits_few",
    LogitsFew,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    several=split_by_xla(_plain),
    merge_batch=_merge_batch,
)
"""The products of parts of the reduced axis, float32 [parts, T, E], whose sum is x @ w."""
