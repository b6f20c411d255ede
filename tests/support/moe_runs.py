"""The expert MLP by every implementation, forward and backward."""

import jax
import jax.numpy as jnp
import pytest

import jgg
from tests.support.passes import forward_and_backward

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

    def forward(arrays):
        arrays = dict(arrays)
        weights = arrays.pop("topk_weights").astype(jnp.float32)
        routing = jgg.Routing(weights, jnp.asarray(chosen), group_sizes, gather_indices)
        return jgg.moe_mlp(
            **arrays, routing=routing, activation=activation, precision="highest", implementation=implementation,
            **options,
        )  # fmt: skip

    return jax.jit(forward_and_backward(forward))(jnp.asarray(dy), arrays)
