"""Reference models of Hugging Face's transformers, which tests/programs/make_model_data.py made."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.models

DATA = Path(__file__).parents[1] / "data" / "models"
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "glm4_moe")
# tests/models/test_families.py has what is tested of the others that have a folder
MORE_FAMILIES = tuple(sorted(path.name for path in DATA.iterdir() if path.name not in FAMILIES))
# those with a mixer, a router or an MLP of their own; the others have other settings of the same parts
OWN_PARTS = "deepseek_v3", "gemma4_text", "granitemoehybrid", "llama4", "qwen3_next"
# for tests of what hardly differs between families
FEW_FAMILIES = tuple(
    family if family == "glm4_moe" else pytest.param(family, marks=pytest.mark.sweep)
    for family in FAMILIES + MORE_FAMILIES
)


logits_of = jax.jit(lambda model, tokens: model(tokens))


@functools.cache
def reference(family):
    """What transformers computed in float32."""
    with np.load(DATA / family / "reference.npz") as file:
        return dict(file)


def loaded(family, **options):
    """The model in float32, a module of its own in each call."""
    return nnx.clone(_loaded(family, **options))


@functools.cache
def _loaded(family, **options):
    return jgg.models.load(DATA / family, **{"dtype": jnp.float32, **options})


def fill_adapters(model, scale=0.1):
    """The model with random values in its adapters."""
    rng = np.random.default_rng(0)
    random = lambda own: jnp.asarray(scale * rng.normal(size=own.shape), own.dtype)  # noqa: E731
    nnx.update(model, jax.tree.map(random, nnx.state(model, nnx.LoRAParam)))
    return model


def config_of(family):
    """The content of config.json."""
    return json.loads((DATA / family / "config.json").read_text())


def copied(family, folder, **changes):
    """A copy of a family's folder, with changes of its config.json; None takes a key away."""
    shutil.copytree(DATA / family, folder)
    config = config_of(family) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def changed(folder, family="qwen3_moe", drop=(), **tensors):
    """A copy of a family's folder with other tensors; "." in a name is written "__"."""
    copied(family, folder)
    arrays = dict(jgg.hf.Checkpoint(folder)) | {name.replace("__", "."): array for name, array in tensors.items()}
    save_file({name: array for name, array in arrays.items() if name not in drop}, folder / "model.safetensors")
    return folder


def with_mxfp4(folder, **changes):
    """A folder of gpt-oss with random experts in MXFP4, and changes of its config.json."""
    changes |= {"intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    config = config_of("gpt_oss") | changes
    model = jgg.models.Decoder(jgg.models.model_config(config), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jgg.models.save(model, folder)
    (folder / "config.json").write_text(jgg.models.model_config(config).source)
    tensors, rng = dict(jgg.hf.Checkpoint(folder)), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, columns, rows // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(122, 127, (experts, columns, rows // 32), np.uint8)
    save_file(tensors, folder / "model.safetensors")
    return folder


def folder_with_tokenizer(family, folder):
    """A copy of a family's folder whose token 5 is the word "t5"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    shutil.copytree(DATA / family, folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(64)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
