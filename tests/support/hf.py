"""Reference data of Hugging Face's own MoE blocks, which tests/programs/make_hf_data.py made."""

import json
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "hf"


def load(name):
    """config, weights, and the rest of the reference data of a family."""
    config = json.loads((DATA / f"{name}.json").read_text())
    with np.load(DATA / f"{name}.npz") as file:
        arrays = dict(file)
    groups = {
        group: {key.removeprefix(f"{group}/"): array for key, array in arrays.items() if key.startswith(f"{group}/")}
        for group in ("weights", "grads")
    }
    return config, groups["weights"], groups["grads"], {key: arrays[key] for key in ("x", "dy", "y", "dx")}
