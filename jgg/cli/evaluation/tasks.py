"""lm-eval's tasks, for `jgg evaluate --tasks`."""

import argparse
import contextlib
import io
import logging
from typing import Any, NamedTuple
from unittest import mock

import lm_eval
import lm_eval.evaluator
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from jgg.cli.errors import UsageError
from jgg.integrations.lm_eval import JggLM
from jgg.models import Decoder

_KEYS = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")


class Results(NamedTuple):
    """What lm-eval measured: as a table in Markdown, and as a document for JSON."""

    table: str
    document: dict[str, Any]


class Tasks:
    """Tasks by their names; raises UsageError for one that lm-eval does not know."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._names = list(dict.fromkeys(filter(None, (name.strip() for name in args.tasks.split(",")))))
        self._manager = TaskManager(include_path=None if args.include_path is None else str(args.include_path))
        known = self._manager.all_tasks
        wrong = [name for name in self._names if name not in known]
        if wrong or not self._names:
            got = repr(wrong[0] if wrong else args.tasks)
            raise UsageError(f"--tasks must be of the {len(known)} that `lm-eval ls tasks` lists, got {got}")

    def results(self, model: Decoder) -> Results:
        """Runs the tasks, each process all of them."""
        args = self._args
        size = "auto" if args.batch_size is None else args.batch_size
        lm = JggLM(
            args.model,
            args.adapter,
            model=model,
            batch_size=size,
            max_length=args.sequence_length,
            seed=args.seed,
            cache_dtype=args.cache_dtype,
        )
        if args.quiet:
            logging.getLogger("lm_eval").setLevel(logging.ERROR)
        evaluate: Any = lm_eval.simple_evaluate  # its decorator hides its parameters from type checkers
        with contextlib.redirect_stderr(io.StringIO()) if args.quiet else contextlib.nullcontext(), _no_git():
            found = evaluate(
                model=lm,
                tasks=self._names,
                num_fewshot=args.num_fewshot,
                limit=args.limit,
                apply_chat_template=args.apply_chat_template,
                task_manager=self._manager,
                log_samples=False,
            )
        tables = [make_table(found), *([make_table(found, "groups")] if found.get("groups") else [])]
        return Results("\n".join(tables), {key: found[key] for key in _KEYS if key in found})


def _no_git() -> contextlib.AbstractContextManager[object]:
    """Keeps lm-eval from running git, which prints "fatal: ..." where the working folder is in no repository."""
    return mock.patch.object(lm_eval.evaluator, "get_git_commit_hash", lambda: None, create=True)
