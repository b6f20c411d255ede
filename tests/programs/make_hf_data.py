"""Makes tests/data/hf: inputs, outputs and gradients of the MoE blocks that Hugging Face's transformers has.

    pip install torch transformers
    python tests/programs/make_hf_data.py

Tiny blocks with random weights, float32. Tensors have the names of published checkpoints, also where transformers 5
keeps all experts in one array. Made with torch 2.13.0 and transformers 5.23.0.
"""

import importlib
import json
from pathlib import Path

import numpy as np
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

OUT = Path(__file__).parents[1] / "data" / "hf"
HIDDEN, INNER, EXPERTS = 32, 24, 8
LEAST_MARGIN = 1e-3  # between the logits of chosen and other experts, so that rounding changes no choice

COMMON = {"hidden_size": HIDDEN, "num_experts_per_tok": 2, "num_hidden_layers": 1, "hidden_act": "silu"}
SMALL = COMMON | {"intermediate_size": INNER}
DENSE = {"intermediate_size": 40}  # of the layers without experts
QWEN = COMMON | DENSE | {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "norm_topk_prob": True}
DEEPSEEK = (
    COMMON
    | DENSE
    | {
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }
)
KIMI = DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827}
# family: (model type of the config, module, class of the block, config)
BLOCKS = {
    "mixtral": ("mixtral", "mixtral", "MixtralSparseMoeBlock", SMALL | {"num_local_experts": EXPERTS}),
    "qwen3_moe": ("qwen3_moe", "qwen3_moe", "Qwen3MoeSparseMoeBlock", QWEN),
    "qwen3_next": (
        "qwen3_next",
        "qwen3_next",
        "Qwen3NextSparseMoeBlock",
        QWEN | {"shared_expert_intermediate_size": 40},
    ),
    "olmoe": ("olmoe", "olmoe", "OlmoeSparseMoeBlock", SMALL | {"num_experts": EXPERTS, "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", "deepseek_v3", "DeepseekV3MoE", DEEPSEEK),
    "kimi_k2": ("deepseek_v3", "deepseek_v3", "DeepseekV3MoE", KIMI),
    "glm4_moe": ("glm4_moe", "glm4_moe", "Glm4MoeMoE", DEEPSEEK | {"n_group": 1, "topk_group": 1}),
    "llama4": (
        "llama4_text",
        "llama4",
        "Llama4TextMoe",
        SMALL | {"num_local_experts": EXPERTS, "num_experts_per_tok": 1},
    ),
    "gpt_oss": ("gpt_oss", "gpt_oss", "GptOssMLP", SMALL | {"num_local_experts": EXPERTS, "swiglu_limit": 1.5}),
    "granitemoe": ("granitemoe", "granitemoe", "GraniteMoeMoE", SMALL | {"num_local_experts": EXPERTS}),
}
PREFIXES = {
    "mixtral": "model.layers.0.block_sparse_moe.",
    "granitemoe": "model.layers.0.block_sparse_moe.",
    "llama4": "language_model.model.layers.0.feed_forward.",
}
EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2")}
GRANITE_NAMES = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}


def on_disk(family, name, array, layer=0):
    """The tensors of a checkpoint that an array of the block is."""
    prefix = PREFIXES.get(family, "model.layers.0.mlp.").replace(".0.", f".{layer}.")
    if family == "granitemoe":
        return {prefix + GRANITE_NAMES[name]: array}
    if family in ("llama4", "gpt_oss") or not name.startswith(("experts.gate_up_proj", "experts.down_proj")):
        return {prefix + name: array}
    gate, up, down = EXPERT_NAMES.get(family, ("gate_proj", "up_proj", "down_proj"))
    tensors = {}
    for expert, matrix in enumerate(array):
        names = (gate, up) if name == "experts.gate_up_proj" else (down,)
        parts = dict(zip(names, np.split(matrix, len(names)), strict=True))
        tensors |= {f"{prefix}experts.{expert}.{part}.weight": value for part, value in parts.items()}
    return tensors


def make_block(family, seed):
    model_type, module, name, options = BLOCKS[family]
    config = CONFIG_MAPPING[model_type](**options)
    config._experts_implementation = "eager"
    block = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(block.named_parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        for _, buffer in block.named_buffers():  # selection biases, with which scores are negative too
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator) - 0.5)
    return block.eval(), generator


def margin(block, x):
    """The least distance between the logits, or biased scores, of two experts of a token."""
    router = getattr(block, "gate", None) or block.router
    logits = torch.nn.functional.linear(x.reshape(-1, HIDDEN), router.weight, getattr(router, "bias", None))
    bias = dict(block.named_buffers()).get("gate.e_score_correction_bias")
    scores = logits if bias is None else torch.sigmoid(logits) + bias
    return float(scores.detach().sort(dim=1).values.diff(dim=1).min())


def make(family):
    for seed in range(100):
        block, generator = make_block(family, seed)
        x = torch.randn((2, 7, HIDDEN), generator=generator).requires_grad_()
        if margin(block, x) > LEAST_MARGIN:
            break
    dy = torch.randn(x.shape, generator=generator)
    y = block(x)
    y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
    (y * dy).sum().backward()
    arrays = {"x": x, "dy": dy, "y": y, "dx": x.grad}
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    for name, tensor in tensors.items():
        groups = {"weights": tensor} | ({} if tensor.grad is None else {"grads": tensor.grad})
        for group, values in groups.items():
            named = on_disk(family, name, values.detach().numpy())
            arrays |= {f"{group}/{full}": value for full, value in named.items()}
    return {name: np.asarray(a.detach() if torch.is_tensor(a) else a, np.float32) for name, a in arrays.items()}


def config_of(family):
    options = BLOCKS[family][3]
    return {"model_type": family} | ({"text_config": options} if family == "llama4" else options)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for family in BLOCKS:
        np.savez_compressed(OUT / f"{family}.npz", **make(family))
        (OUT / f"{family}.json").write_text(json.dumps(config_of(family), indent=1) + "\n")


if __name__ == "__main__":
    main()
