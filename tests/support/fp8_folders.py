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
    """A folder of a new model whose experts have whole blocks."""
    config = config_of(family)
    config |= {key: size for key, size in SIZES.items() if key in config} | changes
    model = jgg.models.Decoder(jgg.models.model_config(config), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jgg.models.save(model, folder)
    return folder


def with_fp8(source, folder, *, how=HOW, block=(128, 128), suffix="_scale_inv", dtype=np.float32, keep="^$"):
    """A copy of a folder whose matrices are in FP8, but those of embeddings and routers.

    Args:
      how: quantization_config.
      block: the rows and columns that share a scale.
      suffix: added to the name of a tensor, it gives that of its scales.
      dtype: dtype of the scales.
      keep: a pattern of the names of other tensors that stay as they are.
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
