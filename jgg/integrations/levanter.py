"""Levanter's experts and haliax's grouped GEMM by jgg. Tested with marin-levanter and marin-haliax 0.2.227."""

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
    """`haliax.nn.ragged_dot` by `jgg.ragged_dot`, which needs no padding to 512 rows.

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
    """The experts of one device, as `levanter.grug` calls them; nothing is copied for each expert of a token.

    Remat policies of Levanter's names (`MOE_REMAT_SAVE_NAMES`) find what is kept.

    Args:
      x: [T, H].
      selected_experts: integer [T, k].
      combine_weights: [T, k].
      token_valid: bool [T]; others go to no expert.
      w_gate_up: [E, H, 2 * I].
      w_down: [E, I, H].
      activation_fn: of the gate.
      num_experts: E.

    Returns: y [T, H], and 0 for the rows that were dropped.
    """
    experts = jnp.where(token_valid[:, None], selected_experts, num_experts)
    routing = Routing(combine_weights, experts, *sort_by_expert(experts, num_experts))
    names = {"x": "grug_moe_dispatch_input", "pre_activation": "grug_moe_expert_hidden"}
    y = moe_mlp(x, w_gate_up, w_down, routing, activation=activation_fn, w_layout="ekn", residual_names=names)
    return checkpoint_name(y, "grug_moe_output"), jnp.int32(0)
