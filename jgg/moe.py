"""The expert MLP of a mixture-of-experts layer, from grouped GEMMs."""

import jax
import jax.numpy as jnp

from jgg.grouped_gemm import grouped_gemm
from jgg.routing import Routing


def moe_mlp(
    x: jax.Array,
    w_gate_up: jax.Array,
    w_down: jax.Array,
    routing: Routing,
    *,
    w_layout: str = "enk",
    precision=None,
    implementation: str | None = None,
) -> jax.Array:
    """Each token through the SwiGLU MLPs of its experts, added up with the routing's weights.

    Computes `y[t] = sum over j of topk_weights[t, j] * MLP_e(x[t])` with e the token's j-th expert and
    `MLP_e(x) = (silu(x @ gate_e) * (x @ up_e)) @ down_e`.
    Shapes: T tokens, H features, I hidden features of an expert, E experts, k choices.

    Args:
      x: [T, H].
      w_gate_up: gate and up side by side: [E, 2 * I, H] or, with `w_layout="ekn"`, [E, H, 2 * I].
      w_down: [E, H, I] or, with `w_layout="ekn"`, [E, I, H].
      routing: of the T tokens, by `route`.
      w_layout, precision, implementation: as in `grouped_gemm`.

    Returns: y [T, H] in the dtype of x.
    Raises: as `grouped_gemm`.
    """
    num_tokens, topk = routing.topk_weights.shape
    options = {"w_layout": w_layout, "precision": precision, "implementation": implementation}
    gate_up = grouped_gemm(x, w_gate_up, routing.group_sizes, topk, routing.gather_indices, permute_x=True, **options)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    y = grouped_gemm(
        jax.nn.silu(gate) * up,
        w_down,
        routing.group_sizes,
        topk,
        routing.gather_indices,
        permute_y=True,
        topk_weights=routing.topk_weights,
        **options,
    )
    return jnp.sum(y.reshape(num_tokens, topk, -1).astype(jnp.float32), axis=1).astype(x.dtype)
