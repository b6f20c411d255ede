"""What surrounds the products, in plain JAX: routing and activation, with the interfaces of `layer_kernels`."""

import functools

import jax
import jax.numpy as jnp


def activate(pre_activation, activation, interleaved):
    """See `implementations.layer_kernels.activate`; any activation will do."""
    return [activation(pre_activation, interleaved).astype(pre_activation.dtype)]


def activate_backward(pre_activation, z, weights, activation, interleaved, scale_hidden):
    """See `implementations.layer_kernels.activate_backward`; any activation will do."""
    z = z.astype(jnp.float32)
    hidden, vjp = jax.vjp(functools.partial(activation, interleaved=interleaved), pre_activation)
    (d_pre_activation,) = vjp(weights[:, None] * z)
    row_sums = jnp.sum(hidden * z, axis=1)
    if scale_hidden:
        hidden = weights[:, None] * hidden
    return [d_pre_activation, hidden.astype(pre_activation.dtype), row_sums]


def top_k(scores, topk):
    """See `implementations.layer_kernels.top_k`; any number of columns will do."""
    # lax.top_k has the total order: -0.0 below 0.0, and a NaN at one end or the other by its sign
    scores = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    return [jax.lax.top_k(scores, topk)[1]]


def sort(experts, num_experts):
    """See `implementations.layer_kernels.sort`; any number of experts will do."""
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    gather_indices = jnp.argsort(experts, stable=True).astype(jnp.int32)
    return [jnp.zeros((num_experts,), jnp.int32).at[experts].add(1, mode="drop"), gather_indices]
