"""Levanter's experts and haliax's grouped GEMM computed by jgg. Tested with marin-levanter and marin-haliax 0.2.227.

Call `install` before a model is traced.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jgg.core.activations import ActivationLike
from jgg.experts.moe import moe_mlp
from jgg.experts.router.routing import Routing, sort_by_expert
from jgg.integrations.plugs import Framework, log_experts, log_grouped_gemm
from jgg.linear.ragged_dot import ragged_dot as jgg_ragged_dot

_TESTED = ("0.2.227.dev40316220070",)
_HALIAX = Framework("haliax", "marin-haliax", _TESTED)
_LEVANTER = Framework("Levanter", "marin-levanter", _TESTED)


def install() -> None:
    """Makes haliax multiply with `jgg.ragged_dot`, and Levanter compute the experts of one device ("scatter") with jgg.

    Call it once, before a model is traced. haliax alone suffices. A log line at INFO says which kernels run for each
    size.

    Raises: ImportError: haliax cannot be imported, or this version of one of them lacks what jgg replaces.
    """
    owner, name = _HALIAX.find("haliax.nn.ragged_dot", "ragged_dot")
    theirs = getattr(owner, name)
    if importlib.util.find_spec("levanter") is not None:
        local, functions = _LEVANTER.find("levanter.grug._moe.local", "_MOE_LOCAL_FNS")
        getattr(local, functions)["scatter"] = moe_mlp_local
    for module in [name for name in sys.modules if name.startswith(("haliax.", "levanter."))]:
        if vars(sys.modules[module]).get("ragged_dot") is theirs:  # where it was defined or imported
            _HALIAX.replace(module, "ragged_dot", ragged_dot)


def ragged_dot(
    lhs_: jax.Array, rhs_: jax.Array, group_sizes_: jax.Array, ar: bool = False, implementation: str = "auto"
) -> jax.Array:
    """Computes `haliax.nn.ragged_dot` with `jgg.ragged_dot`, which needs no padding to 512 rows.

    Args:
      lhs_: [m, k].
      rhs_: [g, k, n].
      group_sizes_: integer [g].
      ar: sum the result over the mesh axis "model".
      implementation: has no effect.

    Returns: [m, n].
    """
    out = jgg_ragged_dot(lhs_, rhs_, group_sizes_)
    log_grouped_gemm("haliax", lhs_, rhs_)
    return jax.lax.psum(out, "model") if ar else out


def moe_mlp_local(
    x: jax.Array,
    selected_experts: jax.Array,
    combine_weights: jax.Array,
    token_valid: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    *,
    activation_fn: ActivationLike,
    num_experts: int,
    **_: object,
) -> tuple[jax.Array, jax.Array]:
    """Computes one device's experts for `levanter.grug`, without copying each token once per expert.

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
    log_experts("Levanter", x, w_gate_up, x.dtype, selected_experts.shape[1])
    y = moe_mlp(x, w_gate_up, w_down, routing, activation=activation_fn, w_layout="ekn", residual_names=names)
    return checkpoint_name(y, "grug_moe_output"), jnp.int32(0)
