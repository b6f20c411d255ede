"""Quantized checkpoints of Hugging Face, as bfloat16: FP8 in blocks (DeepSeek-V3, Kimi-K2) and MXFP4 (gpt-oss)."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

_GROUP = 32  # elements of MXFP4 that share a scale
_HALVES = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)  # by the four bits of a number


def dequantized(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """A checkpoint's tensors with those that are quantized in bfloat16, each computed when it is asked for.

    Args:
      config: as in config.json, whose "quantization_config" says how; without it, tensors are returned.

    Raises: ValueError: the checkpoint is quantized in another way.
    """
    quantization = config.get("quantization_config", config.get("text_config", {}).get("quantization_config"))
    if quantization is None:
        return tensors
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method == "mxfp4":
        return _Dequantized(tensors, ("_blocks", "_scales"), _from_mxfp4)
    if method == "fp8" and block is not None:
        return _Dequantized(
            tensors, ("", "_scale_inv"), lambda name, values, scales: _from_fp8(name, values, scales, block)
        )
    raise ValueError(
        f"quantization_config must have quant_method 'fp8' with a weight_block_size, or 'mxfp4', got {quantization}."
    )


class _Dequantized(Mapping[str, np.ndarray]):
    """Tensors by name, two of which may stand for one.

    Args:
      suffixes: what the names of values and of their scales have beyond the name.
      compute: (name, values, scales) -> the tensor.
    """

    def __init__(
        self, tensors: Mapping[str, np.ndarray], suffixes: tuple[str, str],
        compute: Callable[[str, np.ndarray, np.ndarray], np.ndarray],
    ) -> None:  # fmt: skip
        self._compute = compute
        of_values, of_scales = suffixes
        self._tensors = tensors
        self._quantized = {
            scales.removesuffix(of_scales): (scales.removesuffix(of_scales) + of_values, scales)
            for scales in tensors
            if scales.endswith(of_scales) and scales.removesuffix(of_scales) + of_values in tensors
        }
        parts = {part for pair in self._quantized.values() for part in pair}
        self._names = [name for name in tensors if name not in parts] + list(self._quantized)

    def __getitem__(self, name: str) -> np.ndarray:
        """The tensor, in host memory."""
        if name not in self._quantized:
            return self._tensors[name]
        values, scales = self._quantized[name]
        return self._compute(name, np.asarray(self._tensors[values]), np.asarray(self._tensors[scales]))

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._names)


def _from_fp8(name, values, scales, block):
    """Values [rows, columns] times the scale of their block.

    Source: `weight_dequant` of DeepSeek-V3's inference/kernel.py.
    """
    blocks = [math.ceil(size / step) for size, step in zip(values.shape, block, strict=True)]
    _check_scales(name, scales, blocks)
    scales = scales.astype(np.float32)
    for axis, (size, step) in enumerate(zip(values.shape, block, strict=True)):
        scales = np.repeat(scales, step, axis).take(range(size), axis)
    return (values.astype(np.float32) * scales).astype(jnp.bfloat16)


def _from_mxfp4(name, blocks, scales):
    """Bytes [..., out, groups, 16] of two numbers each, the lower half first, and a scale for each group.

    Returns: [..., in, out], as transformers keeps it.

    Source: OCP Microscaling Formats (MX) Specification 1.0; the order is that of `convert_moe_packed_tensors` in
    transformers.
    """
    _check_scales(name, scales, list(blocks.shape[:-1]))
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _GROUP)
    values = _HALVES[numbers] * scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2).astype(jnp.bfloat16)


def _check_scales(name, scales, shape):
    if list(scales.shape) != shape:
        raise ValueError(f"The scales of {name} must have shape {shape}, got {list(scales.shape)}.")
