"""The choice of a configuration: the one given, else the nearest that was measured, else the heuristic's."""

import dataclasses
import functools
import logging
import math
from typing import Any

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem
from jgg.launching import tuned_files
from jgg.launching.heuristic import heuristic_config
from jgg.launching.kernel_configs import KernelConfig, KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.launching.requirements import can_run, why_not
from jgg.launching.tiles import OF_GPU, TILES
from jgg.launching.tuned_files import Entry

_logger = logging.getLogger("jgg")


def choose_config[Kind: (KernelConfigForward, KernelConfigDX, KernelConfigDW)](
    kind: type[Kind], problem: GroupedGemmProblem, target: Target, given: Kind | None = None
) -> Kind:
    """The configuration given, else the nearest tuned one that can run, else the heuristic's.

    The heuristic also replaces a given configuration whose kernel cannot run here. Files are read at trace time.
    """
    chosen: Any = given
    if given is None:
        chosen = _tuned_config(kind, problem, target) or heuristic_config(kind, problem, target)
    elif given.kernel != "plain" and (reason := why_not(given.kernel, kind, problem, target)) is not None:
        _logger.info("The %s kernel is not used for this %s: %s", given.kernel, kind.op, reason)
        chosen = heuristic_config(kind, problem, target)
    return chosen


def tiles_of(kernel: str, target: Target) -> dict[str, int]:
    """The tiles of a kernel of `tiles.TILES`: the table's for the GPU, or in their place those of a tuned file."""
    tiles = TILES[kernel] | OF_GPU.get(target.compute_capability, {}).get(kernel, {})
    for path in (*tuned_files.shipped_files(), tuned_files.user_file()):
        tiles |= tuned_files.load(path).tiles.get(str(target.compute_capability), {}).get(kernel, {})
    return tiles


def _tuned_config(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> KernelConfig | None:
    entry = find(kind, problem, target)
    if entry is None and target.has_tma and problem.dtype.itemsize <= 2:  # all that tuned files cover
        _log_miss(kind.op, problem)
    return None if entry is None else entry.config


def find(kind: type[KernelConfig], problem: GroupedGemmProblem, target: Target) -> Entry | None:
    """The tuned entry nearest to a problem, from the user's file or else from those that come with jgg, or None.

    An entry must be for the same product with the same options, compute capability and size of dtype. Its K, N and rows
    per expert may each differ by at most a factor of two, and its configuration must be able to run. An entry for the
    other layout of w serves too, as if it were half a doubling further away; dW's tiles are transposed with dw.

    In FP8 it must also have the heuristic's kernel: two kernels do not give a sum the same bits, and only one of them
    makes hidden features of sums that were not rounded.
    """
    if problem.is_dense:  # one group has far fewer tiles than the layers that were measured
        return None
    kernel = heuristic_config(kind, problem, target).kernel if problem.is_quantized else None
    for path in (tuned_files.user_file(), *tuned_files.shipped_files()):
        near = [
            entry
            for entry in tuned_files.load(path).entries
            if entry.compute_capability == target.compute_capability
            and type(entry.config) is kind
            and kernel in (None, entry.config.kernel)
            and _options(kind, entry.problem) == _options(kind, problem)
            and max(_distances(entry.problem, problem)[:3]) <= 1
        ]
        for entry in sorted(near, key=functools.partial(_remoteness, problem, target)):
            entry = _in_layout(problem.w_layout, entry)
            if can_run(problem, target, entry.config):
                return entry
    return None


def _remoteness(problem: GroupedGemmProblem, target: Target, entry: Entry) -> tuple[float, bool]:
    """The key that sorts the nearest entry first: the distance, then whether it was measured on another device."""
    is_transposed = entry.problem.w_layout != problem.w_layout
    return sum(_distances(entry.problem, problem)) + is_transposed / 2, entry.device != target.name


def _in_layout(w_layout: str, entry: Entry) -> Entry:
    """The entry as one for weights in `w_layout`; dW's tiles are transposed, because dw is stored as w is."""
    if entry.problem.w_layout == w_layout:
        return entry
    config = entry.config.with_tile(entry.config.tile(entry.problem.w_layout), w_layout)
    return dataclasses.replace(entry, problem=dataclasses.replace(entry.problem, w_layout=w_layout), config=config)


def _options(kind: type[KernelConfig], problem: GroupedGemmProblem) -> tuple[object, ...]:
    """The options that an entry must share with a problem; precision matters to float32 alone, and dX has no bias."""
    precision = problem.precision if problem.dtype.itemsize == 4 else None
    return (
        problem.dtype.itemsize,
        precision,
        problem.rows_are_aligned,
        problem.permute_x,
        problem.permute_y,
        problem.has_topk_weights,
        problem.has_bias and kind is not KernelConfigDX,
    )


def _distances(one: GroupedGemmProblem, other: GroupedGemmProblem) -> list[float]:
    """How far apart K, N, rows per expert and E are, in doublings."""
    return [
        abs(math.log2(a / b))
        for a, b in (
            (one.in_features, other.in_features),
            (one.out_features, other.out_features),
            (one.rows_of_groups / one.num_experts, other.rows_of_groups / other.num_experts),
            (one.num_experts, other.num_experts),
        )
    ]


@functools.cache
def _log_miss(op: str, problem: GroupedGemmProblem) -> None:
    _logger.info(
        "No tuned configuration is near this %s; the heuristic chose one. To tune it on the GPU: %s",
        op,
        tune_command(op, problem),
    )


def tune_command(op: str, problem: GroupedGemmProblem) -> str:
    """The command line that tunes one product of a problem."""
    sizes: dict[str, int | str] = {
        "m": problem.rows_of_groups,
        "k": problem.in_features,
        "n": problem.out_features,
        "experts": problem.num_experts,
    }
    dtype = "fp8" if problem.is_quantized else problem.dtype.name
    sizes |= {"topk": problem.topk, "op": op, "dtype": dtype, "w-layout": problem.w_layout}
    flags = {
        "permute-x": problem.permute_x,
        "permute-y": problem.permute_y,
        "weighted": problem.has_topk_weights,
        "biased": problem.has_bias,
    }
    words = [f"--{name} {value}" for name, value in sizes.items()]
    return " ".join(["jgg tune", *words, *(f"--{name}" for name, is_set in flags.items() if is_set)])
