"""Runs the searches of `jgg tune` with a progress bar, in processes that compile at once and take turns on the GPU."""

import dataclasses
import multiprocessing
import queue
from pathlib import Path

from jgg.cli.console import progress
from jgg.configs.tuned_configs import Entry
from jgg.problem import GroupedGemmProblem
from jgg.tuning import tune_op

_PATIENCE = 5  # seconds between looks at whether the workers still live


@dataclasses.dataclass(frozen=True)
class Search:
    """A product to tune; name is for the user's eyes."""

    name: str
    op: str
    problem: GroupedGemmProblem

    def __str__(self):
        problem = self.problem
        flags = {
            "gathered": problem.permute_x,
            "scattered": problem.permute_y,
            "weighted": problem.has_topk_weights,
            "biased": problem.has_bias,
        }
        return " ".join([self.name, self.op, problem.w_layout, *(name for name, is_set in flags.items() if is_set)])


@dataclasses.dataclass(frozen=True)
class _Message:
    """What a search tells: its trials and best TF/s so far, and at its end an entry or a failure."""

    search: Search
    trials: int = 0
    best: float | None = None
    entry: Entry | None = None
    failure: str | None = None

    @property
    def is_last(self) -> bool:
        """Whether the search has ended."""
        return self.entry is not None or self.failure is not None


def run_all(searches: list[Search], out: Path, implementation: str, workers: int) -> int:
    """Runs the searches; returns 1 if for one no configuration works, else 0."""
    failures = 0
    with progress(len(searches)) as tell:

        def receive(message):
            nonlocal failures
            if message.entry is not None:
                entry = message.entry
                print(f"{message.search}: {entry.milliseconds:.3f} ms, {entry.tflops:.0f} TF/s, {entry.config}")
            elif message.failure is not None:
                failures += 1
                print(f"{message.search}: {message.failure}")
            best = "none" if message.best is None else f"{message.best:.0f} TF/s"
            tell(f"{message.search}: trial {message.trials}, best {best}", message.is_last)

        if workers == 1:
            for search in searches:
                _run(search, out, implementation, receive)
        else:
            _run_in_processes(searches, out, implementation, workers, receive)
    print(f"Wrote {out}")
    return int(failures > 0)


def _run(search, out, implementation, send, **options):
    message = _Message(search)

    def report(trial):
        nonlocal message
        best = message.best
        if trial.milliseconds is not None:
            best = max(best or 0, search.problem.flops / trial.milliseconds / 1e9)
        message = dataclasses.replace(message, trials=message.trials + 1, best=best)
        send(message)

    try:
        entry = tune_op(search.op, search.problem, out, implementation, report, **options)
    except RuntimeError as error:
        send(dataclasses.replace(message, failure=str(error)))
    else:
        send(dataclasses.replace(message, entry=entry))


def _run_in_processes(searches, out, implementation, workers, receive):
    context = multiprocessing.get_context("spawn")  # JAX has threads, which do not survive a fork
    tasks, messages, lock = context.Queue(), context.Queue(), context.Lock()
    for task in (*searches, *[None] * workers):
        tasks.put(task)
    processes = [
        context.Process(target=_work, args=(tasks, messages, lock, out, implementation), daemon=True)
        for _ in range(workers)
    ]
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
            left -= message.is_last
            receive(message)
    finally:
        for process in processes:
            process.terminate()


def _work(tasks, messages, lock, out, implementation):
    for search in iter(tasks.get, None):
        _run(search, out, implementation, messages.put, lock=lock)
