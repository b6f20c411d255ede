"""LoRA adapters that PEFT wrote, merged and differentiated; see tests/programs/make_peft_data.py."""

from pathlib import Path

import numpy as np

import jgg.hf

DATA = Path(__file__).parents[1] / "data" / "peft"
FUSED = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "llama4", "granitemoe")
DIFFERENTIATED = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe")
OF_MODULES = ("mixtral_modules", "qwen3_moe_modules")


def load_weights(case):
    """config, and the checkpoint's tensors before and after PEFT merged the adapter into them."""
    with np.load(DATA / case / "weights.npz") as file:
        arrays = dict(file)
    base, merged = (
        {key.removeprefix(f"{group}/"): array for key, array in arrays.items() if key.startswith(f"{group}/")}
        for group in ("base", "merged")
    )
    return jgg.hf.read_config(DATA / case), base, base | merged


def load_passes(case):
    """x, dy and each layer's y by name, and the gradients in the tensors of the adapter by their names."""
    with np.load(DATA / case / "passes.npz") as file:
        arrays = dict(file)
    gradients = {key: array for key, array in arrays.items() if key.startswith("gradients/")}
    others = {key: array for key, array in arrays.items() if key not in gradients}
    return others, {key.removeprefix("gradients/"): array for key, array in gradients.items()}
