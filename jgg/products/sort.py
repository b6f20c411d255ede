"""Sorts choices of experts by expert, for `jgg.sort_by_expert`."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.launching.choice import Launcher
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import MAX_EXPERTS, Launch
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import ROWS, WHOLE, Letters

_FEW_ROWS = 256  # rows that one program sorts by comparing all with all, some at once


class Sort(NamedTuple):
    """The chosen experts, int32 [M]."""

    experts: jax.Array


class Sorted(NamedTuple):
    """The choices in expert order.

    Attributes:
      group_sizes: int32 [E], rows of each expert.
      gather_indices: int32 [M], the row at each place in expert order.
    """

    group_sizes: jax.Array
    gather_indices: jax.Array


def _result_types(operands: Sort, num_experts: int) -> Sorted:
    return Sorted(array_type((num_experts,), jnp.int32), array_type(operands.experts.shape, jnp.int32))


def _plain(operands: Sort, num_experts: int) -> Sorted:
    (experts,) = operands
    experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    gather_indices = jnp.argsort(experts, stable=True).astype(jnp.int32)
    return Sorted(jnp.zeros((num_experts,), jnp.int32).at[experts].add(1, mode="drop"), gather_indices)


def _launch(launcher: Launcher, operands: Sort, num_experts: int) -> Sorted:
    (experts,) = operands
    if not 0 < num_experts <= MAX_EXPERTS:
        return _plain(operands, num_experts)
    from jgg.kernels.routing import count_experts_kernel, place_rows_kernel, sort_few_kernel, sum_counts_kernel

    num_rows = len(experts)
    per_expert = jax.ShapeDtypeStruct((num_experts,), jnp.int32)
    per_row = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    if num_rows <= _FEW_ROWS:
        step = tiles_of("sort_few_kernel", launcher.target)["step"]
        sorted_at_once = Launch(
            operands={"experts": experts, "num_rows": num_rows},
            outputs={"group_sizes": per_expert, "gather_indices": per_row},
            constants={
                "NUM_EXPERTS": num_experts,
                "BLOCK_ROWS": max(step, power_of_2(num_rows)),
                "BLOCK_EXPERTS": power_of_2(num_experts),
                "STEP": step,
            },
            grid=(1,),
            bytes_accessed=8 * num_rows + 4 * num_experts,
        )
        return Sorted(**launcher.run(sort_few_kernel, sorted_at_once))
    tiles = tiles_of("place_rows_kernel", launcher.target)
    steps = math.ceil(num_rows / (tiles["programs"] * tiles["rows"]))
    programs = math.ceil(num_rows / (steps * tiles["rows"]))
    blocks = {
        "NUM_EXPERTS": num_experts,
        "STEPS": steps,
        "BLOCK_ROWS": tiles["rows"],
        "BLOCK_EXPERTS": power_of_2(num_experts),
    }
    per_program = jax.ShapeDtypeStruct((programs, num_experts), jnp.int32)
    counted = Launch(
        operands={"experts": experts, "num_rows": num_rows},
        outputs={"counts": per_program},
        constants=blocks,
        grid=(programs,),
        bytes_accessed=4 * (num_rows + per_program.size),
    )
    counts = launcher.run(count_experts_kernel, counted)["counts"]
    tiles = tiles_of("sum_counts_kernel", launcher.target)
    summed = Launch(
        operands={"counts": counts, "num_programs": programs},
        outputs={"rows_before": per_program, "group_sizes": per_expert},
        constants={
            "NUM_EXPERTS": num_experts,
            "BLOCK_PROGRAMS": power_of_2(programs),
            "BLOCK_EXPERTS": tiles["experts"],
        },
        grid=(math.ceil(num_experts / tiles["experts"]),),
        num_warps=tiles["warps"],
        bytes_accessed=8 * per_program.size,
    )
    sums = launcher.run(sum_counts_kernel, summed)
    placed = Launch(
        operands={"experts": experts, **sums, "num_rows": num_rows},
        outputs={"gather_indices": per_row},
        constants=blocks,
        grid=(programs,),
        bytes_accessed=4 * (2 * num_rows + per_program.size),
    )
    return Sorted(sums["group_sizes"], launcher.run(place_rows_kernel, placed)["gather_indices"])


SORT: Operation[Sorted] = Operation(
    "sort",
    Sort,
    result_types=_result_types,
    plain=_plain,
    launch=_launch,
    mesh=lambda operands, num_experts: Letters({"experts": ROWS}, (WHOLE, ROWS), ("", "")),
)
"""The choices in expert order, as Sorted; the parameter is E."""
