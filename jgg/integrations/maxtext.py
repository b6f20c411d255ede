"""MaxText's routed experts, computed by jgg: the whole block, or only the grouped GEMM. Tested with MaxText 0.2.5.

    python -m jgg.integrations.maxtext [--experts block|gmm] CONFIG [KEY=VALUE ...]

runs MaxText's own pre-training with them; in your own programs, call `install` first.
"""

import argparse
import functools
import logging
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jgg.core.activations import ActivationLike, clamped_swiglu
from jgg.core.arguments import check_one_of
from jgg.experts.sharding import MoESharding, interleave, sharded_moe_mlp
from jgg.integrations.maxtext_settings import check_settings, pre_activation_name
from jgg.integrations.plugs import Framework, log_experts, log_grouped_gemm
from jgg.linear.ragged_dot import ragged_dot

_MAXTEXT = Framework("MaxText", "maxtext", tested=("0.2.5",))
_TRAINING = "maxtext.trainers.pre_train.train"

# options of TPU kernels, or of how they are compiled
_WITHOUT_EFFECT = {
    "tiling",
    "interpret",
    "lhs_vma_axes",
    "rhs_vma_axes",
    "use_tokamax_backend",
    "use_gmm_v2",
    "use_gmm_v2_heuristic_tiling",
}


def install(experts: str = "block") -> None:
    """Makes MaxText compute its routed experts with jgg. Call it once, before you create a model.

    A log line at INFO says which kernels run for each size.

    Args:
      experts: "block" for the whole block of routed experts, or "gmm" for its grouped GEMM alone.

    Raises:
      ValueError: `experts` is neither. When MaxText makes a layer: a setting asks for what jgg does not compute.
      ImportError: MaxText cannot be imported, or this version of it lacks what jgg replaces.
    """
    check_one_of("experts", experts, ("block", "gmm"))
    if experts == "block":
        _MAXTEXT.replace("maxtext.layers.moe", "RoutedMoE.sparse_matmul", sparse_matmul)
    else:
        _MAXTEXT.replace("maxtext.kernels.megablox", "gmm", gmm)
    _check_settings_in("maxtext.layers.moe", "RoutedMoE.__init__", experts, lambda self, config, *_, **__: config)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs MaxText's pre-training with jgg's experts.

    Args:
      arguments: the command's arguments; by default the process's.
    """
    parser = argparse.ArgumentParser(
        "python -m jgg.integrations.maxtext",
        usage="%(prog)s [-h] [--experts {block,gmm}] CONFIG [KEY=VALUE ...]",
        description=f"Runs {_TRAINING} with routed experts that jgg computes. Its arguments follow the options.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--experts",
        choices=("block", "gmm"),
        default="block",
        help="what jgg computes: the whole block of routed experts (default), or its grouped GEMM alone",
    )
    options, of_maxtext = parser.parse_known_args(arguments)
    logging.getLogger("jgg").setLevel(logging.INFO)
    install(options.experts)
    # before the devices are set up, and for models without a layer of experts too
    _check_settings_in("maxtext.utils.train_utils", "validate_train_config", options.experts, lambda config: config)
    sys.argv[1:] = of_maxtext
    runpy.run_module(_TRAINING, run_name="__main__", alter_sys=True)


def _check_settings_in(module: str, path: str, experts: str, config_of: Callable[..., object]) -> None:
    """Makes a function of MaxText check its config first, which `config_of` finds among its arguments."""
    owner, name = _MAXTEXT.find(module, path)
    function = getattr(owner, name)

    @functools.wraps(function)
    def checked(*arguments: object, **options: object) -> object:
        check_settings(config_of(*arguments, **options), experts)
        return function(*arguments, **options)

    setattr(owner, name, checked)


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    preferred_element_type: DTypeLike = jnp.float32,
    group_offset: jax.Array | int | None = None,
    partial_sum: jax.Array | None = None,
    **options: object,
) -> jax.Array:
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
    log_grouped_gemm("MaxText", lhs, rhs)
    return out if partial_sum is None else out + partial_sum


def sparse_matmul(
    self: Any,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    w0_kernel: jax.Array,
    w1_kernel: jax.Array,
    wo_kernel: jax.Array,
    w0_bias: jax.Array | None,
    w1_bias: jax.Array | None,
    wo_bias: jax.Array | None,
    input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, None]:
    """Computes `RoutedMoE.sparse_matmul` with `jgg.moe_mlp`: gate and up in one product, and no copies of tokens.

    Remat policies know the pre-activation as "mlpwi_0" or, where a custom policy keeps that, as "moe_mlpwi_0". Meshes
    may split the batch, the experts and, along one axis, the experts' features. Experts on several devices get their
    tokens by all-gather with `use_ring_of_experts`, else by ragged all-to-all, with buffers of `ragged_buffer_factor`.

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
    check_settings(config, "block")
    weights, experts = self.get_topk(gate_logits, pre_bias_logits, self.rngs, input_ids, forced_routed_experts)
    w_gate_up = jnp.concatenate([w0_kernel, w1_kernel], axis=-1)
    b_gate_up = None
    if w0_bias is not None and w1_bias is not None:
        b_gate_up = jnp.concatenate([w0_bias, w1_bias], axis=-1)
    sharding = _sharding(self)
    if sharding.tensor is not None:  # so that a gate is on the same device as its up
        w_gate_up = interleave(w_gate_up)
        b_gate_up = None if b_gate_up is None else interleave(b_gate_up)
    x = inputs.reshape(-1, inputs.shape[-1]).astype(self.dtype)
    log_experts("MaxText", x, w_gate_up, self.dtype, weights.shape[-1], sharding)
    y, overflow = sharded_moe_mlp(
        x,
        w_gate_up.astype(self.dtype),
        wo_kernel.astype(self.dtype),
        weights.reshape(-1, weights.shape[-1]),
        experts.reshape(-1, experts.shape[-1]),
        sharding=sharding,
        activation=_activation(self),
        interleaved=sharding.tensor is not None,
        b_gate_up=b_gate_up,
        b_down=wo_bias,
        w_layout="ekn",
        precision=jax.lax.Precision(config.matmul_precision),
        residual_names={"pre_activation": pre_activation_name(config)},
    )
    self.sow(nnx.Intermediate, "moe_has_overflow", overflow > 0)
    loss = None
    if config.load_balance_loss_weight > 0 and not self.is_hash_routing:
        logits = gate_logits if pre_bias_logits is None else pre_bias_logits
        loss = self.load_balance_loss(experts, jax.nn.softmax(logits.astype(jnp.float32)).astype(self.dtype))
    return y.reshape(inputs.shape), loss, None


def _activation(block: Any) -> ActivationLike:
    config = block.config
    if config.decoder_block.value == "gpt_oss":
        return clamped_swiglu(config.mlp_activations_limit)
    return block.activation_fn


def _sharding(block: Any) -> MoESharding:
    """Makes the sharding: MaxText's rules split the batch, the mesh axes "expert" and "tensor" split the weights."""
    config, sizes, buffer_factor = block.config, block.mesh.shape, block.get_ragged_buffer_factor()
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
        buffer_factor=buffer_factor if buffer_factor > 0 else None,
    )


if __name__ == "__main__":
    main()
