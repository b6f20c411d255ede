"""The least time of a step of a whole model, as `jgg.tuning.roofline` says, with the whole step as one pass.

FLOPs are those of the matrices, 2 for each element and row that it multiplies, and those of attention, 4 for each
feature of each head and each pair of a position and one that it attends to. Backward takes as many for the gradients of
activations and, where the matrices are trained, as many again for those. A recomputed forward counts nothing.

Bytes are the parameters, read once in each of forward and backward; the cache of keys and values, in generation; and
AdamW's, whose moments have the parameters' dtype: the gradient is written and read, the parameter and both moments are
read and written. Only the experts that the tokens are expected to choose count, if each token chooses uniformly:
E (1 - (1 - k / E) ** tokens). Activations, adapters' FLOPs and norms count nothing.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

import jgg.models
from jgg.core.choices import FP8
from jgg.tuning import ways
from jgg.tuning.roofline import copy_bandwidth, least_seconds
from jgg.tuning.workloads import gemm, operands

_OPTIMIZER = 8  # times that AdamW reads or writes something of a parameter's size


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A parameter of all layers, quantized or not.

    Attributes:
      num_elements, num_bytes: of all layers and experts.
      is_of_experts: whether it is the experts' w_gate_up or w_down, or their adapters.
      is_matrix: whether tokens are multiplied by it.
      is_head: whether it gives the logits.
    """

    num_elements: int
    num_bytes: int
    is_of_experts: bool
    is_matrix: bool
    is_head: bool


class Speeds(NamedTuple):
    """Speeds of the device: bytes/s of a copy, and FLOP/s of dense products in bfloat16 and where experts multiply."""

    copy: float
    dense: float
    dense_of_experts: float


def measure_speeds(config: jgg.models.ModelConfig, tokens: int, is_in_fp8: bool) -> Speeds:
    """Measures a copy and dense products of this many rows, of H and 4 * H features."""

    def dense(dtype):
        features = config.features
        problem = gemm(num_rows=tokens, in_features=features, out_features=4 * features, num_experts=1, dtype=dtype)
        return problem.flops / ways.dense("forward", problem, operands(problem, "one")).measure().seconds

    in_bfloat16 = dense("bfloat16")
    return Speeds(copy_bandwidth(), in_bfloat16, dense(FP8) if is_in_fp8 else in_bfloat16)


def tensors_of(model: jgg.models.Decoder) -> list[Tensor]:
    """The parameters of a model that a step reads; of an embedding that is not the head too, it reads few rows."""
    return [
        _tensor(path, variable.get_value(), model.config.is_tied)
        for path, variable in nnx.to_flat_state(nnx.state(model))
        if path[-1] != "w_embedding" or model.config.is_tied
    ]


def _tensor(path: tuple[Any, ...], value: Any, is_tied: bool) -> Tensor:
    name = str(path[-1])
    return Tensor(
        num_elements=math.prod(value.shape),
        num_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value)),
        is_of_experts="moe" in path and name.startswith(("w_gate_up", "w_down")),
        is_matrix=name.startswith("w_") and "lora" not in name,
        is_head=name == ("w_embedding" if is_tied else "w_head"),
    )


def least_training_seconds(
    config: jgg.models.ModelConfig, tensors: list[Tensor], speeds: Speeds, batch: int, sequence: int, is_lora: bool
) -> float | None:
    """The least time of a training step for adapters of frozen parameters, or for all parameters."""
    tokens = batch * sequence
    passes = 2 if is_lora else 3
    dense_seconds = passes * _matrix_seconds(config, tensors, speeds, tokens, tokens)
    dense_seconds += 3 * batch * _attention_flops(config, range(sequence)) / speeds.dense
    times_moved = 2 if is_lora else 2 + _OPTIMIZER
    return least_seconds(times_moved * _bytes_read(config, tensors, tokens), speeds.copy, dense_seconds)


def least_prefill_seconds(
    config: jgg.models.ModelConfig, tensors: list[Tensor], speeds: Speeds, batch: int, prompt: int
) -> float | None:
    """The least time of the forward of prompts, with logits of their last tokens."""
    dense_seconds = _matrix_seconds(config, tensors, speeds, batch * prompt, batch)
    dense_seconds += batch * _attention_flops(config, range(prompt)) / speeds.dense
    return least_seconds(_bytes_read(config, tensors, batch * prompt), speeds.copy, dense_seconds)


def least_decode_seconds(
    config: jgg.models.ModelConfig, tensors: list[Tensor], speeds: Speeds, batch: int, position: int
) -> float | None:
    """The least time of a step of generation in which each sequence gets its token number `position`."""
    dense_seconds = _matrix_seconds(config, tensors, speeds, batch, batch)
    dense_seconds += batch * _attention_flops(config, [position]) / speeds.dense
    cached = sum(min(position, own.window or position) * own.cached_per_token for own in config.mixers)
    cache = 2 * batch * cached  # 2 bytes each
    return least_seconds(_bytes_read(config, tensors, batch) + cache, speeds.copy, dense_seconds)


def _bytes_read(config, tensors, tokens):
    """Bytes of the parameters that this many tokens are expected to read."""
    moe = config.moe
    share = 1 - (1 - moe.topk / moe.num_experts) ** tokens
    return sum(tensor.num_bytes * (share if tensor.is_of_experts else 1) for tensor in tensors)


def _matrix_seconds(config, tensors, speeds, tokens, tokens_with_logits):
    """The time of the matrices' products in forward, at the speed of dense products."""
    seconds = 0.0
    for tensor in tensors:
        if tensor.is_matrix:
            rows = tokens_with_logits if tensor.is_head else tokens
            share = config.moe.topk / config.moe.num_experts if tensor.is_of_experts else 1
            speed = speeds.dense_of_experts if tensor.is_of_experts else speeds.dense
            seconds += 2 * rows * share * tensor.num_elements / speed
    return seconds


def _attention_flops(config, positions):
    """FLOPs of the attention of tokens at these positions of one sequence, in all layers, in forward."""
    before = np.asarray(positions)
    of_pairs = (int((own.pairs(before + 1) - own.pairs(before)).sum()) * own.flops_per_pair for own in config.mixers)
    return sum(of_pairs) + len(before) * sum(own.flops_per_token for own in config.mixers)
