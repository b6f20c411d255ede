"""Checks MaxText's settings, and refuses by name those that jgg does not compute as MaxText would."""

from typing import Any

# Settings that must have this value, since others quantize experts, drop tokens or compute experts in another way. A
# version of MaxText that lacks one has nothing to refuse.
_ALWAYS: dict[str, object] = {
    "sparse_matmul": True,
    "te_moe_block": False,
    "quantization": "",
    "use_qwix_quantization": False,
    "capacity_factor": -1.0,
}
_FOR: dict[str, dict[str, object]] = {
    "gmm": {"megablox": True, "use_tokamax_gmm": False},
    "block": {
        "routed_bias": False,
        "moe_use_megatron_seq_aux_loss": False,
        "num_moe_emb_chunks": 0,
        "num_moe_token_chunks": 1,
        "use_batch_split_schedule": False,
        "moe_dropless_fallback": None,
        "moe_quantize_combine_bwd_method": "",
        "moe_log_max_load_ratio": False,
        "log_required_ragged_buffer_factor": False,
    },
}


def check_settings(config: Any, experts: str) -> None:
    """Raises ValueError if the config asks for something that jgg does not compute.

    Args:
      config: MaxText's.
      experts: "block" or "gmm", what jgg computes.
    """
    with_jgg = f"with jgg's {experts} of experts"
    if getattr(config, "num_experts", 2) < 2:
        raise ValueError(f"num_experts must be 2 or more {with_jgg}, got {config.num_experts}.")
    for name, expected in (_ALWAYS | _FOR[experts]).items():
        value = _value(getattr(config, name, expected))
        if value != expected and (value or expected):  # "", None, False and 0 all say that something is off
            raise ValueError(f"{name} must be {expected!r} {with_jgg}, got {value!r}.")
    attention = _value(getattr(config, "attention", ""))
    if attention.startswith("vllm_"):
        raise ValueError(f"attention must not be of vLLM, which has its own experts, {with_jgg}, got {attention!r}.")
    if experts == "block":
        _check_block(config)


def pre_activation_name(config: object) -> str:
    """The pre-activation's name in the config's remat policy; MaxText has two names for it."""
    return "mlpwi_0" if _place(config, "moe_mlpwi_0") == "remat" else "moe_mlpwi_0"


def _check_block(config: Any) -> None:
    """Raises ValueError for what only the block does not compute."""
    kind = _value(config.decoder_block)
    if kind in ("llama4", "deepseek4"):  # they scale x, or clip gates in another way
        raise ValueError(f"decoder_block must be none of llama4 and deepseek4 with jgg's block, got {kind!r}.")
    if kind == "deepseek" and config.mlp_activations_limit > 0:
        raise ValueError(f"mlp_activations_limit must be off with deepseek, got {config.mlp_activations_limit}.")
    if (rule := _value(getattr(config, "custom_mesh_and_rule", ""))) == "cp-as-ep":
        raise ValueError(f"custom_mesh_and_rule must not split experts along context with jgg's block, got {rule!r}.")
    for name in ("moe_x_sorted", "moe_routing_maps"):
        if (place := _place(config, name)) != "remat":
            raise ValueError(f"{name} must be 'remat' with jgg's block, which sorts no copies of x, got {place!r}.")
    gate, up = _place(config, "moe_mlpwi_0"), _place(config, "moe_mlpwi_1")
    if gate != up:
        raise ValueError(
            f"moe_mlpwi_1 must be as moe_mlpwi_0, {gate!r}, with jgg's block, where both are one array, got {up!r}."
        )


def _place(config: Any, name: str) -> str:
    """Where an array is kept for the backward pass: "device", "offload" or "remat"."""
    is_custom = getattr(config, "remat_policy", "") == "custom"
    return _value(getattr(config, name, "remat")) if is_custom else "remat"


def _value(setting: Any) -> Any:
    """A setting, or the value of one of an enumeration."""
    return getattr(setting, "value", setting)
