"""Reports what `benchmarks.layers` measured: a table and notes for the terminal, and a JSON file."""

import dataclasses
import json

from benchmarks.layer import PASSES
from jgg.cli.console import number, print_table
from jgg.cli.info import devices, origin
from jgg.measuring.timing import RIGHT
from jgg.measuring.workloads import FP8

_FLAX = "nnx.MoE, float32 parameters"
_HEADINGS = ("layer", "T, H, I, E, k", "pass", "ms", "TF/s", "% of dense", "dense", f"{_FLAX}, ms")


def show(rows, interrupted: bool) -> None:
    """Prints the device, a table, and notes on each layer."""
    problem = rows[0].problem
    recipe = " with experts in FP8" if problem.quantization else ""
    print(f"{devices()[0].kind}, {problem.dtype}{recipe}, w {problem.w_layout}; speeds without a unit are TF/s")
    cells = [_cells(row, which) for row in rows for which in row.passes]
    print_table(_HEADINGS, cells, _HEADINGS[:3])
    for row in rows:
        print(*_notes(row), sep="\n")
    if interrupted:
        print("Interrupted: not everything was measured")


def _cells(row, which):
    layer = row.problem.layer
    dense, percent = row.dense_seconds.get(which), row.percent_of_dense(which)
    return (
        layer.name,
        ", ".join(map(str, dataclasses.astuple(layer)[1:])),
        which,
        _milliseconds(row.passes[which]),
        number(row.tflops(which)),
        "-" if percent is None else f"{percent:.1f}",
        number(dense and row.problem.flops(which) / dense / 1e12),
        _milliseconds(row.in_flax[which]) if which in row.in_flax else "-",
    )


def _milliseconds(measurement):
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
    for kind, passes in (("", row.passes), (f" {_FLAX}", row.in_flax)):
        for which, measurement in passes.items():
            if measurement.status != RIGHT:
                of = f" ({measurement.variant})" if measurement.variant else ""
                yield f"{name}{kind} {which}: {measurement}{of}"


def _megabytes(count):
    return f"{number(count / 1e6)} MB"


def as_json(rows, args, interrupted: bool) -> str:
    """The text of the JSON file."""
    settings = {name: value for name, value in vars(args).items() if name != "parser"}
    content = origin() | {
        "settings": settings,
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
        "passes": {which: measurement.as_json() for which, measurement in row.passes.items()},
        "in_flax": {which: measurement.as_json() for which, measurement in row.in_flax.items()},
        "flops": {which: problem.flops(which) for which in PASSES},
        "tflops": {which: row.tflops(which) for which in PASSES},
        "dense_tflops": {which: problem.flops(which) / dense / 1e12 for which, dense in row.dense_seconds.items()},
        "percent_of_dense": {which: row.percent_of_dense(which) for which in PASSES},
        "memory_limit": problem.memory_limit,
    }
