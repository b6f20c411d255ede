"""The arrays of an MoE layer by name."""

from typing import NamedTuple

import jax

from jgg.experts.arguments import Matrices


class LayerArrays(NamedTuple):
    """The arrays of `MoELayer.apply`, checked: x [T, H], parameters, selection_bias, topk_indices [T, k], mask [T]."""

    x: jax.Array
    w_router: jax.Array
    w_gate_up: Matrices
    w_down: Matrices
    b_router: jax.Array | None = None
    b_gate_up: jax.Array | None = None
    b_down: jax.Array | None = None
    w_shared_gate_up: jax.Array | None = None
    w_shared_down: jax.Array | None = None
    w_shared_gate: jax.Array | None = None
    w_gate_up_lora_a: jax.Array | None = None
    w_gate_up_lora_b: jax.Array | None = None
    w_down_lora_a: jax.Array | None = None
    w_down_lora_b: jax.Array | None = None
    w_router_lora_a: jax.Array | None = None
    w_router_lora_b: jax.Array | None = None
    w_shared_gate_up_lora_a: jax.Array | None = None
    w_shared_gate_up_lora_b: jax.Array | None = None
    w_shared_down_lora_a: jax.Array | None = None
    w_shared_down_lora_b: jax.Array | None = None
    selection_bias: jax.Array | None = None
    topk_indices: jax.Array | None = None
    mask: jax.Array | None = None
