"""Makes tests/data/model_adapters: LoRA adapters of whole models that PEFT writes; opens what jgg writes.

    pip install torch transformers peft
    python -m tests.programs.make_model_adapters [CASE ...]
    python -m tests.programs.make_model_adapters [CASE ...] --open FOLDER

Each folder has what `save_pretrained` writes for a random adapter of a model in tests/data/models, and logits.npy, the
float32 logits of the tokens in that model's reference.npz. With --open, PEFT opens the folders in FOLDER, named like
the cases, which `jgg.models.save_adapter` wrote; PEFT's logits must equal jgg's in each folder's logits.npy. Made, and
opened, with torch 2.13.0, PEFT 0.21.2 and transformers 5.24.0.
"""

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.programs.make_model_data import auto_class, logits_of

DATA = Path(__file__).parents[1] / "data"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SEVEN = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
DENSE = [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
BESIDE = [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
SHARED = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
USUAL = {"r": 2, "target_modules": ATTENTION, "target_parameters": EXPERTS}
# the options of LoRA; what precedes a hyphen is the family
CASES = {
    "qwen3_moe": USUAL,
    "gpt_oss": USUAL,
    "mixtral": USUAL,
    "dots1": USUAL | {"target_parameters": EXPERTS + DENSE},
    "ernie4_5_moe": USUAL,
    "hy_v3": USUAL | {"target_parameters": EXPERTS + SHARED},
    "minimax_m2": USUAL,
    "qwen2_moe": USUAL,
    "solar_open": USUAL | {"target_parameters": [*EXPERTS, *SHARED, "mlp.gate.weight"]},
    "glm4_moe": USUAL | {"target_parameters": EXPERTS + DENSE},
    "gemma4_text": USUAL | {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", *BESIDE]},
    "mellum": USUAL,
    "exaone_moe": USUAL,
    "qwen3_vl_moe": USUAL,
    "qwen3_next": USUAL | {"target_modules": [*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj"]},
    "qwen3_5_moe_text": USUAL
    | {"target_modules": [*ATTENTION, *(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")), "out_proj"]},
    "granitemoeshared": {
        "r": 2,
        "target_modules": [*ATTENTION, "shared_mlp.input_linear", "shared_mlp.output_linear"],
        "target_parameters": ["block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"],
    },
    "granitemoehybrid": {"target_modules": ATTENTION, "target_parameters": ["router.weight"]},
    "llama4": {
        "r": 2,
        "target_modules": r"language_model\..*\.[qkvo]_proj",
        "target_parameters": ["feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"],
    },
    "qwen3_moe-seven-rslora": {"target_modules": SEVEN, "use_rslora": True, "r": 2},
    "olmoe-seven-patterns": {
        "target_modules": SEVEN,
        "rank_pattern": {"q_proj": 3, r"layers\.0\.self_attn\.v_proj": 2, "layers.1.*down_proj": 2},
        "alpha_pattern": {"k_proj|o_proj": 5, "model.layers.1.self_attn.v_proj": 7},
    },
    "granitemoe-seven-excluded": {
        "target_modules": SEVEN,
        "exclude_modules": r".*layers\.[1-9]\.self_attn\.(q|o)_proj",
        "target_parameters": ["router.weight"],
    },
    "gpt_oss-seven-last": {"target_modules": SEVEN, "layers_to_transform": [1]},
    "mixtral-all-linear": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "gemma4_text-seven": {"target_modules": [*SEVEN, "proj"], "r": 2},
    "glm4_moe-experts": {"target_modules": [], "target_parameters": ["layers.1.mlp.experts.gate_up_proj", EXPERTS[1]]},
    "deepseek_v3": {
        "r": 2,
        "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "target_parameters": EXPERTS,
    },
    "glm4_moe_lite": {"r": 2, "lora_alpha": 1, "target_modules": ["q_proj", "kv_b_proj"], "target_parameters": EXPERTS},
    "glm4_moe-all": {
        "target_modules": r".*\.[qo]_proj",
        "target_parameters": [*EXPERTS, *DENSE, *SHARED, "mlp.gate.weight"],
    },
}


def base(case):
    family = case.partition("-")[0]
    return auto_class(family).from_pretrained(
        DATA / "models" / family, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def reference_logits(case, adapted):
    family = case.partition("-")[0]
    with np.load(DATA / "models" / family / "reference.npz") as file, torch.no_grad():
        return logits_of(adapted.base_model.model, torch.from_numpy(file["tokens"]).long()).numpy()


def make(case):
    lora = LoraConfig(**{"r": 1, "lora_alpha": 3, "task_type": "CAUSAL_LM"} | CASES[case])
    adapted, generator = get_peft_model(base(case), lora), torch.Generator().manual_seed(0)
    named = {name: parameter for name, parameter in sorted(adapted.named_parameters()) if "lora_" in name}
    for name, parameter in named.items():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if "-" not in case and ".up_proj.lora_A" in name:  # as jgg has one for gate and up of an MLP
            parameter.data.copy_(named[name.replace("up_proj", "gate_proj")].data)
    folder = DATA / "model_adapters" / case
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    np.save(folder / "logits.npy", reference_logits(case, adapted))


def check_opens(case, folder):
    """Raises unless PEFT finds each tensor its place, and the logits are those of jgg."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that are missing
        adapted = PeftModel.from_pretrained(base(case), str(folder / case))
    np.testing.assert_allclose(
        reference_logits(case, adapted), np.load(folder / case / "logits.npy"), rtol=0, atol=1e-4
    )
    print(f"{case}: PEFT opens it, and gives the same logits")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--open", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    folder = arguments.open
    for case in arguments.cases:
        if folder is None:
            make(case)
        elif (folder / case).exists():
            check_opens(case, folder)


if __name__ == "__main__":
    main()
