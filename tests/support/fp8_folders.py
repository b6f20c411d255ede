"""Folders whose matrices are in FP8, with a scale for each block, as publishers make them."""

import json
import math
import re
import shutil

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from jgg.models.tensors import expected_shapes
from tests.support.models import config_of

HOW = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
SIZES = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}


def quantized(array, block):
    """Values in float8_e4m3fn and float32 scales of a matrix, whose last blocks may be partial."""
    array = np.asarray(array, np.float32)
    counts = [math.ceil(size / step) for size, step in zip(array.shape, block, strict=True)]
    scales = np.empty(counts, np.float32)
    values = np.empty(array.shape, jnp.float8_e4m3fn)
    for i, j in np.ndindex(*counts):
        at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.abs(array[at]).max() / 448
        values[at] = (array[at] / scales[i, j]).astype(jnp.float8_e4m3fn)
    return values, scales


def dense_folder(family, folder, **changes):
    """A folder with random weights in bfloat16 whose experts have whole blocks."""
    config = config_of(family)
    config = jgg.models.model_config(config | {key: size for key, size in SIZES.items() if key in config} | changes)
    model, rng = nnx.eval_shape(lambda: jgg.models.Decoder(config, rngs=nnx.Rngs(0))), np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(config.source)
    tensors = {name: 0.05 * rng.normal(size=shape) + ("norm" in name) for name, shape in expected_shapes(model)}
    arrays = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return folder


def with_fp8(source, folder, *, how=HOW, block=(128, 128), suffix="_scale_inv", dtype=np.float32, keep="^$"):
    """A copy of a folder whose matrices are in FP8, except those of embeddings and routers.

    Args:
      how: quantization_config.
      block: the rows and columns that share a scale.
      suffix: what the name of a tensor's scales adds to the tensor's own.
      dtype: dtype of the scales.
      keep: a pattern for the names of other tensors that stay unchanged.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    tensors = {}
    for name, array in jgg.hf.Checkpoint(source).items():
        tensors[name] = array
        if array.ndim == 2 and not name.endswith(("embed_tokens.weight", "gate.weight")) and not re.search(keep, name):
            tensors[name], scales = quantized(array, block)
            tensors[name + suffix] = scales.astype(dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder
