"""LoRA adapters that PEFT wrote, with weights before and after its merging; see tests/programs/make_peft_data.py."""

from pathlib import Path

import numpy as np

import jgg.hf

DATA = Path(__file__).parents[1] / "data" / "peft"
FUSED = ("qwen3_moe", "mixtral", "gpt_oss", "olmoe", "llama4", "granitemoe")
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
