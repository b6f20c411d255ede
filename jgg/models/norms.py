"""RMS norms of a decoder. On a GPU one kernel adds the residual and normalizes; elsewhere it is plain JAX."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.gpu_target import current_target, known_target
from jgg.core.manual_axes import alike
from jgg.extend import How, barrier, is_plain_jax
from jgg.models.operations.norm import NORM, NORM_BACKWARD, Norm, Normalized, NormBackward, rms_norm

TOTAL, NORMALIZED = "attention", "normalized"  # what `add_and_norm` names its results, for a policy of `jax.checkpoint`


def how_of_rows(implementation: str | None) -> How | None:
    """How rows are computed that do not depend on each other: by kernels if there is a GPU; None for plain JAX."""
    is_elsewhere = implementation is None and known_target() is None
    return None if is_elsewhere or is_plain_jax(implementation) else How(implementation, current_target())


def norm(x: jax.Array, scale: jax.Array, epsilon: float, implementation: str | None) -> jax.Array:
    """RMS norm of the last axis of x [..., H] times scale [H], computed in float32."""
    how = how_of_rows(implementation)
    if how is None:
        return _plain(x, scale, epsilon)
    return _normalized(_Options(how, epsilon), x, None, scale).y


def norm_beside(
    x: jax.Array, scale: jax.Array, epsilon: float, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm. Where x is used too, the backward pass adds up both gradients in one kernel."""
    how = how_of_rows(implementation)
    if how is None:
        return x, _plain(x, scale, epsilon)
    total, y = _normalized(_Options(how, epsilon, gives_total=True), x, None, scale)
    assert total is not None
    return total, y


def add_and_norm(
    x: jax.Array, added: jax.Array, added_scale: float, scale: jax.Array, epsilon: float, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """Returns x + added * added_scale and its norm, both [..., H]."""
    how = how_of_rows(implementation)
    if how is None:
        return sum_and_norm(x, added, added_scale, scale, epsilon, implementation)
    factor = _exact_factor(added_scale, x.dtype)
    total, y = _normalized(_Options(how, epsilon, factor, gives_total=True), x, added, scale)
    assert total is not None
    return total, y


def sum_and_norm(
    x: jax.Array, added: jax.Array, added_scale: float, scale: jax.Array, epsilon: float, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """The same in two steps, so that the norm can be computed again from the kept sum alone."""
    return norm_beside(checkpoint_name(residual(x, added, added_scale), TOTAL), scale, epsilon, implementation)


def residual(x: jax.Array, added: jax.Array, added_scale: float) -> jax.Array:
    """x + added * added_scale in plain JAX, with the same bits however XLA fuses it.

    For 16-bit numbers, `add_and_norm` gives its total the same bits too.
    """
    if added_scale == 1:
        return x + added
    if x.dtype.itemsize > 2:
        return x + barrier(added * added_scale)
    factor = jnp.float32(_exact_factor(added_scale, x.dtype))
    return (x.astype(jnp.float32) + added.astype(jnp.float32) * factor).astype(x.dtype)


def _exact_factor(factor: float, dtype: jnp.dtype) -> float:
    """The nearest factor whose products with 16-bit numbers are exact in float32, of 13 bits or, for bfloat16, of 16.

    So it does not matter whether a compiler contracts the product with a sum.
    """
    if dtype.itemsize > 2:
        return factor
    bits = jnp.finfo(jnp.float32).nmant - jnp.finfo(dtype).nmant
    mantissa, exponent = math.frexp(factor)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


# the backward pass keeps x alone, not float32 copies of it
_plain = jax.checkpoint(rms_norm, static_argnums=2)


class _Options(NamedTuple):
    """The static argument of the custom_vjp.

    Attributes:
      added_scale: the factor of what is added; None if nothing is.
      gives_total: whether what was normalized is a result too.
    """

    how: How
    epsilon: float
    added_scale: float | None = None
    gives_total: bool = False


def _normalized(options: _Options, x: jax.Array, added: jax.Array | None, scale: jax.Array) -> Normalized:
    rows = (None if array is None else array.reshape(-1, x.shape[-1]) for array in (x, added))
    results = _differentiable(options, *alike((*rows, scale)))
    return jax.tree.map(lambda rows: rows.reshape(x.shape), results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(options: _Options, x: jax.Array, added: jax.Array | None, scale: jax.Array) -> Normalized:
    return _forward(options, x, added, scale)[0]


def _forward(
    options: _Options, x: jax.Array, added: jax.Array | None, scale: jax.Array
) -> tuple[Normalized, tuple[jax.Array, jax.Array]]:
    factor = {} if options.added_scale is None else {"added_scale": options.added_scale}
    total, y = NORM(options.how, Norm(x, added, scale), epsilon=options.epsilon, **factor)
    if total is None:
        total = x
    else:  # both are named: to compute one of them again would take what was added
        total, y = checkpoint_name(total, TOTAL), checkpoint_name(y, NORMALIZED)
    return Normalized(total if options.gives_total else None, y), (total, scale)


def _backward(
    options: _Options, kept: tuple[jax.Array, jax.Array], gradients: Normalized
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    total, scale = kept
    operands = NormBackward(total, scale, gradients.y, gradients.total)
    dx, d_scale = NORM_BACKWARD(options.how, operands, epsilon=options.epsilon)
    d_added = None if options.added_scale is None else dx * options.added_scale
    return dx, d_added, d_scale.astype(scale.dtype)


_differentiable.defvjp(_forward, _backward)
