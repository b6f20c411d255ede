"""Reports a run of `jgg bench`: tables for the terminal and a JSON file."""

import dataclasses
import json
import statistics

import numpy as np

from jgg.cli import options
from jgg.cli.bench_run import BOUNDS, JGG, Result, Row, groups_of
from jgg.cli.console import number, print_table
from jgg.cli.info import devices, origin
from jgg.measuring.peers import DENSE
from jgg.measuring.roofline import least_seconds, percent_of_roofline
from jgg.measuring.timing import RIGHT
from jgg.measuring.workloads import group_sizes

_TEXTS = ("GEMM", "M, K, N, E", "op", "peer", "smallest of")  # columns that are words
_SIZES = ("num_rows", "in_features", "out_features", "num_experts", "topk")


def show(result: Result) -> None:
    """Prints conditions, tables, what was not right, and ratios."""
    print(header(result))
    headings = ("GEMM", "M, K, N, E", "op", "ms", "TF/s", "GB/s", "% of\ndense", "% of\nroofline")
    print_table(headings, [_cells(result, row) for row in result.rows], _TEXTS)
    others = (*BOUNDS.values(), *result.peers)
    print("jgg's speed with other groups, and that of peers:")
    print_table(("GEMM", "op", JGG, *others), [_speeds(row, (JGG, *others)) for row in result.rows], _TEXTS)
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
    if result.left_out:
        print(f"Not all was measured, for lack of time, of {', '.join(result.left_out)}: name the layer with --layer")
    if result.interrupted:
        print("Interrupted: not everything was measured")


def header(result: Result) -> str:
    """The lines above the table: device, options, bandwidth of a copy, and the peers that were skipped."""
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


def _cells(result, row):
    """The cells of a row: name, sizes and op; then jgg's numbers."""
    numbers = _numbers(result, row, JGG)
    percents = [numbers["percent_of_dense"], numbers["percent_of_roofline"]]
    return (
        row.name,
        ", ".join(str(getattr(row.problem, name)) for name in _SIZES[:-1]),
        row.op,
        _cell(row, JGG, numbers["milliseconds"]),
        number(numbers["tflops"]),
        number(numbers["gbytes_per_second"]),
        *("-" if percent is None else f"{percent:.1f}" for percent in percents),
    )


def _speeds(row, names):
    return row.name, row.op, *(_cell(row, name, row.tflops(name)) for name in names)


def _cell(row, name, value):
    measurement = row.measurements.get(name)
    if measurement is None:
        return "-"
    return number(value) if measurement.status == RIGHT else measurement.status


def _not_right(result):
    """Lines on everything that is wrong or failed; GEMMs with the same reason share a line."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in result.rows:
        for name, measurement in row.measurements.items():
            if measurement.status != RIGHT:
                reasons.setdefault((name, str(measurement)), {})[f"{row.name} {row.op}"] = None
    return [f"{name}, {'; '.join(where)}: {what}" for (name, what), where in reasons.items()]


def ratios(rows: list[Row], ops, names) -> dict[str, dict[str, dict]]:
    """The ratios of jgg's speed to others', by op and name: geometric mean, smallest, and the number of GEMMs."""
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
    return ratios(result.rows, result.settings.ops, sorted(result.peers, key=lambda name: name != DENSE))


def as_json(result: Result) -> str:
    """The text of the JSON file."""
    content = origin() | {
        "settings": dataclasses.asdict(result.settings),
        "copy_bytes_per_second": result.copy_bandwidth,
        "peers": result.peers,
        "skipped": result.skipped,
        "left_out": result.left_out,
        "interrupted": result.interrupted,
        "ratios": _ratios(result),
        "rows": [_row_as_json(result, row) for row in result.rows],
    }
    return json.dumps(content, indent=2) + "\n"


def _row_as_json(result, row):
    problem, num_bytes = row.problem, _bytes(result, row, JGG)
    return {
        **{name: getattr(row, name) for name in ("layer", "gemm", "op")},
        **{name: getattr(problem, name) for name in _SIZES},
        "dtype": problem.dtype.name,
        "flops": problem.flops,
        "bytes": num_bytes,
        "flops_per_byte": problem.flops / num_bytes,
        "measurements": {
            name: measurement.as_json() | _numbers(result, row, name) for name, measurement in row.measurements.items()
        },
    }


def _bytes(result, row, name):
    """The bytes that a measurement must read and write, of the experts that have rows in it."""
    settings, (op, problem) = result.settings, row.computed
    kind = groups_of(name, settings.groups)
    sizes = group_sizes(kind, problem.num_rows, problem.num_experts, settings.seed)
    return problem.bytes_accessed(op, int(np.count_nonzero(sizes)))


def _numbers(result, row, name):
    """The numbers that follow from the seconds of a call; each is None if the times that it needs are missing."""
    seconds, num_bytes = row.seconds(name), _bytes(result, row, name)
    ratio = row.ratio(DENSE, name)
    least = least_seconds(num_bytes, result.copy_bandwidth, row.seconds(DENSE))
    return {
        "milliseconds": seconds and seconds * 1e3,
        "tflops": row.tflops(name),
        "gbytes_per_second": seconds and num_bytes / seconds / 1e9,
        "percent_of_dense": ratio and 100 * ratio,
        "percent_of_roofline": percent_of_roofline(least, seconds),
    }
