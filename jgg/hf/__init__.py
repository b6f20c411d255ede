"""MoE blocks of Hugging Face models: makes a layer from config.json and converts its parameters bit for bit.

    config = jgg.hf.read_config(folder)
    checkpoint = jgg.hf.Checkpoint(folder)
    layer = jgg.nnx.MoE(**vars(jgg.hf.moe_layer(config)), rngs=nnx.Rngs(0))
    jgg.nnx.load_params(layer, jgg.hf.from_hf(config, checkpoint, layer=3))

Reading and writing files needs safetensors (`pip install 'jgg[hf]'`). Weights in FP8 with a scale per block
(DeepSeek-V3, Kimi-K2) and in MXFP4 (gpt-oss) are read in bfloat16, or kept as `jgg.QuantizedArray`. `load_adapter` and
`save_adapter` read and write LoRA adapters of experts in PEFT's format. `download` fetches a model from the Hugging
Face Hub.
"""

from jgg.hf.adapters import Adapter, load_adapter, save_adapter
from jgg.hf.checkpoints import Checkpoint, family, from_hf, moe_layer, read_config, to_hf
from jgg.hf.hub import download

__all__ = [
    "Adapter",
    "Checkpoint",
    "download",
    "family",
    "from_hf",
    "load_adapter",
    "moe_layer",
    "read_config",
    "save_adapter",
    "to_hf",
]
