"""Makes tests/data/peft: LoRA adapters of experts that PEFT writes, differentiates and merges; opens what jgg writes.

    pip install torch transformers peft
    python -m tests.programs.make_peft_data                 # with transformers 5: adapters of fused experts
    python -m tests.programs.make_peft_data                 # with transformers 4: adapters of each expert's modules
    python -m tests.programs.make_peft_data --open FOLDER   # with transformers 5

Tiny models of two layers, float32. Each case is a folder of what `save_pretrained` writes, and weights.npz with the MoE
blocks' tensors by the names of published checkpoints, before and after `merge_and_unload`. Some have passes.npz too:
x and dy [tokens, hidden], each layer's y, the MoE block's result for x, and the gradients of sum(dy * y) in the
adapter's tensors, by their names in PEFT's file. With --open, PEFT opens the
adapters in FOLDER, folders with the names of the cases, such as `jgg.hf.save_adapter` wrote of what
`jgg.hf.load_adapter` read. Their merged weights must be the same. Made, and opened, with torch 2.13.0, PEFT 0.21.2 and
transformers 5.24.0; the adapters of modules with PEFT 0.18.1 and transformers 4.57.6.
"""

import argparse
import json
import re
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.programs.make_hf_data import on_disk

OUT = Path(__file__).parents[1] / "data" / "peft"
HIDDEN, INNER, EXPERTS = 10, 6, 4
TOKENS = 24
COMMON = {
    "hidden_size": HIDDEN,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "vocab_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "intermediate_size": INNER,
}
LOCAL = COMMON | {"num_local_experts": EXPERTS}
QWEN = COMMON | {"moe_intermediate_size": INNER, "num_experts": EXPERTS, "norm_topk_prob": True}
OLMOE = COMMON | {"num_experts": EXPERTS, "norm_topk_prob": False}
LLAMA = LOCAL | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 8}
VISION = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# case: (family, config, LoraConfig)
FUSED = {
    "qwen3_moe": ("qwen3_moe", QWEN, {"r": 2, "target_parameters": BOTH, "target_modules": ["q_proj"]}),
    "mixtral": ("mixtral", LOCAL, {"r": 2, "target_parameters": BOTH, "alpha_pattern": {"experts.down_proj": 5}}),
    "gpt_oss": (
        "gpt_oss",
        LOCAL,
        {"r": 2, "target_parameters": [f"1.{BOTH[0]}", BOTH[1]], "rank_pattern": {"layers.0.*down_proj": 3}},
    ),
    "olmoe": ("olmoe", OLMOE, {"r": 3, "target_parameters": BOTH[:1], "use_rslora": True}),
    "llama4": ("llama4", LLAMA, {"r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "granitemoe": ("granitemoe", LOCAL, {"r": 2, "target_parameters": ["experts.gate_up_proj"]}),
}
OF_MODULES = {
    "mixtral_modules": ("mixtral", LOCAL, {"r": 2, "target_modules": ["w1", "w2", "w3"]}),
    "qwen3_moe_modules": (
        "qwen3_moe",
        QWEN,
        {"r": 1, "target_modules": ["gate_proj", "up_proj", "down_proj", "q_proj"], "lora_dropout": 0.1},
    ),
}
CASES = FUSED | OF_MODULES
DIFFERENTIATED = "qwen3_moe", "mixtral", "gpt_oss", "olmoe"


def config_of(family, options):
    """Content of config.json, as jgg reads it."""
    return {"model_type": family} | ({"text_config": options} if family == "llama4" else options)


def make_model(family, options):
    if family == "llama4":
        config = CONFIG_MAPPING["llama4"](text_config=options, vision_config=VISION)
        model = transformers.Llama4ForConditionalGeneration(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**options))
    return model.to(torch.float32)


BLOCK = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.(?:mlp|block_sparse_moe|feed_forward)\.(.*)")


def blocks(model):
    """The layer, the name in its MoE block and the parameter, for every parameter of a block."""
    for name, parameter in model.named_parameters():
        found = BLOCK.fullmatch(name)
        if found:
            yield int(found[1]), found[2], parameter


def weights_of(family, model):
    """The tensors of MoE blocks by their names in published checkpoints."""
    weights = {}
    for layer, name, parameter in blocks(model):
        array = parameter.detach().numpy()
        weights |= on_disk(family, name, array, layer)
    return weights


def randomize(model, generator):
    for _, parameter in sorted(model.named_parameters()):
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def pass_through(adapted, generator):
    """Returns x, dy, each MoE block's y and the gradients of its adapters."""
    x, dy = (torch.randn((TOKENS, HIDDEN), generator=generator) for _ in range(2))
    arrays = {"x": x.numpy(), "dy": dy.numpy()}
    adapted.base_model.model.set_experts_implementation("eager")  # grouped_mm needs rows of multiples of 16 bytes
    for index, layer in enumerate(adapted.base_model.model.model.layers):
        y = layer.mlp(x[None])
        y = (y[0] if isinstance(y, tuple) else y).reshape(TOKENS, HIDDEN)  # gpt-oss returns its router's scores too
        torch.sum(y * dy).backward()
        arrays[f"y/{index}"] = y.detach().numpy()
    for name, parameter in adapted.named_parameters():
        if ".experts." in name and "lora_" in name:
            arrays[f"gradients/{name.replace('.default', '')}"] = parameter.grad.numpy()
    return arrays


def make(case):
    family, options, lora = CASES[case]
    model, generator = make_model(family, options), torch.Generator().manual_seed(0)
    randomize(model, generator)
    arrays = {f"base/{name}": array.copy() for name, array in weights_of(family, model).items()}
    lora = {"lora_alpha": 3, "target_modules": [], "task_type": "CAUSAL_LM"} | lora
    adapted = get_peft_model(model, LoraConfig(**lora))
    for name, parameter in sorted(adapted.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    folder = OUT / case
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    (folder / "config.json").write_text(json.dumps(config_of(family, options), indent=1) + "\n")
    if case in DIFFERENTIATED:
        np.savez_compressed(folder / "passes.npz", **pass_through(adapted, generator))
    merged = weights_of(family, adapted.merge_and_unload())
    changed = {name: array for name, array in merged.items() if np.any(array != arrays[f"base/{name}"])}
    np.savez_compressed(folder / "weights.npz", **arrays, **{f"merged/{name}": a for name, a in changed.items()})


def open_by_peft(case, folder):
    """Asserts that PEFT finds each tensor of the adapter its place, and merges the same weights."""
    family, options, _ = CASES[case]
    with np.load(OUT / case / "weights.npz") as file:
        stored = dict(file)
    model = make_model(family, options)
    for layer, name, parameter in blocks(model):
        filled = np.zeros(parameter.shape, np.float32)
        for part, view in on_disk(family, name, filled, layer).items():
            view[...] = stored[f"base/{part}"]
        parameter.data.copy_(torch.from_numpy(filled))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that are missing
        adapted = PeftModel.from_pretrained(model, str(folder))
    merged = weights_of(family, adapted.merge_and_unload())
    for name, array in merged.items():
        want = stored.get(f"merged/{name}", stored[f"base/{name}"])
        np.testing.assert_allclose(array, want, rtol=1e-6, atol=1e-6, err_msg=name)
    print(f"{case}: PEFT opens it, and merges the same weights")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--open", type=Path, metavar="FOLDER")
    folder = parser.parse_args().open
    if folder is not None:
        for case in CASES:
            open_by_peft(case, folder / case)
        return
    for case in OF_MODULES if transformers.__version__.startswith("4.") else FUSED:
        make(case)


if __name__ == "__main__":
    main()
