"""Reports a run of `jgg bench`: tables for the terminal and a JSON file."""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from jgg.cli.bench_layer import LayerRow
from jgg.cli.bench_run import BOUNDS, Result, Row
from jgg.cli.console import number, print_table
from jgg.cli.machine import devices, origin
from jgg.files import replace_text
from jgg.measuring.layer import PASSES
from jgg.measuring.measurement import DENSE, JGG, RIGHT, UNSUPPORTED

_TEXTS = ("GEMM", "M, K, N, E", "layer", "T, H, I, E, k", "op", "pass", "peer", "smallest of")  # columns that are words


def show(result: Result) -> None:
    """Prints conditions, tables, what was not right, and ratios."""
    print(header(result))
    if result.rows:
        others = [*BOUNDS.values(), *result.peers]
        headings = ("GEMM", "M, K, N, E", "op", "ms", "TF/s", "GB/s", "% of dense", *others)
        print_table(headings, [_cells(row, others) for row in result.rows], _TEXTS)
    for line in _not_right(result):
        print(line)
    compared = [
        (op, peer, f"{each['geometric_mean']:.3f}", f"{each['smallest']:.3f}", each["smallest_of"], each["gemms"])
        for op, by_peer in _ratios(result).items()
        for peer, each in by_peer.items()
    ]
    if compared:
        print("jgg's speed over each peer's:")
        print_table(("op", "peer", "geometric mean", "smallest", "smallest of", "GEMMs"), compared, _TEXTS)
    if result.layers:
        headings = ("layer", "T, H, I, E, k", "pass", "ms", "TF/s", "% of dense", "dense")
        print_table(headings, [_layer_cells(row, which) for row in result.layers for which in row.passes], _TEXTS)
    for row in result.layers:
        print(*_layer_notes(row), sep="\n")
    if result.interrupted:
        print("Interrupted: not everything was measured")


def header(result: Result) -> str:
    """Where and how it was measured, and which peers were not."""
    settings = result.settings
    lines = [
        f"{devices()[0].kind}, {settings.dtype}, {settings.groups} groups, w {settings.w_layout},"
        f" implementation {settings.implementation or 'by default'}; speeds without a unit are TF/s"
    ]
    if settings.scaled_down:
        lines.append("scaled down: no GPU; layers have at most 256 tokens, 1/16 of their features and 16 experts")
    if result.copy_bandwidth is not None:
        lines.append(f"Plain copy on the device: {number(result.copy_bandwidth / 1e9)} GB/s, read and written")
    lines += [f"Skipped {name}: {reason}" for name, reason in result.skipped.items()]
    return "\n".join(lines)


def _cells(row, others):
    problem, values = row.problem, _numbers(row, JGG)
    sizes = (problem.num_rows, problem.in_features, problem.out_features, problem.num_experts)
    return (
        f"{row.layer} {row.gemm}", ", ".join(map(str, sizes)), row.op,
        _cell(row.measurements.get(JGG), values["milliseconds"]), number(values["tflops"]),
        number(values["gbytes_per_second"]), _percent(values["percent_of_dense"]),
        *(_cell(row.measurements.get(name), row.tflops(name)) for name in others),
    )  # fmt: skip


def _cell(measurement, value):
    if measurement is None or measurement.status == UNSUPPORTED:
        return "-"
    return number(value) if measurement.status == RIGHT else measurement.status


def _percent(value):
    return "-" if value is None else f"{value:.1f}"


def _not_right(result):
    """A line for each product that is wrong, failed or unsupported; the same reason for many GEMMs once."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in result.rows:
        for name, measurement in row.measurements.items():
            if measurement.status != RIGHT:
                of = row.op if measurement.status == UNSUPPORTED else f"{row.layer} {row.gemm} {row.op}"
                reasons.setdefault((name, str(measurement)), {})[of] = None
    return [f"{name}, {'; '.join(where)}: {what}" for (name, what), where in reasons.items()]


def ratios(rows: list[Row], ops, names) -> dict[str, dict[str, dict]]:
    """By op and name, how many times as fast as `name` jgg is: geometric mean, smallest, and how many GEMMs."""
    found: dict[str, dict[str, dict]] = {}
    for op in ops:
        for name in names:
            of_op = [(row.ratio(name), row) for row in rows if row.op == op]
            measured = [(ratio, row) for ratio, row in of_op if ratio is not None]
            if measured:
                smallest, row = min(measured, key=lambda pair: pair[0])
                found.setdefault(op, {})[name] = {
                    "geometric_mean": statistics.geometric_mean(ratio for ratio, _ in measured),
                    "smallest": smallest,
                    "smallest_of": f"{row.layer} {row.gemm}",
                    "gemms": len(measured),
                }
    return found


def _ratios(result):
    return ratios(result.rows, result.settings.ops, sorted(result.peers, key=lambda name: name != DENSE))


def _layer_cells(row, which):
    layer, measurement = row.problem.layer, row.passes[which]
    sizes = layer.tokens, layer.hidden, layer.expert_intermediate, layer.experts, layer.topk
    milliseconds = measurement.seconds and measurement.seconds * 1e3
    return (
        layer.name, ", ".join(map(str, sizes)), which, _cell(measurement, milliseconds), number(row.tflops(which)),
        _percent(row.percent_of_dense(which)), number(row.dense_tflops(which)),
    )  # fmt: skip


def _layer_notes(row: LayerRow) -> Iterator[str]:
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
    for which, measurement in row.passes.items():
        if measurement.status != RIGHT:
            yield f"{name} {which}: {measurement}" + (f" ({measurement.variant})" if measurement.variant else "")


def _megabytes(count):
    return f"{number(count / 1e6)} MB"


def write_json(result: Result) -> Path:
    """Writes the JSON file and returns its path."""
    return replace_text(Path(f"{result.settings.out}.json"), json.dumps(as_json(result), indent=2) + "\n")


def as_json(result: Result) -> dict:
    """The result with the command, the versions and the device that it is from."""
    return origin() | {
        "settings": dataclasses.asdict(result.settings),
        "copy_bytes_per_second": result.copy_bandwidth,
        "peers": result.peers,
        "skipped": result.skipped,
        "interrupted": result.interrupted,
        "ratios": _ratios(result),
        "rows": [_row_as_json(row) for row in result.rows],
        "layers": [_layer_as_json(row) for row in result.layers],
    }


def _row_as_json(row):
    problem = row.problem
    sizes = ("num_rows", "in_features", "out_features", "num_experts", "topk")
    return {
        **{name: getattr(row, name) for name in ("layer", "gemm", "op")},
        **{name: getattr(problem, name) for name in sizes},
        "dtype": problem.dtype.name,
        "flops": problem.flops,
        "bytes": problem.bytes_accessed,
        "flops_per_byte": problem.flops / problem.bytes_accessed,
        "measurements": {
            name: _finite(dataclasses.asdict(measurement)) | _numbers(row, name)
            for name, measurement in row.measurements.items()
        },
    }


def _layer_as_json(row):
    numbers = {
        "flops": row.problem.flops,
        "tflops": row.tflops,
        "dense_tflops": row.dense_tflops,
        "percent_of_dense": row.percent_of_dense,
    }
    by_pass = {name: {which: value(which) for which in PASSES} for name, value in numbers.items()}
    return dataclasses.asdict(row) | by_pass | {"memory_limit": row.problem.memory_limit}


def _numbers(row, name):
    """What follows from the seconds of a call; None where there is no right one."""
    seconds, dense = row.seconds(name), row.seconds(DENSE)
    return {
        "milliseconds": seconds and seconds * 1e3,
        "tflops": row.tflops(name),
        "gbytes_per_second": seconds and row.problem.bytes_accessed / seconds / 1e9,
        "percent_of_dense": 100 * dense / seconds if seconds and dense else None,
    }


def _finite(values):
    """NaN and infinity as text, which JSON can hold."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
