"""MaxText's routed experts, computed by jgg: only the grouped GEMM, or the whole block. Tested with MaxText 0.2.5.

from maxtext.kernels import megablox
from maxtext.layers import moe

megablox.gmm = jgg.integrations.maxtext.gmm  # with megablox=True, or
moe.RoutedMoE.sparse_matmul = jgg.integrations.maxtext.sparse_matmul
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jgg.activations import ActivationLike, clamped_swiglu
from jgg.ragged_dot import ragged_dot
from jgg.sharding import MoESharding, interleave, sharded_moe_mlp

# options of TPU kernels, or of how they are compiled
_WITHOUT_EFFECT = {
    "tiling", "interpret", "lhs_vma_axes", "rhs_vma_axes", "use_tokamax_backend", "use_gmm_v2",
    "use_gmm_v2_heuristic_tiling",
}  # fmt: skip


def gmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, preferred_element_type: DTypeLike = jnp.float32,
    group_offset: jax.Array | int | None = None, partial_sum: jax.Array | None = None, **options: Any,
) -> jax.Array:  # fmt: skip
    """Computes `maxtext.kernels.megablox.gmm` with `jgg.ragged_dot`; jgg chooses the tile sizes itself.

    Args:
      lhs: [m, k].
      rhs: [g, k, n].
      group_sizes: integer [g], or [G] with `group_offset`.
      preferred_element_type: dtype of the result.
      group_offset: as in `jgg.ragged_dot`.
      partial_sum: [m, n], added to the product.
      **options: MaxText's other options. Options of TPU kernels have no effect.

    Returns: [m, n].
    Raises: ValueError: an option asks for quantization or for transposed weights, or shapes disagree.
    """
    for name, value in options.items():
        if name not in _WITHOUT_EFFECT and value:
            raise ValueError(f"{name} must not be set with jgg's gmm, got {value!r}.")
    out = ragged_dot(lhs, rhs, group_sizes, None, preferred_element_type, group_offset)
    return out if partial_sum is None else out + partial_sum


def sparse_matmul(
    self: Any, inputs: jax.Array, gate_logits: jax.Array, pre_bias_logits: jax.Array | None, w0_kernel: jax.Array,
    w1_kernel: jax.Array, wo_kernel: jax.Array, w0_bias: jax.Array | None, w1_bias: jax.Array | None,
    wo_bias: jax.Array | None, input_ids: jax.Array | None = None, forced_routed_experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, None]:  # fmt: skip
    """Computes `RoutedMoE.sparse_matmul` with `jgg.moe_mlp`: gate and up in one product, and no copies of tokens.

    Remat policies know the pre-activation as "mlpwi_0". Meshes may split the batch, the experts and, along one axis,
    the experts' features. Experts on several devices get their tokens by all-gather with `use_ring_of_experts`, else by
    ragged all-to-all, with buffers of `ragged_buffer_factor`.

    Args:
      inputs: [batch, sequence, H].
      gate_logits, pre_bias_logits: [batch, sequence, E].
      w0_kernel, w1_kernel: [E, H, I], gate and up.
      wo_kernel: [E, I, H].
      w0_bias, w1_bias, wo_bias: [E, I], [E, I] and [E, H], or None.
      input_ids, forced_routed_experts: as in MaxText.

    Returns: y [batch, sequence, H], the load balancing loss or None, and None for updates of the router's bias.
    Raises: ValueError: the config asks for something that this block cannot do.
    """
    config = self.config
    _check(config)
    weights, experts = self.get_topk(gate_logits, pre_bias_logits, self.rngs, input_ids, forced_routed_experts)
    w_gate_up = jnp.concatenate([w0_kernel, w1_kernel], axis=-1)
    b_gate_up = None
    if w0_bias is not None and w1_bias is not None:
        b_gate_up = jnp.concatenate([w0_bias, w1_bias], axis=-1)
    sharding = _sharding(self)
    if sharding.tensor is not None:  # so that a gate is on the same device as its up
        w_gate_up = interleave(w_gate_up)
        b_gate_up = None if b_gate_up is None else interleave(b_gate_up)
    y, overflow = sharded_moe_mlp(
        inputs.reshape(-1, inputs.shape[-1]).astype(self.dtype), w_gate_up.astype(self.dtype),
        wo_kernel.astype(self.dtype), weights.reshape(-1, weights.shape[-1]), experts.reshape(-1, experts.shape[-1]),
        sharding=sharding, activation=_activation(self), interleaved=sharding.tensor is not None, b_gate_up=b_gate_up,
        b_down=wo_bias, w_layout="ekn",
        precision=jax.lax.Precision(config.matmul_precision), residual_names={"pre_activation": "mlpwi_0"},
    )  # fmt: skip
    self.sow(nnx.Intermediate, "moe_has_overflow", overflow > 0)
    loss = None
    if config.load_balance_loss_weight > 0 and not self.is_hash_routing:
        logits = gate_logits if pre_bias_logits is None else pre_bias_logits
        loss = self.load_balance_loss(experts, jax.nn.softmax(logits.astype(jnp.float32)).astype(self.dtype))
    return y.reshape(inputs.shape), loss, None


def _check(config: Any) -> None:
    """Raises ValueError if the config asks for something that the block cannot do."""
    must_be_off = (
        "quantization", "use_qwix_quantization", "routed_bias", "num_moe_emb_chunks", "moe_use_megatron_seq_aux_loss",
    )  # fmt: skip
    for name in must_be_off:
        if value := getattr(config, name, None):
            raise ValueError(f"{name} must be off with jgg's sparse_matmul, got {value!r}.")
    kind = config.decoder_block.value
    if kind in ("llama4", "deepseek4"):  # they scale x, or clip gates in another way
        raise ValueError(f"decoder_block must be none of llama4 and deepseek4 with jgg's sparse_matmul, got {kind!r}.")
    if kind == "deepseek" and config.mlp_activations_limit > 0:
        raise ValueError(f"mlp_activations_limit must be off with deepseek, got {config.mlp_activations_limit}.")


def _activation(block: Any) -> ActivationLike:
    config = block.config
    if config.decoder_block.value == "gpt_oss":
        return clamped_swiglu(config.mlp_activations_limit)
    return block.activation_fn


def _sharding(block: Any) -> MoESharding:
    """Makes the sharding: MaxText's rules split the batch, the mesh axes "expert" and "tensor" split the weights."""
    config, sizes = block.config, block.mesh.shape
    spec = block._logical_to_mesh_axes(("activation_batch", "activation_norm_length"))
    batch, sequence = (
        [name for name in ((part,) if isinstance(part, str) else part or ()) if sizes[name] > 1] for part in spec
    )
    if sequence:
        raise ValueError(f"the mesh must not split sequences with jgg's sparse_matmul, got axes {sequence}.")
    expert, tensor = (name if sizes.get(name, 1) > 1 else None for name in ("expert", "tensor"))
    return MoESharding(
        block.mesh,
        data=tuple(name for name in batch if name != expert),
        expert=expert,
        tensor=tensor,
        exchange="all_gather" if config.use_ring_of_experts else "ragged_all_to_all",
        buffer_factor=config.ragged_buffer_factor if config.ragged_buffer_factor > 0 else None,
    )
