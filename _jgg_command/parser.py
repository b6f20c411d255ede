"""Declares the commands of `jgg` and their options without importing jgg, which imports JAX: help needs neither.

So what jgg offers, such as dtypes and layouts, is repeated here; tests/commands/test_help.py compares the two.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from _jgg_command import evaluate, finetune, generate, train
from _jgg_command.arguments import Parser, file, positive_float, positive_int
from _jgg_command.configuration import with_file
from _jgg_command.options import DTYPES, SIZES, add_shared


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
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{meaning} (default: %(default)s)")
    what = "temperature with which the sample of text is drawn (default: %(default)s)"
    parser.add_argument("--temperature", type=positive_float, default=0.7, help=what)
    parser.add_argument("--fp8", action="store_true", help="multiply by the experts' weights in FP8, see jgg.Fp8")
    what = "save the model and its tokenizer in a new folder, which jgg.models.load and Hugging Face transformers read"
    parser.add_argument("--save", metavar="FOLDER", help=what)
    what = "dtype of the computation (default: bfloat16 on a GPU, else float32); parameters are float32"
    add_shared(
        parser,
        "implementation",
        dtype={"choices": ("float32", "bfloat16"), "help": what},
        seed={"help": "seed of weights, batches and the sample (default: %(default)s)"},
        out={
            "default": "jgg-demo",
            "help": "names of the written files, PREFIX.png and PREFIX.json (default: %(default)s)",
        },
        quiet={"help": "print only the result"},
    )


def _bench(parser):
    what = (
        "a layer that jgg knows, by its name, or all of them by the name all; may be repeated (default: the first, for"
        " 75 seconds, after which no measurement begins; without a GPU it is made smaller)"
    )
    add_shared(parser, layer={"help": what})
    add_shared(parser, "shapes", *SIZES)
    what = (
        "products to time, a comma list: forward, its gradients dx and dw, and gather, which is forward with x in token"
        " order (default: %(default)s)"
    )
    parser.add_argument("--op", default="forward,dx,dw", metavar="LIST", help=what)
    what = "how the rows are spread over the experts; one: the first has all rows (default: %(default)s)"
    parser.add_argument("--groups", choices=("uneven", "even", "one", "some-empty"), default="uneven", help=what)
    what = (
        "dtype of x and the weights (default: bfloat16 on a GPU, else float32); with fp8 both are quantized, and"
        " there is no dw"
    )
    dtype = {"choices": (*DTYPES, "fp8"), "help": what}
    add_shared(parser, dtype=dtype, w_layout={"default": "enk"})
    add_shared(parser, "implementation", "seed", "json", "quiet")


def _tune(parser):
    add_shared(parser, "layer", "shapes", *SIZES)
    for name, meaning in (
        ("permute-x", "x is in token order"),
        ("permute-y", "y is in token order"),
        ("weighted", "rows are scaled by top-k weights"),
        ("biased", "the experts have a bias"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=f"{meaning} in the single product")
    what = (
        "products to tune, a comma list (default: forward,dx,dw; in fp8 only forward, since dx is the same product with"
        " transposed weights)"
    )
    parser.add_argument("--op", metavar="LIST", help=what)
    what = "file to write to (default: the file that $JGG_TUNED names, else one in the folder for caches)"
    parser.add_argument("--out", type=file, metavar="FILE", help=what)
    what = "number of processes that compile; they take turns on the GPU (default: 8)"
    parser.add_argument("--workers", type=positive_int, help=what)
    what = "run the search in Triton's interpreter, without a GPU: to try it, on tiny sizes"
    parser.add_argument("--interpret", action="store_true", help=what)
    dtype = {
        "choices": (*DTYPES, "fp8"),
        "default": "bfloat16",
        "help": "dtype of x and the weights (default: %(default)s); fp8: both are quantized",
    }
    add_shared(
        parser,
        dtype=dtype,
        w_layout={"help": "axes of the weights: e experts, n features of y, k features of x (default: both)"},
    )
    add_shared(parser, "json")


class Command(NamedTuple):
    """A command of `jgg`; the module of the same name in jgg.cli runs it."""

    description: str
    add_arguments: Callable[..., None]


COMMANDS = {
    "info": Command("Show versions, devices, which implementation jgg uses here, and what to mend.", _info),
    "demo": Command("Train a small mixture-of-experts language model on this machine and plot its loss.", _demo),
    "bench": Command(
        "Time grouped GEMMs on this machine, beside a dense product and jax.lax.ragged_dot, and check every result.",
        _bench,
    ),
    "evaluate": Command(evaluate.DESCRIPTION, evaluate.add_arguments),
    "finetune": Command(finetune.DESCRIPTION, finetune.add_arguments),
    "generate": Command(generate.DESCRIPTION, generate.add_arguments),
    "train": Command(train.DESCRIPTION, train.add_arguments),
    "tune": Command("Find fast kernel configurations for this GPU and keep them in a file that jgg reads.", _tune),
}


def make_parser(version: str) -> Parser:
    """Makes the parser of `jgg` and its commands. Parsed arguments also have `command`, its name, and its `parser`."""
    parser = Parser(prog="jgg", description="Grouped GEMM for JAX mixture-of-experts training.")
    parser.add_argument("--version", action="version", version=f"jgg {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (description, add_arguments) in COMMANDS.items():
        command = commands.add_parser(name, help=description, description=description)
        add_arguments(command)
        command.set_defaults(parser=command)
    return parser


def parse(version: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parses arguments. Without any it shows help; after help or a mistake the process ends here."""
    args, unknown = make_parser(version).parse_known_args(arguments or ["--help"])
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}: jgg {args.command} --help lists the options")
    return with_file(args, arguments[1:])
