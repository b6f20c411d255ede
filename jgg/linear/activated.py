"""The activation between two dense products, on a GPU by one kernel, which computes each row independently."""

import functools
from typing import NamedTuple

import jax

from jgg.core.activations import Activation
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How, is_plain_jax
from jgg.products.activate import ACTIVATE, Activate, Hidden


def activated(pre_activation: jax.Array, activation: Activation, implementation: str | None = None) -> jax.Array:
    """The hidden features [..., I] of a pre-activation [..., 2 * I], or [..., I] without a gate, in its dtype.

    The backward pass keeps only the pre-activation.
    """
    if is_plain_jax(implementation):
        return _plain(activation, pre_activation)
    rows = pre_activation.reshape(-1, pre_activation.shape[-1])
    hidden = _differentiable(_Options(How(implementation, current_target()), activation), rows)
    return hidden.reshape(*pre_activation.shape[:-1], hidden.shape[1])


def _plain(activation: Activation, pre_activation: jax.Array) -> jax.Array:
    return activation(pre_activation).astype(pre_activation.dtype)


class _Options(NamedTuple):
    """The static argument of the custom_vjp."""

    how: How
    activation: Activation


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(options: _Options, rows: jax.Array) -> jax.Array:
    hidden = ACTIVATE(options.how, Activate(rows), hidden=Hidden(options.activation, interleaved=False)).hidden
    assert isinstance(hidden, jax.Array)  # without a Format
    return hidden


def _forward(options: _Options, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _differentiable(options, rows), rows


def _backward(options: _Options, rows: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    (d_rows,) = jax.vjp(functools.partial(_plain, options.activation), rows)[1](gradient)
    return (d_rows,)


_differentiable.defvjp(_forward, _backward)
