"""Declares the commands of `jgg` and their options without importing jgg, which imports JAX: help needs neither.

So the choices that jgg offers (dtypes, layouts, peers) are repeated here; tests/commands/test_help.py compares them.
"""

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

DTYPES = ("float32", "float16", "bfloat16")
FAMILIES = ("data", "fsdp", "all_gather", "ragged_all_to_all", "tensor")
PEERS = ("dense", "ragged_dot", "bfloat16")


def _whole_number(text, least, most):
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be {least} or more, got {value}")
    if value > most:
        raise argparse.ArgumentTypeError(f"must be {most} or less, got {value}")
    return value


def positive_int(text: str) -> int:
    """Argument type: a whole number from 1 to the largest int32, because sizes are computed in int32."""
    return _whole_number(text, 1, 2**31 - 1)


def _seed(text):
    """Argument type: a whole number that NumPy and JAX accept as a seed; different seeds give different data."""
    return _whole_number(text, 0, 2**32 - 1)


def positive_float(text: str) -> float:
    """Argument type: a finite number greater than 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be greater than 0 and finite, got {value}")
    return value


def _file(text):
    """Argument type: the name of a file, which need not exist."""
    if os.path.basename(text) in ("", ".", ".."):
        raise argparse.ArgumentTypeError(f"must end in the name of a file, not of a folder, got {text!r}")
    return text


def _prefix(text):
    """Argument type: a prefix of files, in a folder that exists and takes files."""
    folder = os.path.dirname(_file(text)) or "."
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text} is in {folder}, which is no folder")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} is in {folder}, which takes no files: {error.strerror}") from None
    return text


_SHARED: dict[str, dict[str, Any]] = {
    "layer": {"action": "append", "metavar": "NAME", "help": "a layer that jgg knows; repeat for more (all)"},
    "shapes": {
        "metavar": "FILE",
        "help": "JSON file of layers to know instead of those in jgg/measuring/layers.json",
    },
    "tokens": {"type": positive_int, "help": "of each device (the layer's own)"},
    "m": {"type": positive_int, "help": "of a single product: routed rows, tokens times experts of each"},
    "k": {"type": positive_int, "help": "of a single product: features of x"},
    "n": {"type": positive_int, "help": "of a single product: features of y"},
    "experts": {"type": positive_int, "help": "of a single product: experts on one device"},
    "topk": {"type": positive_int, "help": "of a single product: experts of a token (1)"},
    "dtype": {"choices": DTYPES, "help": "of the operands (bfloat16 on a GPU, float32 elsewhere)"},
    "w-layout": {"choices": ("enk", "ekn"), "help": "of the weights (%(default)s)"},
    "implementation": {
        "choices": ("triton", "xla", "interpret"),
        "help": "of grouped GEMM (triton on a GPU of compute capability 8.0 or newer, xla elsewhere)",
    },
    "seed": {"type": _seed, "default": 0, "help": "of random data (%(default)s)"},
    "out": {"type": _prefix, "metavar": "PREFIX", "help": "of what is written (%(default)s)"},
    "json": {"action": "store_true", "help": "print JSON rather than text"},
    "quiet": {"action": "store_true", "help": "show no progress"},
}
SIZES = ("m", "k", "n", "experts", "topk")


def add_shared(parser, *names, **changes):
    """Declares options that commands share, by their names; `changes` has options with settings to change in them."""
    for name in (*names, *(name.replace("_", "-") for name in changes)):
        parser.add_argument(f"--{name}", **_SHARED[name] | changes.get(name.replace("-", "_"), {}))


def _info(parser):
    add_shared(parser, "json")


def _demo(parser):
    for name, default, meaning in (
        ("steps", 600, "steps of training"),
        ("batch", 8, "windows of text in a step"),
        ("seq", 128, "bytes that are predicted in a window"),
        ("hidden", 128, "features of the model and of each expert, a multiple of 64"),
        ("layers", 3, "layers, each of attention and experts"),
        ("experts", 8, "experts in a layer"),
        ("topk", 2, "experts that each byte goes to"),
    ):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--temperature", type=positive_float, default=0.7, help="of the sample (%(default)s)")
    parser.add_argument("--fp8", action="store_true", help="multiply by the experts in FP8, see jgg.Fp8")
    what = "a new folder for the model and its tokenizer, as jgg.models.load and Hugging Face's transformers read them"
    parser.add_argument("--save", metavar="FOLDER", help=what)
    what = "of the computation; parameters are float32 (bfloat16 on a GPU, float32 elsewhere)"
    add_shared(
        parser,
        "implementation",
        dtype={"choices": ("float32", "bfloat16"), "help": what},
        seed={"help": "of weights, batches and sample (%(default)s)"},
        out={"default": "jgg-demo"},
        quiet={"help": "print nothing but the result"},
    )


def _bench(parser):
    what = (
        "a layer that jgg knows, or all, very slow on a CPU; repeat for more (the first, in less than 2 minutes, as"
        " nothing is begun after 75 seconds; without a GPU scaled down)"
    )
    add_shared(parser, layer={"help": what})
    add_shared(parser, "shapes", *SIZES)
    what = "comma list of forward, dx, dw and gather, which is forward of x in token order (%(default)s)"
    parser.add_argument("--op", default="forward,dx,dw", metavar="LIST", help=what)
    what = f"all, none or a comma list of {', '.join(PEERS)}; bfloat16 for fp8 (%(default)s)"
    parser.add_argument("--peers", default="all", metavar="LIST", help=what)
    what = "how rows are spread (%(default)s)"
    parser.add_argument("--groups", choices=("uneven", "even", "one", "some-empty"), default="uneven", help=what)
    what = "of the operands (bfloat16 on a GPU, float32 elsewhere); fp8: products but dW of quantized ones"
    dtype = {"choices": (*DTYPES, "fp8"), "help": what}
    plain = "implementation", "seed", "json", "quiet"
    add_shared(parser, *plain, dtype=dtype, w_layout={"default": "enk"}, out={"default": "jgg-bench"})


def _tune(parser):
    add_shared(parser, "layer", "shapes", *SIZES)
    for name, meaning in (
        ("permute-x", "x is in token order"),
        ("permute-y", "y is in token order"),
        ("weighted", "rows are scaled by top-k weights"),
        ("biased", "with a bias"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=f"of a single product: {meaning}")
    what = "comma list (forward,dx,dw; in fp8 forward alone: dX is the same product with transposed weights)"
    parser.add_argument("--op", metavar="LIST", help=what)
    what = "to write to ($JGG_TUNED, else a file in the folder for caches)"
    parser.add_argument("--out", type=_file, metavar="FILE", help=what)
    parser.add_argument("--workers", type=positive_int, help="processes that compile; they take turns on the GPU (8)")
    parser.add_argument("--interpret", action="store_true", help="try the search without a GPU, on sizes that are tiny")
    dtype = {
        "choices": (*DTYPES, "fp8"),
        "default": "bfloat16",
        "help": "of the operands (%(default)s); fp8: quantized",
    }
    add_shared(parser, "json", dtype=dtype, w_layout={"help": "of the weights (both)"})


def _scale(parser):
    layer = {"help": "a layer that jgg knows, very slow on a CPU (the first; without a GPU scaled down)"}
    add_shared(parser, layer=layer)
    add_shared(parser, "shapes", "tokens")
    parser.add_argument("--devices", type=positive_int, help="at most so many (all that JAX sees)")
    parser.add_argument("--strategy", metavar="NAME,...", help=f"of {', '.join(FAMILIES)} (all)")
    what = "of the experts' devices (%(default)s)"
    parser.add_argument("--buffer-factor", type=positive_float, default=1.25, help=what)
    parser.add_argument("--steps", type=positive_int, default=10, help="in each of the timed repeats (%(default)s)")
    dtype = {"choices": ("bfloat16", "float32"), "help": "of the computation (bfloat16 on a GPU, float32 elsewhere)"}
    add_shared(parser, "json", dtype=dtype, out={"default": "jgg-scale"})


def _completion(parser):
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh", "fish"), help="of %(choices)s")


class Command(NamedTuple):
    """A command of `jgg`; the module of the same name in jgg.cli runs it."""

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


COMMANDS = {
    "info": Command("Show versions, devices and which implementation runs here.", _info),
    "demo": Command("Train a small mixture-of-experts language model here and plot what it did.", _demo),
    "bench": Command("Time grouped GEMMs here, and check them.", _bench),
    "tune": Command("Find fast kernel configurations for this GPU and keep them in a file that jgg reads.", _tune),
    "scale": Command(
        "Measure a whole MoE layer on 1, 2, 4, ... of this process's devices, at the same tokens for each.", _scale
    ),
    "completion": Command("Print a script by which a shell completes commands and options.", _completion),
}


def make_parser(version: str) -> argparse.ArgumentParser:
    """Makes the parser of `jgg` and its commands. Parsed arguments also have `command`, its name, and its `parser`."""
    parser = argparse.ArgumentParser(prog="jgg", description="Grouped GEMM for JAX mixture-of-experts training.")
    parser.add_argument("--version", action="version", version=f"jgg {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (description, add_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        add_arguments(command)
        command.set_defaults(parser=command)
    return parser


def parse(version: str, arguments: list[str]) -> argparse.Namespace:
    """Parses arguments. Without any it shows help; after help or a mistake the process ends here."""
    return make_parser(version).parse_args(arguments or ["--help"])
