"""Reference data of Hugging Face's own MoE blocks, which tests/programs/make_hf_data.py made."""

import json
import re
from pathlib import Path

import numpy as np

from jgg.hf import from_hf
from jgg.hf.families import FAMILIES

DATA = Path(__file__).parents[1] / "data" / "hf"
# of the others, tests/models compares whole models
BLOCKS = tuple(family for family in FAMILIES if (DATA / f"{family}.json").exists())


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


def assert_same_tensors(got, want):
    """The same names, with the same dtypes, shapes and bits."""
    assert got.keys() == want.keys()
    for name, array in want.items():
        own = np.asarray(got[name])
        assert (own.dtype, own.shape) == (array.dtype, array.shape), name
        assert own.tobytes() == np.asarray(array).tobytes(), name


def fused(config, tensors):
    """The tensors of a folder as transformers 5 writes them with save_original_format=False."""
    own, new = FAMILIES[config["model_type"]], dict(tensors)
    (router,) = own.tensors["w_router"].names
    layers = {int(found[0]) for name in tensors if (found := re.search(r"(?<=layers\.)\d+(?=\.)", name))}
    for layer in (layer for layer in layers if own.block_name(layer) + router in tensors):
        for name, value in from_hf(config, tensors, layer).items():
            for part, _ in own.tensors[name].shapes(own.block_name(layer), value.shape):
                del new[part]
            tensor = own.fused.get(name, own.tensors[name])
            new |= dict(tensor.parts(own.fused_block_name(layer), value))
    return {name: np.ascontiguousarray(array) for name, array in new.items()}
