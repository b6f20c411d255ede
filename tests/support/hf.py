"""Reference data of Hugging Face's own MoE blocks, which tests/programs/make_hf_data.py made."""

import json
import re
from pathlib import Path

import numpy as np

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


def fused(family, tensors):
    """The tensors of a folder as transformers 5 writes them with save_original_format=False."""
    own, new = FAMILIES[family], {}
    for name, tensor in tensors.items():
        if family == "granitemoe":
            for old, now in (("router.layer", "router"), ("input_linear.weight", "experts.gate_up_proj")):
                name = name.replace(old, now)
            name = name.replace("output_linear.weight", "experts.down_proj")
        name = name.replace("block_sparse_moe", own.fused_block or own.block)
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(?:(w1|w3|gate_proj|up_proj)|.*)\.weight", name)
        if found is None:
            new[name] = tensor
            continue
        part = "down_proj" if found[3] is None else "gate_up_proj"
        new.setdefault(f"{found[1]}.{part}", {})[int(found[2]), found[3] in ("w3", "up_proj")] = tensor
    for name, parts in new.items():
        if isinstance(parts, dict):
            experts = [[parts[key] for key in sorted(parts) if key[0] == e] for e in sorted({e for e, _ in parts})]
            new[name] = np.stack([np.concatenate(own) for own in experts])
    return new
