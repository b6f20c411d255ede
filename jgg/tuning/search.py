"""The search for fast configurations on the GPU at hand, outside jit: candidates, checks, times, entries in a file."""

import dataclasses
import datetime
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from jax.typing import DTypeLike

from jgg.core.arguments import as_dtype, as_flag, as_int, check_one_of
from jgg.core.choices import OPS, W_LAYOUTS
from jgg.core.files import warn_once
from jgg.core.gpu_target import Target, current_target, device_target
from jgg.core.problem import DTYPES, GroupedGemmProblem
from jgg.core.quantized import QUANTIZED_DTYPE
from jgg.core.versions import __version__
from jgg.launching.heuristic import heuristic_config, plain_config, trial_configs
from jgg.launching.kernel_configs import CONFIG_TYPES, KernelConfig, KernelConfigDW, Tile
from jgg.launching.requirements import shared_memory
from jgg.launching.tuned_files import Entry, merge, parse, user_file
from jgg.tuning.timing import Reference, measure, product
from jgg.tuning.workloads import Arrays, gemm, operands

_logger = logging.getLogger("jgg")

# Output tiles (rows, columns), warps, stages and programs per multiprocessor worth trying in addition to the
# heuristic's. kernels/trials.md has what each of them achieved.
_TILES: tuple[tuple[int, int, int, int, int], ...] = (
    (128, 256, 8, 4, 1),
    (128, 256, 8, 3, 1),
    (128, 128, 8, 4, 1),
    (128, 128, 4, 3, 2),
    (256, 128, 8, 3, 1),
    (64, 256, 4, 4, 1),
    (64, 128, 4, 4, 2),
)
# In FP8 a step's products take as many registers as a tile's sums, so tiles are smaller.
_TILES_FP8 = (
    (128, 128, 8, 4, 1),
    (128, 128, 8, 2, 1),
    (128, 64, 4, 3, 1),
    (64, 128, 4, 4, 1),
    (64, 128, 4, 2, 2),
)
# Where a kernel for the GPU's generation is tried, few tiles of the plain kernel are worth a trial.
_TILES_BESIDE = ((128, 128, 4, 3, 2),)
_BANDS = (2, 4, 16)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One configuration tried.

    Attributes:
      milliseconds: the time of one call, or None if the trial failed.
      failure: why the configuration was not timed: it does not compile, does not fit, or gave a wrong result.
    """

    config: KernelConfig
    milliseconds: float | None = None
    failure: str | None = None


def tune(
    num_rows: int,
    in_features: int,
    out_features: int,
    num_experts: int,
    topk: int = 1,
    *,
    ops: Iterable[str] | None = None,
    dtype: DTypeLike = "bfloat16",
    w_layout: str = "enk",
    permute_x: bool = False,
    permute_y: bool = False,
    weighted: bool = False,
    biased: bool = False,
    out: str | Path | None = None,
) -> list[Entry]:
    """Finds fast kernel configurations for a grouped GEMM on the GPU at hand and writes them to a file.

    Programs traced later use these configurations for this problem and for problems of similar size, on any GPU of the
    same compute capability. It runs kernels, so call it outside `jit`. Each configuration's result is checked before it
    is timed, on uneven random groups.

    Args:
      num_rows: M, routed rows.
      in_features, out_features: K, N.
      num_experts: E.
      topk: k, experts per token.
      ops: any of "forward", "dx", "dw"; by default all.
      dtype, w_layout, permute_x, permute_y: as in `grouped_gemm`. float8_e4m3fn stands for quantized x and w: only
        "forward" with "enk" is tuned, because dX is the forward product with K and N exchanged, and dW is not made in
        FP8.
      weighted, biased: whether topk_weights and bias are used.
      out: output file; by default $JGG_TUNED, else tuned.json in the platform's cache folder. jgg reads this default
        file automatically; it reads another only when $JGG_TUNED names it.

    Returns: an entry for each op, also merged into the file.

    Raises:
      RuntimeError: there is no CUDA device that the kernels run on, or no configuration works.
      OSError: the file can no longer be written as the search ends.
      ValueError: an option is none of those listed, or the file is damaged or cannot be written.
      TypeError: a size is no int, or the dtype is unsupported.
    """
    sizes = {
        "num_rows": num_rows,
        "in_features": in_features,
        "out_features": out_features,
        "num_experts": num_experts,
        "topk": topk,
    }
    flags = {"permute_x": permute_x, "permute_y": permute_y, "weighted": weighted, "biased": biased}
    dtype = as_dtype("dtype", dtype, (*DTYPES, QUANTIZED_DTYPE))
    check_one_of("w_layout", w_layout, W_LAYOUTS[:1] if dtype == QUANTIZED_DTYPE else W_LAYOUTS)
    problem = gemm(
        dtype=dtype,
        w_layout=w_layout,
        **{name: as_int(name, size, least=1) for name, size in sizes.items()},
        **{name: as_flag(name, flag) for name, flag in flags.items()},
    )
    ops = ops_of(problem) if ops is None else _names_of_ops(ops, problem)
    if device_target() is None:
        raise RuntimeError("jgg.tune needs a CUDA device: see jgg info")
    path = output_file(out)
    return [tune_op(op, problem, path) for op in ops]


def output_file(named: str | Path | None) -> Path:
    """The file that results go into: the one named, else the user's. It is checked before anything is measured.

    Raises: ValueError: there is no folder for such a file, or the file is damaged or cannot be written.
    """
    path = Path(named) if named else user_file()
    if path is None:
        raise ValueError("out must be a file where there is no folder for caches: set it, $JGG_TUNED or $HOME.")
    if os.path.exists(path):
        parse(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"out must be in a folder that can be written to, got {path}: {error}") from error
    return path


def ops_of(problem: GroupedGemmProblem) -> tuple[str, ...]:
    """The products of a problem that can be tuned."""
    return OPS[:1] if problem.is_quantized else OPS


def _names_of_ops(ops: Iterable[str], problem: GroupedGemmProblem) -> tuple[str, ...]:
    try:
        names = (ops,) if isinstance(ops, str) else tuple(ops)
    except TypeError:
        raise TypeError(f"ops must be several of {OPS}, got {ops!r}.") from None
    for name in names:
        check_one_of("ops", name, ops_of(problem))
    return names


def tune_op(
    op: str,
    problem: GroupedGemmProblem,
    out: Path,
    implementation: str = "triton",
    report: Callable[[Trial], None] = lambda trial: None,
    lock: AbstractContextManager[None] = nullcontext(),  # noqa: B008
) -> Entry:
    """Searches for one op; each new best goes into the file at once, so that an interrupt loses nothing.

    If the file cannot be written, the search goes on. At its end it tries once more and raises OSError.

    Args:
      implementation: "interpret" runs the search without a GPU; no GPU uses the entries that it writes.
      report: called with each trial.
      lock: held while the GPU or the file is used, so that several processes can search at once.
    """
    target = current_target()
    with lock:
        arrays = operands(problem)
    reference = Reference.of(op, problem, arrays, lock)
    best: Entry | None = None
    failure: str | None = None

    def attempt(config: KernelConfig) -> None:
        nonlocal best, failure
        trial = _try(op, problem, config, arrays, reference, implementation, lock)
        report(trial)
        if trial.milliseconds is None:
            failure = trial.failure
            _logger.info("tuning %s: %s is out: %s", op, config, failure)
        elif best is None or trial.milliseconds < best.milliseconds:
            best = _entry(problem, config, trial.milliseconds, target, implementation)
            try:
                with lock:
                    merge(out, best, keep_faster=True)
            except OSError as error:
                reason = error.strerror or error
                warn_once(f"{out} could not be written, which is tried again as the search ends: {reason}")

    for config in first_candidates(op, problem, target):
        attempt(config)
    if best is None:
        raise RuntimeError(f"No configuration of {op} works for {problem}: {failure}")
    for config in second_candidates(op, problem, best.config):
        attempt(config)
    with lock:
        merge(out, best)
    return best


def first_candidates(op: str, problem: GroupedGemmProblem, target: Target) -> list[KernelConfig]:
    """The heuristic's configuration, and others whose tiles fit the device and are not too large for the problem."""
    kind = CONFIG_TYPES[op]
    chosen, base = heuristic_config(kind, problem, target), plain_config(kind, problem, target)
    trials = trial_configs(kind, problem, target)
    configs = [chosen, *(dataclasses.replace(config, fuse_gather=chosen.fuse_gather) for config in trials)]
    if problem.is_quantized and chosen.kernel != base.kernel:  # then an entry for the other would not be used
        return list(dict.fromkeys(configs))
    configs.append(base)
    tiles = _TILES_FP8 if problem.is_quantized else _TILES_BESIDE if trials else _TILES
    for rows, columns, num_warps, num_stages, programs_per_sm in tiles:
        tile = Tile(rows, columns, base.tile(problem.w_layout).step)
        options = {"num_warps": num_warps, "num_stages": num_stages, "programs_per_sm": programs_per_sm}
        config = base.with_tile(tile, problem.w_layout, **options)
        if _is_sensible(problem, config, base, target):
            configs.append(config)
    return list(dict.fromkeys(configs))


def second_candidates(op: str, problem: GroupedGemmProblem, best: KernelConfig) -> Iterator[KernelConfig]:
    """The best configuration so far with other bands, and with rows gathered the other way."""
    for band in _BANDS:
        yield dataclasses.replace(best, band=band)
    gathers = {"forward": problem.permute_x, "dx": problem.permute_y, "dw": problem.permute_x or problem.permute_y}
    if gathers[op]:
        yield dataclasses.replace(best, fuse_gather=not best.fuse_gather)


def _is_sensible(problem: GroupedGemmProblem, config: KernelConfig, base: KernelConfig, target: Target) -> bool:
    """Whether a tile fits shared memory and registers, is no wider than its axis and no taller than the groups."""
    rows, columns, _ = config.tile(problem.w_layout)
    num_rows, num_columns, _ = config.sizes(problem)
    if not isinstance(config, KernelConfigDW):
        num_rows = base.block_m  # the heuristic's tiles are as tall as the groups have rows
        if rows > num_rows * 2:
            return False
    memory = config.programs_per_sm * shared_memory(problem, target, config)
    accumulators = rows * columns // (32 * config.num_warps)
    fits_axes = rows <= max(128, num_rows) and columns <= max(128, num_columns)
    return fits_axes and memory <= target.shared_memory and accumulators <= 128


def _try(
    op: str,
    problem: GroupedGemmProblem,
    config: KernelConfig,
    arrays: Arrays,
    reference: Reference,
    implementation: str,
    lock: AbstractContextManager[None],
) -> Trial:
    # an interpreted kernel is run once: its time says nothing
    max_calls = {"max_calls": 1} if implementation == "interpret" else {}
    function = product(op, problem, implementation, config)
    try:
        timing = measure(function, arrays, problem.flops, problem.bytes_accessed(op), lock=lock, **max_calls)
    except Exception as error:  # whatever a compiler or a driver may raise
        return Trial(config, failure=f"{type(error).__name__}: {str(error).partition('\n')[0]}")
    with lock:
        distance = reference.error(timing.result)
    if not distance <= reference.bound:
        return Trial(config, failure=f"error {distance:.1e}, allowed {reference.bound:.1e}")
    return Trial(config, milliseconds=1e3 * timing.seconds)


def _entry(
    problem: GroupedGemmProblem, config: KernelConfig, milliseconds: float, target: Target, implementation: str
) -> Entry:
    versions = {package: importlib.metadata.version(package) for package in ("jax", "jax-triton", "triton")}
    is_real = implementation == "triton"
    return Entry(
        problem=problem,
        config=config,
        milliseconds=milliseconds,
        device=target.name if is_real else "interpreter",
        compute_capability=target.compute_capability if is_real else 0,
        versions={"jgg": __version__} | versions,
        date=datetime.date.today().isoformat(),
    )
