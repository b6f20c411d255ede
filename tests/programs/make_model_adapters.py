"""Makes tests/data/model_adapters: LoRA adapters of whole models that PEFT writes; opens what jgg writes.

    pip install torch transformers peft
    python -m tests.programs.make_model_adapters
    python -m tests.programs.make_model_adapters --open FOLDER

Each folder is what `save_pretrained` writes of a random adapter of attention, experts and dense layers beside the model
in tests/data/models, and logits.npy, float32 logits of the tokens in that model's reference.npz. With --open, PEFT
opens the folders in FOLDER, named as the families, which `jgg.models.save_adapter` wrote; each has logits.npy of
jgg, which PEFT's must be. Made, and opened, with torch 2.13.0, PEFT 0.21.2 and transformers 5.24.0.
"""

import argparse
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parents[1] / "data"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CASES = {
    "qwen3_moe": (ATTENTION, EXPERTS),
    "gpt_oss": (ATTENTION, EXPERTS),
    "mixtral": (ATTENTION, EXPERTS),
    "glm4_moe": (ATTENTION, EXPERTS + [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]),
}


def base(family):
    return AutoModelForCausalLM.from_pretrained(
        DATA / "models" / family, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def logits_of(family, adapted):
    with np.load(DATA / "models" / family / "reference.npz") as file, torch.no_grad():
        return adapted(torch.from_numpy(file["tokens"]).long()).logits.numpy()


def make(family):
    modules, parameters = CASES[family]
    lora = LoraConfig(
        r=2, lora_alpha=3, target_modules=modules, target_parameters=parameters, task_type="CAUSAL_LM"
    )  # fmt: skip
    adapted, generator = get_peft_model(base(family), lora), torch.Generator().manual_seed(0)
    named = {name: parameter for name, parameter in sorted(adapted.named_parameters()) if "lora_" in name}
    for name, parameter in named.items():
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        if "up_proj.lora_A" in name:  # jgg has one for gate and up of a dense layer
            parameter.data.copy_(named[name.replace("up_proj", "gate_proj")].data)
    folder = DATA / "model_adapters" / family
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    settings = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True))
    np.save(folder / "logits.npy", logits_of(family, adapted))


def check_opens(family, folder):
    """Raises unless PEFT finds each tensor its place, and the logits are those of jgg."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of keys that are missing
        adapted = PeftModel.from_pretrained(base(family), str(folder / family))
    np.testing.assert_allclose(logits_of(family, adapted), np.load(folder / family / "logits.npy"), rtol=0, atol=1e-4)
    print(f"{family}: PEFT opens it, and gives the same logits")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--open", type=Path, metavar="FOLDER")
    folder = parser.parse_args().open
    for family in CASES:
        if folder is None:
            make(family)
        elif (folder / family).exists():
            check_opens(family, folder)


if __name__ == "__main__":
    main()
