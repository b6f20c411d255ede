"""What the kernels around the products are launched with: routing and activation; as `kernels` is for the products.

`call` is as there. None of them is tuned: each makes one pass over memory.
"""

import math

import jax
import jax.numpy as jnp

from jgg.activations import Activation
from jgg.implementations import xla_layer
from jgg.implementations.launch import Launch

MAX_COLUMNS = 1024  # experts of a row that a program holds at once
_MAX_PROGRAMS = 512  # of the sort; one program adds up what they counted
_ELEMENTS = 8192  # of a program's block, rows times experts


def activate(call, pre_activation, activation: Activation, interleaved: bool):
    """[hidden [M, I] in the dtype of pre_activation]; XLA computes an activation that the kernels do not know."""
    if activation.curve is None:
        return xla_layer.activate(pre_activation, activation, interleaved)
    num_rows, columns, constants = _activation(pre_activation, activation, interleaved)
    launch = Launch(
        operands={"pre": pre_activation, "num_rows": num_rows},
        outputs={"hidden": jax.ShapeDtypeStruct((num_rows, columns), pre_activation.dtype)},
        constants=constants,
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]), math.ceil(columns / constants["BLOCK_COLUMNS"])),
        flops=8 * num_rows * columns,
        bytes_accessed=(pre_activation.size + num_rows * columns) * pre_activation.dtype.itemsize,
    )
    return [call("activate_kernel", launch)["hidden"]]


def activate_backward(call, pre_activation, z, weights, activation: Activation, interleaved: bool, scale_hidden: bool):
    """[d pre_activation, hidden [M, I], float32 [M] sums of hidden * z] where d hidden is weights[:, None] * z.

    Args:
      z: [M, I] in the dtype of pre_activation.
      weights: float32 [M].
      scale_hidden: hidden times its row's weight.
    """
    if activation.curve is None:
        return xla_layer.activate_backward(pre_activation, z, weights, activation, interleaved, scale_hidden)
    num_rows, columns, constants = _activation(pre_activation, activation, interleaved)
    launch = Launch(
        operands={"weights": weights, "num_rows": num_rows},
        outputs={"pre": pre_activation, "z": z, "row_sums": jax.ShapeDtypeStruct((num_rows,), jnp.float32)},
        constants=constants | {"SCALE_HIDDEN": scale_hidden},
        grid=(math.ceil(num_rows / constants["BLOCK_ROWS"]),),
        flops=20 * num_rows * columns,
        bytes_accessed=2 * (pre_activation.size + z.size) * pre_activation.dtype.itemsize,
    )
    results = call("activate_backward_kernel", launch)
    return [results["pre"], results["z"], results["row_sums"]]


def _activation(pre_activation, activation, interleaved):
    """M, I and what both kernels are compiled for."""
    num_rows, width = pre_activation.shape
    columns = width // 2 if activation.is_gated else width
    curve, limit, alpha = activation.curve
    block_columns = min(128, _power_of_2(columns))
    return num_rows, columns, {
        "COLUMNS": columns,
        "GATED": activation.is_gated,
        "INTERLEAVED": interleaved,
        "CURVE": curve,
        "LIMIT": limit,
        "ALPHA": alpha,
        "BLOCK_ROWS": 2048 // block_columns,
        "BLOCK_COLUMNS": block_columns,
    }  # fmt: skip


def top_k(call, scores, topk: int):
    """[int32 [rows, topk], the columns of the highest scores, highest first, of equals the lower column].

    Args:
      scores: float32 [rows, columns]; a NaN counts as infinity. XLA sorts more columns than MAX_COLUMNS.
    """
    num_rows, columns = scores.shape
    if columns > MAX_COLUMNS:
        return xla_layer.top_k(scores, topk)
    block_columns = _power_of_2(columns)
    block_rows = max(1, 2048 // block_columns)
    launch = Launch(
        operands={"scores": scores, "num_rows": num_rows},
        outputs={"indices": jax.ShapeDtypeStruct((num_rows, topk), jnp.int32)},
        constants={"COLUMNS": columns, "TOPK": topk, "BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": block_columns},
        grid=(math.ceil(num_rows / block_rows),),
        bytes_accessed=4 * (scores.size + num_rows * topk),
    )
    return [call("top_k_kernel", launch)["indices"]]


def sort(call, experts, num_experts: int):
    """[int32 [E] rows of each expert, int32 [M] the row at each place in expert order], as `jgg.sort_by_expert`.

    Args:
      experts: int32 [M].
      num_experts: E; XLA sorts by more than MAX_COLUMNS, and by none.
    """
    if not 0 < num_experts <= MAX_COLUMNS:
        return xla_layer.sort(experts, num_experts)
    num_rows = len(experts)
    block_experts = _power_of_2(num_experts)
    block_rows = min(256, _ELEMENTS // block_experts)
    steps = math.ceil(num_rows / (_MAX_PROGRAMS * block_rows))
    programs = math.ceil(num_rows / (steps * block_rows))
    blocks = {"NUM_EXPERTS": num_experts, "STEPS": steps, "BLOCK_ROWS": block_rows, "BLOCK_EXPERTS": block_experts}
    per_program = jax.ShapeDtypeStruct((programs, num_experts), jnp.int32)
    per_expert = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
    counted = Launch(
        operands={"experts": experts, "num_rows": num_rows},
        outputs={"counts": per_program},
        constants=blocks,
        grid=(programs,),
        num_warps=8,  # with 4 they spill registers
        bytes_accessed=4 * (num_rows + per_program.size),
    )
    counts = call("count_experts_kernel", counted)["counts"]
    summed = Launch(
        operands={"counts": counts, "num_programs": programs},
        outputs={"rows_before": per_program, "group_sizes": per_expert},
        constants={"NUM_EXPERTS": num_experts, "BLOCK_PROGRAMS": _power_of_2(programs), "BLOCK_EXPERTS": 16},
        grid=(math.ceil(num_experts / 16),),
        num_warps=8,
        bytes_accessed=8 * per_program.size,
    )
    sums = call("sum_counts_kernel", summed)
    placed = Launch(
        operands={"experts": experts, **sums, "num_rows": num_rows},
        outputs={"gather_indices": jax.ShapeDtypeStruct((num_rows,), jnp.int32)},
        constants=blocks,
        grid=(programs,),
        num_warps=8,
        bytes_accessed=4 * (2 * num_rows + per_program.size),
    )
    return [sums["group_sizes"], call("place_rows_kernel", placed)["gather_indices"]]


def _power_of_2(count):
    """The least power of two that is at least count and 16."""
    return max(16, 1 << (count - 1).bit_length())
