"""Levanter's experts and haliax's grouped GEMM computed by jgg. Tested with marin-levanter and marin-haliax 0.2.227."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.activations import ActivationLike
from jgg.experts.moe import moe_mlp
from jgg.ragged_dot import ragged_dot as jgg_ragged_dot
from jgg.router.routing import Routing, sort_by_expert


def ragged_dot(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, ar: bool = False, implementation: str = "auto"
) -> jax.Array:
    """Computes `haliax.nn.ragged_dot` with `jgg.ragged_dot`, which needs no padding to 512 rows.

    Args:
      lhs: [m, k].
      rhs: [g, k, n].
      group_sizes: integer [g].
      ar: sum the result over the mesh axis "model".
      implementation: has no effect.

    Returns: [m, n].
    """
    out = jgg_ragged_dot(lhs, rhs, group_sizes)
    return jax.lax.psum(out, "model") if ar else out


def moe_mlp_local(
    x: jax.Array, selected_experts: jax.Array, combine_weights: jax.Array, token_valid: jax.Array,
    w_gate_up: jax.Array, w_down: jax.Array, *, activation_fn: ActivationLike, num_experts: int, **_: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Computes the experts of one device for `levanter.grug`, without a copy of a token for each of its experts.

    Remat policies find the arrays for the backward pass under Levanter's names (`MOE_REMAT_SAVE_NAMES`).

    Args:
      x: [T, H].
      selected_experts: integer [T, k].
      combine_weights: [T, k].
      token_valid: bool [T]; tokens where it is False go to no expert.
      w_gate_up: [E, H, 2 * I].
      w_down: [E, I, H].
      activation_fn: activation of the gate.
      num_experts: E.

    Returns: y [T, H], and the number of rows that were dropped, which is always 0.
    """
    experts = jnp.where(token_valid[:, None], selected_experts, num_experts)
    routing = Routing(combine_weights, experts, *sort_by_expert(experts, num_experts))
    names = {"x": "grug_moe_dispatch_input", "pre_activation": "grug_moe_expert_hidden"}
    y = moe_mlp(x, w_gate_up, w_down, routing, activation=activation_fn, w_layout="ekn", residual_names=names)
    return checkpoint_name(y, "grug_moe_output"), jnp.int32(0)
