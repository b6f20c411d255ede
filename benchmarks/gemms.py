"""Times grouped GEMMs as `jgg bench` does, together with the grouped GEMMs of tokamax, torch and QuACK.

    python -m benchmarks.gemms --layer qwen3-30b-a3b --peers dense,torch,quack

Also times jgg with groups of even sizes ("even") and with all rows in one group ("one group"), which bound its speed.
Prints tables and writes PREFIX.json, which `python -m benchmarks.plots` draws.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from pathlib import Path

from benchmarks.peers import PEERS, measure_best
from jgg.cli import bench, options
from jgg.cli import run as run_command
from jgg.cli.arguments import prefix
from jgg.cli.bench import DENSE, Measure, Row, in_one_way, plan_of
from jgg.cli.commands import Bench
from jgg.cli.console import print_table
from jgg.cli.declarations import add_options
from jgg.cli.errors import UsageError
from jgg.cli.output import Output
from jgg.core.files import replace_text
from jgg.tuning import ways

_RATIOS = ("op", "peer", "geometric mean", "smallest", "smallest of", "GEMMs")


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser; it has the options of `jgg bench`, and two of its own."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gemms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, Bench)
    what = f"all, none or a comma list of {', '.join(PEERS)}; bfloat16 is compared with fp8 (default: %(default)s)"
    parser.add_argument("--peers", default="all", metavar="LIST", help=what)
    what = "how the names of the written files begin (default: %(default)s)"
    parser.add_argument("--out", type=prefix, default="jgg-gemms", metavar="PREFIX", help=what)
    parser.set_defaults(parser=parser)
    return parser


def peers_of(args) -> tuple[dict[str, Measure], dict[str, str]]:
    """The peers that options name and that can run, and why others cannot.

    Raises: UsageError: a peer is not known, or not measured in the dtype.
    """
    if args.peers == "none":
        return {}, {}
    if args.peers == "all":
        names = tuple(name for name, peer in PEERS.items() if args.dtype in peer.dtypes)
    else:
        names = options.names("--peers", args.peers, PEERS)
    found: dict[str, Measure] = {}
    skipped = {}
    for name in names:
        peer = PEERS[name]
        if args.dtype not in peer.dtypes:
            raise UsageError(f"--peers {name} is measured in {' and '.join(peer.dtypes)}, got --dtype {args.dtype}")
        if (reason := peer.unavailable()) is None:
            found[name] = functools.partial(_measure_peer, peer)
        else:
            skipped[name] = reason
    return found, skipped


def _measure_peer(peer, op, problem, arrays, reference):
    return measure_best(lambda: peer.prepare(op, problem, arrays), reference)


def run(args) -> int:
    """Measures and reports; returns 0, 1 after a wrong or failed result or file, or 130 after an interrupt."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers that use torch need memory too
    rows = bench.rows_of(args)
    peers, skipped = peers_of(args)
    own = in_one_way(functools.partial(ways.own, implementation=args.implementation))
    plan = dict(plan_of(args.groups, own, peers))
    for groups, name in (("even", "even"), ("one", "one group")):
        plan[groups] = {**plan.get(groups, {}), name: own}
    output, path = Output(), Path(f"{args.out}.json")

    def keep(result):
        content = result.as_json() | {"skipped": skipped, "ratios": ratios(result.measured, peers)}
        text = json.dumps(content, indent=2) + "\n"
        output.write(path, lambda path: replace_text(path, text))
        return text

    result = bench.measure(rows, plan, args, keep)
    text = keep(result)
    if args.json:
        print(text, end="")
    else:
        bench.show(result)
        print(*(f"Skipped {name}: {reason}\n" for name, reason in skipped.items()), sep="", end="")
        show_ratios(result.measured, peers)
    return result.exit_code(peers) or output.report(quiet=args.json)


def show_ratios(rows: list[Row], peers) -> None:
    """Prints a table: jgg's speed divided by the speed of each peer."""
    compared = [
        (op, peer, f"{each['geometric_mean']:.3f}", f"{each['smallest']:.3f}", each["smallest_of"], each["gemms"])
        for op, by_peer in ratios(rows, peers).items()
        for peer, each in by_peer.items()
    ]
    if compared:
        print("jgg's speed over each peer's:")
        print_table(_RATIOS, compared, ("op", "peer", "smallest of"))


def ratios(rows: list[Row], peers) -> dict[str, dict[str, dict]]:
    """The ratios of jgg's speed to peers', by op and peer: geometric mean, smallest, and the number of GEMMs."""
    found: dict[str, dict[str, dict]] = {}
    for op in dict.fromkeys(row.op for row in rows):
        for name in sorted(peers, key=lambda name: name != DENSE):
            measured = [(ratio, row) for row in rows if row.op == op and (ratio := row.ratio(name)) is not None]
            if measured:
                smallest, row = min(measured, key=lambda pair: pair[0])
                found.setdefault(op, {})[name] = {
                    "geometric_mean": statistics.geometric_mean(ratio for ratio, _ in measured),
                    "smallest": smallest,
                    "smallest_of": f"{row.layer} {row.gemm}",
                    "gemms": len(measured),
                }
    return found


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
