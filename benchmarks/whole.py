"""Runs whole jobs at full size: fine-tuning, generation, reinforcement learning and training of published models.

    python -m benchmarks.whole
    python -m benchmarks.whole --only finetune,grpo --json FILE

What works at the size of a test need not work at the size of a job. Each job runs for two steps in a process of its
own, on as many GPUs at once as there are, one each; they are meant for cards of 80 GB. Prints a table of times, memory
and results, `OK` or why not, and ends with 1 if a job fails. Weights are random, and `benchmarks.whole_jobs` says what
each job does. On a CPU, small models with the same structure go through the same programs.
"""

import argparse
import concurrent.futures
import json
import os
import queue
import subprocess
import sys
import time
from pathlib import Path

from jgg.cli.arguments import new_file, positive_int

_HEADINGS = ("job", "part", "ms", "tokens/s", "peak GiB", "result", "seconds in all")
_SEPARATOR = "whole-job-line: "


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, without starting a backend; [""] if there are none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return named.split(",")
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [""]
    return [str(number) for number, _ in enumerate(found.splitlines())] or [""]


def run_job(name: str, gpu: str, limit: int) -> list[list[str]]:
    """The rows of a job, which another process computes on one GPU; what ended it is the last row."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.whole", "--job", name]
    own = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    try:
        done = subprocess.run(
            command, env=os.environ | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit
        )
        output, failed = done.stdout, "" if done.returncode == 0 else f"exit code {done.returncode}: "
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        failed = f"took more than {limit} s: "
    lines = output.splitlines()
    rows = [json.loads(line.removeprefix(_SEPARATOR)) for line in lines if line.startswith(_SEPARATOR)]
    if failed:
        last = next((line for line in reversed(lines) if line.strip() and not line.startswith(_SEPARATOR)), "")
        rows.append(["", "-", "-", "-", (failed + last)[:300]])
        print(f"{name}:\n" + "\n".join(lines[-40:]), file=sys.stderr, flush=True)
    return [[name, *row, f"{time.perf_counter() - begin:.0f}"] for row in rows]


def run_all(names: list[str], gpus: list[str], limit: int) -> list[list[str]]:
    """The rows of all jobs; as many jobs run at once as there are GPUs, and each row is printed when its job ends."""
    free: queue.Queue[str] = queue.Queue()
    for gpu in gpus:
        free.put(gpu)

    def on_free_gpu(name: str) -> list[list[str]]:
        gpu = free.get()
        try:
            rows = run_job(name, gpu, limit)
        finally:
            free.put(gpu)
        for row in rows:
            print(" | ".join(row), flush=True)
        return rows

    with concurrent.futures.ThreadPoolExecutor(len(gpus)) as pool:
        return [row for rows in pool.map(on_free_gpu, names) for row in rows]


def print_job(name: str) -> int:
    """Runs a job here and prints its lines for `run_job`."""
    from benchmarks.whole_jobs import JOBS

    job = JOBS[name]
    for line in job.run(job):
        print(_SEPARATOR + json.dumps(line.cells()), flush=True)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.whole", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT,TEXT", help="the jobs whose names have one of these texts")
    parser.add_argument("--limit", type=positive_int, default=300, help="seconds of a job (default: %(default)s)")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the process of one job
    parser.add_argument("--json", type=new_file, help="write the table into this file too")
    return parser


def main(argv=None) -> int:
    """Runs the jobs and returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.job is not None:
        return print_job(args.job)
    from benchmarks.whole_jobs import JOBS

    texts = None if args.only is None else args.only.split(",")
    names = [name for name in JOBS if texts is None or any(text in name for text in texts)]
    if not names:
        parser.error(f"--only must be part of one of {', '.join(JOBS)}, got {args.only}")
    gpus = visible_gpus()
    begin = time.perf_counter()
    rows = run_all(names, gpus, args.limit)
    failed = sorted({row[0] for row in rows if not row[5].startswith("OK")} | (set(names) - {row[0] for row in rows}))
    print(f"{len(names)} jobs on {len(gpus)} GPUs in {time.perf_counter() - begin:.0f} s, failed: {len(failed)}")
    _print(rows)
    if args.json:
        cells = [dict(zip(_HEADINGS, row, strict=True)) for row in rows]
        Path(args.json).write_text(json.dumps({"rows": cells}, indent=2) + "\n")
    return 1 if failed else 0


def _print(rows: list[list[str]]) -> None:
    from jgg.cli.console import print_table

    print_table(_HEADINGS, rows, (_HEADINGS[0], _HEADINGS[1], _HEADINGS[5]))


if __name__ == "__main__":
    sys.exit(main())
