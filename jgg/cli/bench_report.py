"""Reports a run of `jgg bench`: tables for the terminal and a JSON file."""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator

from jgg.cli import options
from jgg.cli.bench_run import BOUNDS, JGG, LayerRow, Result, Row
from jgg.cli.console import number, print_table
from jgg.cli.info import devices, origin
from jgg.cli.options import FP8
from jgg.measuring.fp8 import BFLOAT16, QUANTIZE
from jgg.measuring.peers import DENSE
from jgg.measuring.timing import RIGHT, UNSUPPORTED

_TEXTS = ("GEMM", "M, K, N, E", "layer", "T, H, I, E, k", "op", "pass", "peer", "smallest of")  # columns that are words
_SIZES = ("num_rows", "in_features", "out_features", "num_experts", "topk")


def show(result: Result) -> None:
    """Prints conditions, tables, what was not right, and ratios."""
    print(header(result))
    names = [*BOUNDS.values(), *([BFLOAT16] if result.settings.is_fp8 else []), *result.peers]
    headings = ("GEMM", "M, K, N, E", "op", "ms", "TF/s", "GB/s", "% of dense", "% of roofline", *names)
    _print_rows(headings, result, result.rows)
    for line in _not_right(result):
        print(line)
    for row in result.rows:
        seconds = row.seconds(QUANTIZE)
        if seconds is not None:
            yours = row.seconds(JGG)
            share = "" if yours is None else f", {100 * seconds / yours:.0f}% of the product"
            print(f"{row.name} {row.op}: quantizing its rows takes {number(seconds * 1e6)} us{share}")
    compared = [
        (op, peer, f"{each['geometric_mean']:.3f}", f"{each['smallest']:.3f}", each["smallest_of"], each["gemms"])
        for op, by_peer in _ratios(result).items()
        for peer, each in by_peer.items()
    ]
    if compared:
        print("jgg's speed over each peer's:")
        print_table(("op", "peer", "geometric mean", "smallest", "smallest of", "GEMMs"), compared, _TEXTS)
    passes = [row for layer in result.layers for row in layer.passes if row.measurements]
    _print_rows(("layer", "T, H, I, E, k", "pass", "ms", "TF/s", "% of dense", DENSE), result, passes)
    for layer in result.layers:
        print(*_layer_notes(layer), sep="\n")
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
        lines.append(options.SCALED_DOWN)
    if result.copy_bandwidth is not None:
        lines.append(f"Plain copy on the device: {number(result.copy_bandwidth / 1e9)} GB/s, read and written")
    lines += [f"Skipped {name}: {reason}" for name, reason in result.skipped.items()]
    return "\n".join(lines)


def _print_rows(headings, result, rows):
    """Prints a table: name, sizes and op; then numbers of jgg's, by their headings, and the speeds of others."""
    if rows:
        print_table(headings, [_cells(result, row, headings[3:]) for row in rows], _TEXTS)


def _cells(result, row, headings):
    numbers = _numbers(result, row, JGG)
    percents = {heading: numbers[f"percent_of_{heading[5:]}"] for heading in ("% of dense", "% of roofline")}
    cells = {
        "ms": _cell(row, JGG, numbers["milliseconds"]),
        "TF/s": number(numbers["tflops"]),
        "GB/s": number(numbers["gbytes_per_second"]),
        **{heading: "-" if percent is None else f"{percent:.1f}" for heading, percent in percents.items()},
    }
    others = {name: _cell(row, name, row.tflops(name)) for name in headings if name not in cells}
    if row.gemm:
        sizes = tuple(getattr(row.problem, name) for name in _SIZES[:-1])
    else:
        sizes = dataclasses.astuple(row.problem.layer)[1:]
    return row.name, ", ".join(map(str, sizes)), row.op, *((cells | others)[heading] for heading in headings)


def _cell(row, name, value):
    measurement = row.measurements.get(name)
    if measurement is None or measurement.status == UNSUPPORTED:
        return "-"
    return number(value) if measurement.status == RIGHT else measurement.status


def _not_right(result):
    """A line for each product that is wrong, failed or unsupported; the same reason for many GEMMs once."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in result.rows:
        for name, measurement in row.measurements.items():
            if measurement.status != RIGHT:
                of = row.op if measurement.status == UNSUPPORTED else f"{row.name} {row.op}"
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
                    "smallest_of": row.name,
                    "gemms": len(measured),
                }
    return found


def _ratios(result):
    others = [*([BFLOAT16] if result.settings.is_fp8 else []), *result.peers]
    return ratios(result.rows, result.settings.ops, sorted(others, key=lambda name: name != DENSE))


def _layer_notes(layer: LayerRow) -> Iterator[str]:
    """A line on the layer's routing, one on its memory, and one for whatever was not right."""
    name = layer.problem.layer.name
    if layer.route_seconds is not None and layer.group_sizes is not None:
        fewest, median, most = layer.group_sizes
        yield (
            f"{name}: routing and sorting {number(layer.route_seconds * 1e6)} us;"
            f" rows of an expert {fewest} to {most}, median {median}"
        )
    if layer.memory is not None:
        memory, limit = layer.memory, layer.problem.memory_limit
        peak = "" if memory.peak_in_use is None else f"; in use at most {_megabytes(memory.peak_in_use)}"
        yield (
            f"{name}: forward + backward takes {_megabytes(memory.total)} (arguments {_megabytes(memory.arguments)},"
            f" results {_megabytes(memory.results)}, temporaries {_megabytes(memory.temporaries)}{peak}),"
            f" {100 * memory.total / limit:.0f}% of the {_megabytes(limit)} aimed at"
        )
    for what, reason in layer.failures.items():
        yield f"{name} {what}: failed: {reason}"
    for row in layer.passes:
        measurement = row.measurements.get(JGG)
        if measurement is not None and measurement.status != RIGHT:
            yield f"{name} {row.op}: {measurement}" + (f" ({measurement.variant})" if measurement.variant else "")


def _megabytes(count):
    return f"{number(count / 1e6)} MB"


def as_json(result: Result) -> str:
    """The text of the JSON file."""
    content = origin() | {
        "settings": dataclasses.asdict(result.settings),
        "copy_bytes_per_second": result.copy_bandwidth,
        "peers": result.peers,
        "skipped": result.skipped,
        "interrupted": result.interrupted,
        "ratios": _ratios(result),
        "rows": [_row_as_json(result, row) for row in result.rows],
        "layers": [_layer_as_json(result, layer) for layer in result.layers],
    }
    return json.dumps(content, indent=2) + "\n"


def _row_as_json(result, row):
    problem = row.problem
    return {
        **{name: getattr(row, name) for name in ("layer", "gemm", "op")},
        **{name: getattr(problem, name) for name in _SIZES},
        "dtype": problem.dtype.name,
        "flops": problem.flops,
        "bytes": problem.bytes_accessed,
        "flops_per_byte": problem.flops / problem.bytes_accessed,
        "measurements": {
            name: _finite(measurement) | _numbers(result, row, name) for name, measurement in row.measurements.items()
        },
    }


def _layer_as_json(result, layer):
    def by_pass(value, name):
        return {row.op: value(row) for row in layer.passes if name is None or name in row.measurements}

    return {
        **{field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)},
        "problem": dataclasses.asdict(layer.problem) | {"quantization": layer.problem.quantization and FP8},
        "memory": layer.memory and dataclasses.asdict(layer.memory),
        "passes": by_pass(lambda row: _finite(row.measurements[JGG]), JGG),
        "dense_seconds": by_pass(lambda row: row.seconds(DENSE), DENSE),
        "flops": by_pass(lambda row: row.flops, None),
        "tflops": by_pass(lambda row: row.tflops(JGG), None),
        "dense_tflops": by_pass(lambda row: row.tflops(DENSE), None),
        "percent_of_dense": by_pass(lambda row: _numbers(result, row, JGG)["percent_of_dense"], None),
        "memory_limit": layer.problem.memory_limit,
    }


def _numbers(result, row, name):
    """What follows from the seconds of a call; None where there is no right one.

    The roofline is the time of the dense product or of a copy of as many bytes as x, w and y have, whichever is longer.
    """
    seconds, ratio = row.seconds(name), row.ratio(DENSE, name)
    of_roofline = None
    if ratio and seconds and result.copy_bandwidth:
        of_roofline = 100 * max(ratio, row.problem.bytes_accessed / result.copy_bandwidth / seconds)
    return {
        "milliseconds": seconds and seconds * 1e3,
        "tflops": row.tflops(name),
        "gbytes_per_second": seconds and row.problem.bytes_accessed / seconds / 1e9,
        "percent_of_dense": ratio and 100 * ratio,
        "percent_of_roofline": of_roofline,
    }


def _finite(measurement):
    """As JSON, which cannot hold NaN and infinity: they are text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in dataclasses.asdict(measurement).items()
    }
