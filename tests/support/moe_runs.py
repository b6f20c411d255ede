"""The expert MLP by every implementation, forward and backward."""

import jax
import jax.numpy as jnp
import pytest

import jgg
from jgg.experts.moe import moe_mlp

IMPLEMENTATIONS = [
    None,
    pytest.param("xla", marks=pytest.mark.thorough),
    pytest.param("interpret", marks=pytest.mark.interpret),
    pytest.param("triton", marks=pytest.mark.gpu),
]


def run(floats, chosen, dy, implementation, activation="swiglu", dtype=jnp.float32, num_rows=None, **options):
    """y and the gradients; num_rows of the choices have a row, by default all."""
    experts = floats["w_gate_up"].shape[0]
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), experts)
    gather_indices = gather_indices[:num_rows]
    arrays = {name: None if a is None else jnp.asarray(a, dtype) for name, a in floats.items()}

    @jax.jit
    def forward_and_backward(arrays, dy):
        def forward(arrays):
            names = ("x", "w_gate_up", "w_down")
            weights = arrays["topk_weights"].astype(jnp.float32)
            routing = jgg.Routing(weights, jnp.asarray(chosen), group_sizes, gather_indices)
            biases = {name: arrays[name] for name in ("b_gate_up", "b_down")}
            return moe_mlp(
                *(arrays[name] for name in names),
                routing,
                activation=activation,
                precision="highest",
                implementation=implementation,
                **biases,
                **options,
            )

        y, vjp = jax.vjp(forward, arrays)
        return y, *vjp(dy.astype(y.dtype))

    return forward_and_backward(arrays, jnp.asarray(dy))
