"""Runs `jgg evaluate`: loads the model once, and measures it by files and by tasks."""

import argparse
import functools
import json
from typing import TYPE_CHECKING

import jax

import jgg.hf
import jgg.models
from jgg.cli.console import number, print_table
from jgg.cli.errors import UsageError, enough_memory, import_with_extra, one_line
from jgg.cli.evaluation.texts import Measured, Texts
from jgg.cli.files import Target, check_files, check_results
from jgg.cli.folders import check_adapter, model_folder
from jgg.cli.info import origin
from jgg.cli.output import Output
from jgg.cli.training import devices
from jgg.core.files import replace_text
from jgg.models.loading import EXPERTS_BY_NAME

if TYPE_CHECKING:
    from jgg.cli.evaluation.tasks import Results, Tasks

_HEADINGS = ("data", "tokens", "loss", "perplexity", "bits per byte")


def run(args: argparse.Namespace) -> int:
    """Prints what was measured, and writes it; returns 0, or 1 if --output could not be written."""
    _check(args)
    devices.join(args)
    with enough_memory("--batch-size or --sequence-length"):
        with one_line():
            args.model = model_folder(args.model)
            check_adapter(args.adapter)
            config = jgg.models.model_config(jgg.hf.read_config(args.model))
            sharding = devices.split_of(args, config.moe.num_experts)
            tasks = _tasks(args) if args.tasks else None
            texts = [Texts(file, args, config, sharding) for file in args.data or ()]
            model = jgg.models.load(
                args.model, dtype=args.dtype, experts=EXPERTS_BY_NAME[args.experts], sharding=sharding
            )
            if args.adapter is not None:
                jgg.models.load_adapter(model, args.adapter)
        measured = {str(each.file): each.measured(model) for each in texts}
        with one_line("evaluate"):
            results = None if tasks is None else tasks.results(model)
    return _tell(args, measured, results)


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for options that do not fit together."""
    if args.data is None and args.tasks is None:
        raise UsageError("--data or --tasks must say what to measure, got neither")
    alone = {
        "--include-path": args.include_path is not None,
        "--num-fewshot": args.num_fewshot is not None,
        "--apply-chat-template": args.apply_chat_template,
    }
    for option, is_given in alone.items():
        if is_given and args.tasks is None:
            raise UsageError(f"{option} must be given with --tasks, got it alone")
    if args.output is not None:
        check = functools.partial(check_results, args.output, "versions", "options", "data", "tasks")
        check_files(args.reads(), [Target("--output", args.output, "a file", args.output, check)])


def _tasks(args: argparse.Namespace) -> "Tasks":
    """The tasks that --tasks names."""
    return import_with_extra("jgg.cli.evaluation.tasks", "evaluate").Tasks(args)


def _tell(args: argparse.Namespace, measured: dict[str, Measured], results: "Results | None") -> int:
    """Prints and writes what was measured, by the first process alone."""
    if jax.process_index():
        return 0
    document = {
        **origin(),
        "options": args.noted(),
        "model": str(args.model),
        "adapter": args.adapter,
        "data": {file: each._asdict() for file, each in measured.items()},
        "tasks": None if results is None else results.document,
    }
    output = Output()
    if args.output is not None:
        text = json.dumps(document, indent=2, default=str) + "\n"
        output.write(args.output, lambda path: replace_text(path, text))
    if args.json:
        print(json.dumps(document, default=str))
    else:
        if measured:
            rows = [(file, f"{own.tokens:,}", *map(number, own[:3])) for file, own in measured.items()]
            print_table(_HEADINGS, rows, texts=("data",))
            for file, own in measured.items():
                if own.skipped_rows:
                    print(f"{file}: rows skipped by --skip-unmarked: {own.skipped_rows}")
        if results is not None:
            print(results.table)
    return output.report(quiet=args.json)
