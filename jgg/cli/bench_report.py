"""Reports a run of `jgg bench`: tables for the terminal and a JSON file."""

import dataclasses
import json
import statistics

from jgg.cli import options
from jgg.cli.bench_run import BOUNDS, JGG, Result, Row
from jgg.cli.console import number, print_table
from jgg.cli.info import devices, origin
from jgg.measuring.peers import DENSE
from jgg.measuring.timing import RIGHT

_TEXTS = ("GEMM", "M, K, N, E", "op", "peer", "smallest of")  # columns that are words
_SIZES = ("num_rows", "in_features", "out_features", "num_experts", "topk")


def show(result: Result) -> None:
    """Prints conditions, tables, what was not right, and ratios."""
    print(header(result))
    numbers = ("ms", "TF/s", "GB/s", "% of dense", "% of roofline")
    headings = ("GEMM", "M, K, N, E", "op", *numbers, *BOUNDS.values(), *result.peers)
    print_table(headings, [_cells(result, row) for row in result.rows], _TEXTS)
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
    """The cells of a row: name, sizes and op; then jgg's numbers, and the speeds of bounds and peers."""
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
        *(_cell(row, name, row.tflops(name)) for name in (*BOUNDS.values(), *result.peers)),
    )


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
        "interrupted": result.interrupted,
        "ratios": _ratios(result),
        "rows": [_row_as_json(result, row) for row in result.rows],
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
            name: measurement.as_json() | _numbers(result, row, name) for name, measurement in row.measurements.items()
        },
    }


def _numbers(result, row, name):
    """The numbers that follow from the seconds of a call; each is None if the times that it needs are missing.

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
