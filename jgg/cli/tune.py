"""Find fast kernel configurations for this GPU and keep them in a file that jgg reads.

Without sizes it tunes the layers that jgg knows. After an interrupt, what was found before stays in the file.
"""

import dataclasses
import json
import multiprocessing
import os
import queue
from pathlib import Path
from typing import NamedTuple

from jgg.cli import options
from jgg.cli.console import progress
from jgg.cli.errors import UsageError
from jgg.core.choices import FP8, W_LAYOUTS
from jgg.core.gpu_target import device_target
from jgg.core.problem import GroupedGemmProblem
from jgg.tuning import Entry
from jgg.tuning.search import ops_of, output_file, tune_op
from jgg.tuning.workloads import computed_as, gemm

# option: (attribute of GroupedGemmProblem, word for it in progress messages)
_FLAGS = {
    "permute_x": ("permute_x", "gathered"),
    "permute_y": ("permute_y", "scattered"),
    "weighted": ("has_topk_weights", "weighted"),
    "biased": ("has_bias", "biased"),
}
# how layers call their products: with rows in expert order, or gathering rows (up) or scattering them (down)
_LAYER_OPTIONS: dict[str, tuple[dict[str, bool], ...]] = {
    "up": ({}, {"permute_x": True}),
    "down": ({}, {"permute_y": True, "weighted": True}),
}
_PATIENCE = 5  # seconds to wait for a message before looking whether any process is alive


class Search(NamedTuple):
    """A product and an op to tune; `name` is only shown to the user."""

    name: str
    op: str
    problem: GroupedGemmProblem

    def __str__(self):
        words = [word for flag, word in _FLAGS.values() if getattr(self.problem, flag)]
        return " ".join([self.name, self.op, self.problem.w_layout, *words])


class _Message(NamedTuple):
    """The state of a search: its trials and best TF/s so far; in the last message, the entry or why there is none."""

    search: Search
    trials: int
    best: float | None
    outcome: Entry | str | None = None

    def __str__(self):
        if isinstance(self.outcome, Entry):
            entry = self.outcome
            return f"{self.search}: {entry.milliseconds:.3f} ms, {entry.tflops:.0f} TF/s, {entry.config}"
        return f"{self.search}: {self.outcome}"

    def as_json(self) -> dict:
        """Returns the entry that was found, or why there is none, as the JSON output has it."""
        found = self.outcome.as_json() if isinstance(self.outcome, Entry) else {"failure": self.outcome}
        return {"name": str(self.search), "trials": self.trials, **found}


def run(args) -> int:
    """Tunes each op of each product; returns 0, or 1 if one of them has no configuration that works."""
    # the processes share the GPU's memory
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problems = _problems(args)
    known = ops_of(problems[0][1])
    ops = known if args.op is None else options.names("--op", args.op.replace("fwd", "forward"), known)
    if args.interpret and not args.out:
        raise UsageError("--interpret needs --out: what it writes serves no GPU")
    if not args.interpret and device_target() is None:
        raise UsageError("jgg tune needs a GPU that JAX can use (see jgg info); --interpret tries the search without")
    try:
        out = output_file(args.out)
    except ValueError as error:
        message = str(error)
        raise UsageError(f"--{message}" if message.startswith("out ") else f"--out: {message}") from error
    if args.interpret and args.dtype == "bfloat16":
        raise UsageError("--interpret needs another --dtype than bfloat16, which Triton's interpreter gets wrong")
    searches = [Search(name, op, problem) for name, problem in problems for op in ops]
    workers = min(args.workers or min(8, os.cpu_count() or 1), len(searches))
    return run_all(searches, out, "interpret" if args.interpret else "triton", workers, args.json)


def _problems(args):
    """Returns (name, problem) for each product to tune."""
    options.check_layout(args)
    is_quantized = args.dtype == FP8
    known = W_LAYOUTS[:1] if is_quantized else W_LAYOUTS
    layouts = (args.w_layout,) if args.w_layout else known
    sizes = options.sizes(args)
    if sizes:
        flags = {name: getattr(args, name) for name in _FLAGS}
        name = f"{args.m}x{args.k}x{args.n}"
        return [(name, gemm(w_layout=layout, dtype=args.dtype, **sizes, **flags)) for layout in layouts]
    products_of = _quantized_products if is_quantized else _products
    return [
        named
        for layer in options.layers(args)
        for layout in layouts
        for named in products_of(layer, args.dtype, layout)
    ]


def _products(layer, dtype, w_layout):
    for product, variants in _LAYER_OPTIONS.items():
        for variant in variants:
            yield f"{layer.name} {product}", layer.gemms(dtype=dtype, w_layout=w_layout, **variant)[product]


def _quantized_products(layer, dtype, w_layout):
    """Yields a layer's forward products and its dX, which in FP8 are forward products with K and N exchanged."""
    for product, gathers in (("up", True), ("down", False)):
        problem = layer.gemms(dtype=dtype, w_layout=w_layout, permute_x=gathers)[product]
        yield f"{layer.name} {product}", problem
        transposed = dataclasses.replace(computed_as("dx", problem)[1], permute_x=not gathers)
        yield f"{layer.name} {product}'s dX", transposed


def run_all(searches: list[Search], out: Path, implementation: str, workers: int, as_json: bool = False) -> int:
    """Runs the searches with a progress bar; returns 1 if one of them finds no configuration that works, else 0."""
    ended: list[_Message] = []
    with progress(len(searches)) as tell:

        def receive(message):
            if message.outcome is not None:
                ended.append(message)
                if not as_json:
                    print(message)
            speed = "none" if message.best is None else f"{message.best:.0f} TF/s"
            tell(f"{message.search}: trial {message.trials}, best {speed}", message.outcome is not None)

        if workers == 1:
            for search in searches:
                _run(search, out, implementation, receive)
        else:
            _run_in_processes(searches, out, implementation, workers, receive)
    if as_json:
        print(json.dumps({"file": str(out), "searches": [message.as_json() for message in ended]}, indent=2))
    elif any(isinstance(message.outcome, Entry) for message in ended):
        print(f"Wrote {out}")
    return int(any(not isinstance(message.outcome, Entry) for message in ended))


def _run(search, out, implementation, send, **how):
    message, fastest = _Message(search, 0, None), None

    def report(trial):
        nonlocal message, fastest
        if trial.milliseconds is not None and (fastest is None or trial.milliseconds < fastest.milliseconds):
            fastest = trial
        best = fastest and search.problem.flops / fastest.milliseconds / 1e9
        message = _Message(search, message.trials + 1, best)
        send(message)

    try:
        outcome: Entry | str = tune_op(search.op, search.problem, out, implementation, report, **how)
    except RuntimeError as error:
        outcome = str(error)
    except OSError as error:
        if fastest is None:
            raise
        found = f"{fastest.milliseconds:.3f} ms, {message.best:.0f} TF/s, {fastest.config}"
        outcome = f"{found}; {out} could not be written: {error.strerror or error}"
    send(message._replace(outcome=outcome))


def _run_in_processes(searches, out, implementation, workers, receive):
    """Runs the searches in several processes, which compile at the same time and take turns on the GPU."""
    context = multiprocessing.get_context("spawn")  # JAX has threads, which do not survive a fork
    tasks, messages, lock = context.Queue(), context.Queue(), context.Lock()
    for task in (*searches, *[None] * workers):
        tasks.put(task)
    arguments = tasks, messages, lock, out, implementation
    processes = [context.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    left = len(searches)
    try:
        while left:
            try:
                message = messages.get(timeout=_PATIENCE)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    raise RuntimeError(f"The processes ended with {left} searches left.") from None
                continue
            left -= message.outcome is not None
            receive(message)
    finally:
        for process in processes:
            process.terminate()


def _work(tasks, messages, lock, out, implementation):
    for search in iter(tasks.get, None):
        _run(search, out, implementation, messages.put, lock=lock)
