"""Runs the contract's cases under NVIDIA's compute-sanitizer; prints what its tools found, and fails if it is of jgg.

Each tool runs in several processes side by side, after one pass without a tool that compiles what they run. Reports on
kernels of XLA or cuBLAS are counted separately, and so are reports at the line of a kernel's `def`: they concern code
that Triton adds to ours, such as the bytes that tell a warp-specialized kernel's partitions what to run.
"""

import argparse
import collections
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "initcheck", "racecheck")
# racecheck follows what a kernel does in shared memory alone, so that others' need not be watched
OF_TOOL = {"racecheck": ["--kernel-name", "kns=_kernel"]}
ENVIRONMENT = {
    # each array an allocation of its own, so that no memory next to it may be read
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    "PYTHONUNBUFFERED": "1",
    # What is compiled under the tools ends some processes: XLA takes it to be slow and fails as it says so.
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
FINDING = re.compile(r"========= (Error: |Warning: |Invalid |Misaligned |Uninitialized |Race |Barrier |Program hit )")
KERNEL = re.compile(r"\b(?:at|access at) (?:void )?([\w:<>, ]+?)(?:\(|\+0x| in )")
LINE = re.compile(r"\b(\w+\.py:\d+)")


def compute_sanitizer():
    """The tool's path: on PATH, or where CUDA is usually installed."""
    path = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if path is None:
        sys.exit("compute-sanitizer is not on PATH nor in /usr/local/cuda/bin; it comes with the CUDA toolkit.")
    return path


def start(tool, cases, number, count, folder):
    """The process of a tool, or of none, that runs one part of the cases, and the file that it writes to."""
    log = folder / f"{tool or 'compiling'}-{number}.log"
    watch = (
        [
            compute_sanitizer(),
            "--tool",
            tool,
            *OF_TOOL.get(tool, []),
            "--print-limit",
            "100000",
            "--report-api-errors",
            "no",
            "--show-backtrace",
            "device",
        ]
        if tool
        else []
    )
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    with log.open("w") as file:
        process = subprocess.Popen(
            [*watch, sys.executable, "-m", "tests.programs.run_contract", str(number), str(count), cases],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return process, log


def finish(started, end):
    """Waits for processes until a time, ends those that take longer, and notes in their logs how they ended."""
    for process, log in started:
        try:
            process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
        with log.open("a") as file:
            file.write(f"\nended with status {process.wait()}\n")


def findings(text):
    """(case, what was found, kernel, lines of source) of each finding in what a tool printed."""
    case, lines = "before the first case", text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("case: "):
            case = line.removeprefix("case: ")
        if FINDING.match(line):
            block = [line]
            for following in lines[index + 1 :]:
                if not following.startswith("=========  "):
                    break
                block.append(following)
            kernel = KERNEL.search(" ".join(block))
            lines_of_source = set(LINE.findall(" ".join(block)))
            yield case, line.removeprefix("========= "), kernel[1] if kernel else "no kernel", lines_of_source


def own_kernels():
    """The name of each of jgg's kernels, and the line of its `def`."""
    for path in (ROOT / "kernels").glob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if name := re.match(r"def (\w+_kernel)\(", line):
                yield name[1], f"{path.name}:{number}"


def report(tool, logs):
    """Prints what a tool found; returns whether it ran through and found nothing of jgg's."""
    texts = [log.read_text(errors="replace") for log in logs]
    own, found, others = dict(own_kernels()), collections.Counter(), collections.Counter()
    for case, what, kernel, lines in (finding for text in texts for finding in findings(text)):
        if kernel in own and lines == {own[kernel]}:
            others[f"{kernel}, in code that Triton adds"] += 1
        elif kernel in own or kernel == "no kernel":
            found[kernel, re.sub(r"0x\w+", "#", what), case.partition(":")[0]] += 1
        else:
            others[kernel] += 1
    cases = sum(text.count("\ncase: ") + text.startswith("case: ") for text in texts)
    unfinished = [str(log) for log, text in zip(logs, texts, strict=True) if "all cases ran" not in text]
    print(f"{tool}: {cases} cases, {sum(found.values())} findings of jgg, {sum(others.values())} of others")
    for (kernel, what, kind), count in found.most_common():
        print(f"  {count:6d}  {kernel}, {kind}: {what}")
    for kernel, count in others.most_common(5):
        print(f"  {count:6d}  not of jgg: {kernel}")
    for log in unfinished:
        print(f"  did not run all cases, see {log}; it ends with")
        print("    " + "\n    ".join(Path(log).read_text(errors="replace").splitlines()[-8:]))
    return not found and not unfinished


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", default=",".join(TOOLS), help="memcheck, initcheck, racecheck, synccheck")
    parser.add_argument("--cases", default="", metavar="REGEX", help="part of the names of the cases to run")
    parser.add_argument("--parts", type=int, default=2, help="processes of each tool; more take more memory")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that all may take together")
    parser.add_argument("--out", type=Path, default=ROOT / "sanitize", help="folder for the logs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.timeout
    tools = args.tools.split(",")
    parts = len(os.sched_getaffinity(0)) // 2
    finish([start(None, args.cases, i, parts, args.out) for i in range(parts)], end)
    started = {tool: [start(tool, args.cases, i, args.parts, args.out) for i in range(args.parts)] for tool in tools}
    finish(itertools.chain(*started.values()), end)
    sys.exit(not all([report(tool, [log for _, log in parts]) for tool, parts in started.items()]))


if __name__ == "__main__":
    main()
