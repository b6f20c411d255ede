"""Reports what `benchmarks.layers` measured: a table and notes for the terminal, and a JSON file."""

import dataclasses
import json

from benchmarks.layer import PASSES
from jgg.cli.console import number, print_table
from jgg.cli.info import devices, origin
from jgg.core.choices import FP8
from jgg.tuning.timing import RIGHT

_FLAX = "nnx.MoE, float32 parameters"
_TEXTS = ("layer", "T, H, I, E, k", "pass")
_HEADINGS = (*_TEXTS, "ms", "TF/s", "% of\ndense", "% of\nroofline", "dense")
_PASSES = dict(zip(PASSES, ("forward", "+ backward"), strict=True))


def show(rows, skipped: dict[str, str], interrupted: bool) -> None:
    """Prints the device, tables, why peers were skipped, and notes on each layer."""
    problem = rows[0].problem
    recipe = " with experts in FP8" if problem.quantization else ""
    print(f"{devices()[0].kind}, {problem.dtype}{recipe}, w {problem.w_layout}; speeds without a unit are TF/s")
    if rows[0].copy_bandwidth is not None:
        print(f"Plain copy on the device: {number(rows[0].copy_bandwidth / 1e9)} GB/s, read and written")
    print(*(f"Skipped {name}: {reason}\n" for name, reason in skipped.items()), sep="", end="")
    print_table(_HEADINGS, [_cells(row, which) for row in rows for which in row.passes], _TEXTS)
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    print("The same layer by others, ms:")
    headings = ("layer", "pass", "jgg", "nnx.MoE,\nfloat32", "% of\nroofline", *peers)
    print_table(headings, [_cells_of_others(row, which, peers) for row in rows for which in row.passes], _TEXTS)
    for row in rows:
        print(*_notes(row), sep="\n")
    if interrupted:
        print("Interrupted: not everything was measured")


def _cells(row, which):
    layer, dense = row.problem.layer, row.dense_seconds.get(which)
    return (
        layer.name,
        ", ".join(map(str, dataclasses.astuple(layer)[1:])),
        _PASSES[which],
        _milliseconds(row.passes, which),
        number(row.tflops(which)),
        _percent(row.percent_of_dense(which)),
        _percent(row.percent_of_roofline(which)),
        number(dense and row.problem.flops(which) / dense / 1e12),
    )


def _cells_of_others(row, which, peers):
    return (
        row.problem.layer.name,
        _PASSES[which],
        _milliseconds(row.passes, which),
        _milliseconds(row.in_flax, which),
        _percent(row.percent_of_roofline(which, "in_flax")),
        *(_milliseconds(row.peers.get(name, {}), which) for name in peers),
    )


def _percent(value):
    return "-" if value is None else f"{value:.1f}"


def _milliseconds(passes, which):
    if which not in passes:
        return "-"
    measurement = passes[which]
    return number(measurement.seconds * 1e3) if measurement.status == RIGHT else measurement.status


def _notes(row):
    """A line on the layer's routing, one on its memory, and one for whatever was not right."""
    name = row.problem.layer.name
    if row.route_seconds is not None and row.group_sizes is not None:
        fewest, median, most = row.group_sizes
        yield (
            f"{name}: routing and sorting {number(row.route_seconds * 1e6)} us;"
            f" rows of an expert {fewest} to {most}, median {median}"
        )
    if row.memory is not None:
        memory, limit = row.memory, row.problem.memory_limit
        peak = "" if memory.peak_in_use is None else f"; in use at most {_megabytes(memory.peak_in_use)}"
        yield (
            f"{name}: forward + backward takes {_megabytes(memory.total)} (arguments {_megabytes(memory.arguments)},"
            f" results {_megabytes(memory.results)}, temporaries {_megabytes(memory.temporaries)}{peak}),"
            f" {100 * memory.total / limit:.0f}% of the {_megabytes(limit)} aimed at"
        )
    for what, reason in row.failures.items():
        yield f"{name} {what}: failed: {reason}"
    peers = [(f" {name}", passes) for name, passes in row.peers.items()]
    for kind, passes in (("", row.passes), (f" {_FLAX}", row.in_flax), *peers):
        for which, measurement in passes.items():
            if measurement.status != RIGHT:
                of = f" ({measurement.variant})" if measurement.variant else ""
                yield f"{name}{kind} {which}: {measurement}{of}"


def _megabytes(count):
    return f"{number(count / 1e6)} MB"


def as_json(rows, args, skipped: dict[str, str], interrupted: bool) -> str:
    """The text of the JSON file."""
    settings = {name: value for name, value in vars(args).items() if name != "parser"}
    content = origin() | {
        "settings": settings,
        "skipped": skipped,
        "interrupted": interrupted,
        "layers": [_row_as_json(row) for row in rows],
    }
    return json.dumps(content, indent=2) + "\n"


def _row_as_json(row):
    problem = row.problem
    return {
        **{field.name: getattr(row, field.name) for field in dataclasses.fields(row)},
        "problem": dataclasses.asdict(problem) | {"quantization": problem.quantization and FP8},
        "memory": row.memory and dataclasses.asdict(row.memory),
        "passes": _passes_as_json(row.passes),
        "in_flax": _passes_as_json(row.in_flax),
        "peers": {name: _passes_as_json(passes) for name, passes in row.peers.items()},
        "flops": {which: problem.flops(which) for which in PASSES},
        "tflops": {which: row.tflops(which) for which in PASSES},
        "dense_tflops": {which: problem.flops(which) / dense / 1e12 for which, dense in row.dense_seconds.items()},
        "percent_of_dense": {which: row.percent_of_dense(which) for which in PASSES},
        "percent_of_roofline": {which: row.percent_of_roofline(which) for which in PASSES},
        "percent_of_roofline_in_flax": {which: row.percent_of_roofline(which, "in_flax") for which in PASSES},
        "memory_limit": problem.memory_limit,
    }


def _passes_as_json(passes):
    return {which: measurement.as_json() for which, measurement in passes.items()}
