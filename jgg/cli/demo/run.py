"""Trains a small mixture-of-experts language model here as `jgg train` does, and reports what it did.

The model, a `jgg.models.Decoder` over bytes, learns the language reference that Python carries for `help()`. Needs no
network. Writes PREFIX.png, PREFIX.json and, with --save, the model.
"""

import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import jgg.models
from jgg.cli import info, options
from jgg.cli.commands import Demo
from jgg.cli.console import progress
from jgg.cli.demo import report
from jgg.cli.demo.model import HEAD_DIM
from jgg.cli.demo.preset import load_texts, write_preset
from jgg.cli.errors import INTERRUPTED, UsageError, enough_memory, one_line
from jgg.cli.files import Target, check_files, check_new, check_results
from jgg.cli.output import Output
from jgg.cli.training import loop, new
from jgg.cli.training.data import data_of
from jgg.core.choices import OF_EXPERTS
from jgg.core.files import fill, replace_text
from jgg.core.quantized import count_numbers
from jgg.hf.checkpoints import read_config
from jgg.train import Log, TrainingError

_PROMPT, _SAMPLE_BYTES = b"The ", 400


def run(args: Demo) -> int:
    """Trains and reports; returns 0, 1 where a file could not be written, or 130 after an interrupt."""
    _check(args)
    output = Output()
    with tempfile.TemporaryDirectory() as folder, enough_memory("--batch, --seq or --hidden"):
        training, model = _prepare(args, Path(folder))
        result = _result_of(args, model)
        loop.say(args, report.header(result))
        model = _learn(training, model, result, args.temperature)
        if not result.train:  # interrupted before anything was measured
            raise KeyboardInterrupt
        text = report.as_json(result)
        output.write(Path(f"{args.out}.json"), lambda path: replace_text(path, text))
        output.write(Path(f"{args.out}.png"), lambda path: report.write_plot(result, path))
        if args.save is not None and not result.interrupted:
            save = functools.partial(jgg.models.save, model)
            output.write(Path(args.save), lambda path: fill(path, "config.json", save))
    if not args.quiet:
        report.show_details(result)
    print(report.summary(result))
    failed = output.report(args.quiet)
    return INTERRUPTED if result.interrupted else failed


def _check(args: Demo) -> None:
    """Raises UsageError for options that do not fit together or do not fit this machine; settles --dtype."""
    if args.topk > args.experts:
        raise UsageError(f"--topk {args.topk} is more than --experts {args.experts}")
    if args.hidden % HEAD_DIM:
        raise UsageError(f"--hidden must be a multiple of {HEAD_DIM}, got {args.hidden}")
    held_out = sum(map(len, load_texts()[1]))
    if args.seq >= held_out:
        raise UsageError(f"--seq must be less than {held_out}, the held-out bytes")
    check_files(args.reads(), _targets(args))
    options.check_implementation(args.implementation)
    args.dtype = args.dtype or options.default_dtype()


def _targets(args: Demo) -> Iterator[Target]:
    """What the demo writes. A picture is the demo's where the results next to it are."""
    own = functools.partial(Target, "--out", Path(args.out))
    results, picture = Path(f"{args.out}.json"), Path(f"{args.out}.png")
    check = functools.partial(check_results, results, "config", "final", "history")
    yield own("the file of its results", results, check)
    yield own("its picture", picture, functools.partial(_check_picture, picture, results))
    if args.save is not None:
        folder = Path(args.save)
        yield Target("--save", folder, "a folder", folder, functools.partial(check_new, "--save", folder))


def _check_picture(picture: Path, results: Path) -> None:
    if os.path.lexists(picture) and not picture.is_dir() and not results.exists():
        raise ValueError(f"{picture} is there without {results.name}, so it is not the demo's: choose another name")


def _prepare(args: Demo, folder: Path) -> tuple[loop.Run, jgg.models.Decoder]:
    """What `jgg train` would learn in this folder, on one device, and the model; at first all bytes are as likely."""
    train = write_preset(args, folder)
    with one_line():
        config = jgg.models.model_config(read_config(folder))
        data = data_of(train, folder, folder, config)
    steps = data.steps(train)
    log = Log(folder / "log.jsonl")
    training = loop.Run(train, None, data, steps, loop.schedule_of(train, steps), log, noted={})
    model = new.make(train, config, None, implementation=args.implementation, unroll=args.layers)
    model.w_head[...] = jnp.zeros_like(model.w_head[...])
    return training, model


def _result_of(args: Demo, model: jgg.models.Decoder) -> report.Result:
    """What is known before training."""
    parameters = count_numbers(nnx.state(model, nnx.Param))
    of_experts = sum(getattr(model.layers.moe, name).size for name in OF_EXPERTS)
    return report.Result(
        config=args.noted(),
        implementation=args.implementation or info.assess(info.gather())["implementation"],
        train_bytes=sum(len(text.encode()) for text in load_texts()[0]),
        held_out_bytes=sum(len(text.encode()) for text in load_texts()[1]),
        parameters=parameters,
        expert_load=[[0.0] * args.experts] * args.layers,
        active_parameters=parameters - of_experts * (args.experts - args.topk) // args.experts,
    )


def _learn(
    training: loop.Run, model: jgg.models.Decoder, result: report.Result, temperature: float
) -> jgg.models.Decoder:
    """Trains, measures and samples; an interrupt from the keyboard ends it early. Returns the model."""
    trainer = loop.trainer_of(training, model, nnx.Param)
    try:
        with progress(training.steps, training.args.quiet) as tell:
            tell("compiling")
            for record in loop.records(training, trainer):
                result.add(record, training.measured(record, trainer))
                if result.held_out and result.held_out[-1]["step"] == record.step:
                    batch = training.data.batches.of_step(record.step)
                    result.expert_load = expert_load(trainer.model, batch).tolist()
                tell(report.progress_line(result), len(record.metrics["loss"]))
        model = trainer.model
        prompt, key = jnp.array([list(_PROMPT)], jnp.int32), jax.random.key(training.args.seed)
        length = _SAMPLE_BYTES - len(_PROMPT)
        (new_bytes,) = jgg.models.generate(model, prompt, length, temperature=temperature, key=key)
        result.sample = (_PROMPT + bytes(new_bytes.tolist())).decode(errors="replace")
    except KeyboardInterrupt:
        result.interrupted = True
    except TrainingError as error:
        raise SystemExit(f"jgg: {error}") from error
    return model


@jax.jit
def expert_load(model: jgg.models.Decoder, batch: dict[str, jax.Array]) -> jax.Array:
    """The share of the rows of each layer that each expert gets of a batch, float32 [layers, E]."""
    tokens, targets, is_real = (jnp.asarray(batch[name][0]) for name in ("tokens", "targets", "segments"))
    _, sown = nnx.capture(model.losses, nnx.Intermediate)(tokens, targets, mask=is_real > 0)
    (sizes,) = sown["group_sizes"]
    return sizes / jnp.sum(sizes, axis=1, keepdims=True)
