"""Options that commands share: their declarations, what they stand for, and an error for those that do not fit."""

import argparse
import dataclasses
import importlib
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jgg.backends import choice
from jgg.gpu_target import device_target
from jgg.measuring.workloads import Layer, load_layers
from jgg.problem import DTYPES, W_LAYOUTS

INTERRUPTED = 130  # exit code, as a shell reports a command that an interrupt from the keyboard ended
DTYPE_NAMES = [jnp.dtype(dtype).name for dtype in DTYPES]
FP8 = "fp8"  # as --dtype of a command that takes it
# option of a single product: what `workloads.gemm` calls it
_SIZES = {"m": "num_rows", "k": "in_features", "n": "out_features", "experts": "num_experts"}
PRODUCTS = ("layer", "shapes", *_SIZES, "topk")


class UsageError(ValueError):
    """Arguments that do not fit together; `main` prints the message under the command's usage."""


def positive_int(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {value}")
    return value


def positive_float(text: str) -> float:
    """Argument type: a number greater than 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be greater than 0, got {value}")
    return value


def _prefix(text):
    """Argument type: a prefix of files, in a folder that exists and takes files."""
    folder = Path(text).parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is in {folder}, which is no folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} is in {folder}, which takes no files: {error.strerror}") from None
    return text


_SHARED: dict[str, dict[str, Any]] = {
    "layer": {"action": "append", "metavar": "NAME", "help": "a layer that jgg knows; repeat for more (all)"},
    "shapes": {"metavar": "FILE", "help": "JSON file of layers to know instead, of the form of jgg/layers.json"},
    "tokens": {"type": positive_int, "help": "of each device (the layer's own)"},
    "m": {"type": positive_int, "help": "of a single product: routed rows, tokens times experts of each"},
    "k": {"type": positive_int, "help": "of a single product: features of x"},
    "n": {"type": positive_int, "help": "of a single product: features of y"},
    "experts": {"type": positive_int, "help": "of a single product: experts on one device"},
    "topk": {"type": positive_int, "help": "of a single product: experts of a token (1)"},
    "dtype": {"choices": DTYPE_NAMES, "help": "of the operands (bfloat16 on a GPU, float32 elsewhere)"},
    "w-layout": {"choices": W_LAYOUTS, "help": "of the weights (%(default)s)"},
    "implementation": {
        "choices": choice.NAMES,
        "help": "of grouped GEMM (triton on a GPU of compute capability 8.0 or newer, xla elsewhere)",
    },
    "seed": {"type": int, "default": 0, "help": "of random data (%(default)s)"},
    "out": {"type": _prefix, "metavar": "PREFIX", "help": "of what is written (%(default)s)"},
    "json": {"action": "store_true", "help": "print JSON rather than text"},
    "quiet": {"action": "store_true", "help": "show no progress"},
}
ONE_LAYER = {"help": "a layer that jgg knows (the first)"}


def add_shared(parser, *names: str, **changes: dict) -> None:
    """Declares options that commands share, by their names; `changes` are those with other settings."""
    for name in (*names, *(name.replace("_", "-") for name in changes)):
        parser.add_argument(f"--{name}", **_SHARED[name] | changes.get(name.replace("-", "_"), {}))


def default_dtype() -> str:
    """The dtype where --dtype names none."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def check_implementation(name: str | None) -> None:
    """Raises UsageError for an --implementation that cannot run on this machine."""
    if name == "triton" and device_target() is None:
        raise UsageError("--implementation triton needs a GPU that JAX can use: see jgg info")
    try:
        choice.check_implementation(name)
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error


def names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """The names in a comma list, each once; all must be known."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in found:
        if name not in known:
            raise UsageError(f"{option} must be of {', '.join(known)}; got {name!r}")
    return found


def layers(args) -> tuple[Layer, ...]:
    """Those that --layer names, by default all, of the file --shapes, by default those that jgg knows."""
    try:
        known = load_layers(args.shapes)
    except (OSError, ValueError) as error:
        raise UsageError(f"--shapes must name a file of layers: {error}") from error
    if not known:
        raise UsageError(f"--shapes must name a file of layers, got none in {args.shapes}")
    return tuple(known[name] for name in (names("--layer", ",".join(args.layer), known) if args.layer else known))


def one_layer(args) -> Layer:
    """The layer that --layer names, by default the first, with --tokens tokens."""
    layer, *others = layers(args)
    if args.layer and others:
        raise UsageError(f"--layer must name one layer, got {', '.join(args.layer)}")
    return layer if args.tokens is None else dataclasses.replace(layer, tokens=args.tokens)


def sizes(args) -> dict[str, int] | None:
    """Sizes of a single product, as `workloads.gemm` names them; None where no option gives any."""
    given = [name for name in (*_SIZES, "topk") if getattr(args, name) is not None]
    if not given:
        return None
    for other in ("layer", "shapes"):
        if getattr(args, other):
            raise UsageError(f"--{given[0]} must be given without --{other}, got both")
    missing = [f"--{name}" for name in _SIZES if name not in given]
    if missing:
        together = "--m, --k, --n and --experts must be given together"
        raise UsageError(f"{together}, got --{given[0]} and no {', '.join(missing)}")
    topk = args.topk or 1
    if args.m % topk:
        raise UsageError(f"--m must be a multiple of --topk {topk}, got {args.m}")
    if topk > args.experts:
        raise UsageError(f"--topk must be at most --experts {args.experts}, got {topk}")
    return {field: getattr(args, name) for name, field in _SIZES.items()} | {"topk": topk}


def import_with_extra(module: str, extra: str):
    """Imports a module of jgg that needs an extra; without it, exits with what installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "jgg":
            raise
        message = f"jgg: {error.name} is not installed: pip install 'jgg[{extra}]'"
        raise SystemExit(message) from error
