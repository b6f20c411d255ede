"""Times grouped GEMMs as `jgg bench` does, and beside them the grouped GEMMs of tokamax, torch and QuACK.

    python -m benchmarks.gemms --layer qwen3-30b-a3b --peers dense,torch,quack

It takes the options of `jgg bench`. `python -m benchmarks.plots jgg-bench.json` draws what it wrote.
"""

import functools
import sys

from _jgg_command.parser import make_parser
from benchmarks.peers import PEERS
from jgg.cli import bench, run
from jgg.core.versions import __version__


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    args = make_parser(__version__).parse_args(["bench", *(sys.argv[1:] if argv is None else argv)])
    return run(args, functools.partial(bench.run, peers=PEERS))


if __name__ == "__main__":
    sys.exit(main())
