"""The expert MLP as a function of arrays, forward and backward, by every implementation."""

import functools

import jax
import jax.numpy as jnp

import jgg
from tests.support.passes import forward_and_backward


@functools.partial(jax.jit, static_argnums=1)
def indices_of(chosen, experts):
    """The indices of a Routing: the chosen experts [T, k], group_sizes and gather_indices."""
    return chosen, *jgg.sort_by_expert(chosen, experts)


def forward(arrays, indices, **options):
    """moe_mlp of arrays by name, topk_weights among them."""
    weights, others = arrays["topk_weights"], {name: a for name, a in arrays.items() if name != "topk_weights"}
    return jgg.moe_mlp(**others, routing=jgg.Routing(weights.astype(jnp.float32), *indices), **options)


def run(floats, chosen, dy, implementation, activation="swiglu", dtype=jnp.float32, num_rows=None, **options):
    """y and the gradients; num_rows of the choices have a row, by default all."""
    chosen, group_sizes, gather_indices = indices_of(jnp.asarray(chosen), len(floats["w_gate_up"]))
    arrays = {name: None if a is None else jnp.asarray(a, dtype) for name, a in floats.items()}
    options |= {"implementation": implementation, "activation": activation, "precision": "highest"}
    both = _compiled(tuple(options.items()))
    return both(jnp.asarray(dy), arrays, (chosen, group_sizes, gather_indices[:num_rows]))


@functools.cache
def _compiled(options):
    @jax.jit
    def both(dy, arrays, indices):
        return forward_and_backward(lambda arrays: forward(arrays, indices, **dict(options)))(dy, arrays)

    return both
