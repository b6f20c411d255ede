"""Train a small mixture-of-experts language model here and plot what it did.

The model, over bytes and with `jgg.nnx.MoE` layers, learns the language reference that Python
carries for `help()`. Needs no network. Writes PREFIX.png and PREFIX.json.
"""

import dataclasses
from typing import Self

import jax

from jgg.cli.common import (
    INTERRUPTED,
    UsageError,
    check_implementation,
    check_out,
    import_with_extra,
    positive_float,
    positive_int,
)
from jgg.implementations import choice

HEAD_DIM = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of `jgg demo`, as the JSON file has them too."""

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
    temperature: float
    quiet: bool

    @classmethod
    def from_args(cls, args) -> Self:
        """Checks the options, and fills in what depends on the machine.

        Raises: UsageError: options that do not fit together or do not fit this machine.
        """
        values = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}
        if values["dtype"] is None:
            values["dtype"] = "bfloat16" if jax.default_backend() == "gpu" else "float32"
        settings = cls(**values)
        settings._check()
        return settings

    def _check(self):
        if self.topk > self.experts:
            raise UsageError(f"--topk {self.topk} is more than --experts {self.experts}")
        if self.hidden % HEAD_DIM:
            raise UsageError(f"--hidden must be a multiple of {HEAD_DIM}, got {self.hidden}")
        check_out(self.out)
        check_implementation(self.implementation)


def add_arguments(parser):
    """Declares the options of `jgg demo`."""
    sizes = {
        "steps": (600, "steps of training"),
        "batch": (8, "windows of text in a step"),
        "seq": (128, "bytes that are predicted in a window"),
        "hidden": (128, f"features of the model and of each expert, a multiple of {HEAD_DIM}"),
        "layers": (3, "layers, each of attention and experts"),
        "experts": (8, "experts in a layer"),
        "topk": (2, "experts that each byte goes to"),
    }
    for name, (default, meaning) in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample (%(default)s)")
    parser.add_argument("--out", default="jgg-demo", metavar="PREFIX", help="of the files written (%(default)s)")
    parser.add_argument(
        "--implementation",
        choices=choice.NAMES,
        help="of grouped GEMM (triton on a GPU of compute capability 8.0 or newer, xla elsewhere)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the computation; parameters are float32 (bfloat16 on a GPU, float32 elsewhere)",
    )
    parser.add_argument("--temperature", type=positive_float, default=0.7, help="of the sample (%(default)s)")
    parser.add_argument("--quiet", action="store_true", help="print nothing but the result")


def run(args) -> int:
    """Trains and reports; returns 0, or 130 after an interrupt from the keyboard."""
    demo_train = import_with_extra("jgg.cli.demo_train", "demo")
    demo_report = import_with_extra("jgg.cli.demo_report", "demo")
    settings = Settings.from_args(args)
    tell = (lambda text: None) if settings.quiet else print

    trainer = demo_train.Trainer(settings)
    tell(demo_report.header(trainer.result))
    result = trainer.run()
    if not result.train:  # interrupted before anything was measured
        raise KeyboardInterrupt
    paths = demo_report.write(result)
    tell(demo_report.details(result))
    print(demo_report.summary(result))
    tell("Wrote " + " and ".join(map(str, paths)))
    return INTERRUPTED if result.interrupted else 0
