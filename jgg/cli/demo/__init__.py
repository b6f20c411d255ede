"""Train a small mixture-of-experts language model here and plot what it did.

The model, a `jgg.models.Decoder` over bytes, learns the language reference that Python
carries for `help()`. Needs no network. Writes PREFIX.png, PREFIX.json and, with --save, the model.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from jgg.cli import options
from jgg.cli.errors import INTERRUPTED, UsageError, import_with_extra
from jgg.cli.files import Target, check_files, check_new, check_results
from jgg.cli.output import Output
from jgg.core.files import replace_text
from jgg.linear.fp8 import Fp8

HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `jgg demo`; the JSON file records them too."""

    steps: int
    batch: int
    seq: int
    hidden: int
    layers: int
    experts: int
    topk: int
    seed: int
    out: str
    implementation: str | None
    dtype: str
    fp8: bool
    temperature: float
    quiet: bool
    save: str | None = None

    @classmethod
    def from_args(cls, args) -> Self:
        """Checks the options, and fills in what depends on the machine.

        Raises: UsageError: options that do not fit together or do not fit this machine.
        """
        if args.topk > args.experts:
            raise UsageError(f"--topk {args.topk} is more than --experts {args.experts}")
        if args.hidden % HEAD_DIM:
            raise UsageError(f"--hidden must be a multiple of {HEAD_DIM}, got {args.hidden}")
        check_files(args.reads(), _targets(args))
        options.check_implementation(args.implementation)
        values: dict[str, Any] = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}
        values["dtype"] = args.dtype or options.default_dtype()
        return cls(**values)

    @property
    def quantization(self) -> Fp8 | None:
        """The FP8 recipe of the experts' products; None without --fp8."""
        return Fp8() if self.fp8 else None

    @property
    def arithmetic(self) -> str:
        """The dtypes of the computation, in words."""
        return f"{self.dtype} with experts in FP8" if self.fp8 else self.dtype


def _targets(args) -> Iterator[Target]:
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


def run(args) -> int:
    """Trains and reports; returns 0, 1 where a file could not be written, or 130 after an interrupt."""
    train = import_with_extra("jgg.cli.demo.train", "demo")
    report = import_with_extra("jgg.cli.demo.report", "demo")
    settings = Settings.from_args(args)
    say = (lambda text: None) if settings.quiet else print

    demo = train.Demo(settings)
    say(report.header(demo.result))
    result = demo.run()
    if not result.train:  # interrupted before anything was measured
        raise KeyboardInterrupt
    output, text = Output(), report.as_json(result)
    output.write(Path(f"{settings.out}.json"), lambda path: replace_text(path, text))
    output.write(Path(f"{settings.out}.png"), lambda path: report.write_plot(result, path))
    if settings.save is not None and not result.interrupted:
        output.write(Path(settings.save), demo.save)
    if not settings.quiet:
        report.show_details(result)
    print(report.summary(result))
    failed = output.report(settings.quiet)
    return INTERRUPTED if result.interrupted else failed
