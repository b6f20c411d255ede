"""Time grouped GEMMs here, and check them.

Measures the products of well-known MoE layers or of your own sizes beside a dense product, a copy and XLA's own grouped
product. Prints a table and writes PREFIX.json.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from jgg.cli import bench_report, bench_run
from jgg.cli.bench_settings import Settings
from jgg.cli.options import INTERRUPTED
from jgg.cli.output import Output
from jgg.core.files import replace_text
from jgg.measuring.peers import PEERS, Peer


def run(args, peers: Mapping[str, Peer] = PEERS) -> int:
    """Measures and reports; returns 0, 1 after a wrong or failed product or file, or 130 after an interrupt."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # peers that use torch need memory too
    output, path = Output(), Path(f"{args.out}.json")

    def keep(result):
        text = bench_report.as_json(result)
        output.write(path, lambda path: replace_text(path, text))
        return text

    result = bench_run.run(Settings.from_args(args, peers), keep, peers)
    if not result.rows:  # interrupted before anything was measured
        raise KeyboardInterrupt
    text = keep(result)
    if args.json:
        print(text, end="")
    else:
        bench_report.show(result)
    failed = output.report(quiet=args.json)
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.is_right and not failed else 1
