"""Options that several commands and benchmarks have, declared once."""

import argparse
from typing import Any

from _jgg_command.arguments import Parser, positive_int, prefix, seed
from _jgg_command.configuration import add_config

DTYPES = ("float32", "float16", "bfloat16")
EXPERTS = ("bfloat16", "as-stored", "fp8")
SIZES = ("m", "k", "n", "experts", "topk")

_SHARED: dict[str, dict[str, Any]] = {
    "layer": {
        "action": "append",
        "metavar": "NAME",
        "help": "a layer that jgg knows, by its name; may be repeated (default: all of them)",
    },
    "shapes": {
        "metavar": "FILE",
        "help": "JSON file of your own layers, in the form of jgg/tuning/layers.json; --layer then names these",
    },
    "m": {
        "type": positive_int,
        "help": "rows of a single product, measured instead of layers: tokens times experts of each",
    },
    "k": {"type": positive_int, "help": "features of x in the single product"},
    "n": {"type": positive_int, "help": "features of y in the single product"},
    "experts": {"type": positive_int, "help": "number of experts in the single product"},
    "topk": {"type": positive_int, "help": "experts of each token in the single product (default: 1)"},
    "dtype": {"choices": DTYPES, "help": "dtype of x and the weights (default: bfloat16 on a GPU, else float32)"},
    "w-layout": {
        "choices": ("enk", "ekn"),
        "help": "axes of the weights: e experts, n features of y, k features of x (default: %(default)s)",
    },
    "implementation": {
        "choices": ("triton", "xla", "interpret"),
        "help": "implementation of products (default: triton on a GPU of compute capability 8.0 or newer, else xla)",
    },
    "seed": {"type": seed, "default": 0, "help": "seed of the random data (default: %(default)s)"},
    "out": {
        "type": prefix,
        "metavar": "PREFIX",
        "help": "how the names of the written files begin (default: %(default)s)",
    },
    "json": {"action": "store_true", "help": "print JSON instead of text"},
    "quiet": {"action": "store_true", "help": "show no progress"},
}


def add_shared(parser, *names, **changes):
    """Declares options that commands share, by their names; `changes` has options with settings to change in them."""
    for name in (*names, *(name.replace("_", "-") for name in changes)):
        parser.add_argument(f"--{name}", **_SHARED[name] | changes.get(name.replace("-", "_"), {}))


def add_model_and_adapter(parser: Parser) -> None:
    """Declares the model that a command opens, an adapter beside it, and --config."""
    # without defaults, which would take the place of what a file says
    what = "the model's folder, with config.json, safetensors files and tokenizer.json, or its name on the Hub"
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=what)
    what = "the folder of a LoRA adapter in PEFT's format"
    parser.add_argument("adapter", metavar="ADAPTER", nargs="?", default=argparse.SUPPRESS, help=what)
    add_config(parser, "model")


def add_experts(parser):
    """Declares how experts are loaded, by the names of `jgg.models.loading.EXPERTS_BY_NAME`."""
    what = "as-stored: experts in MXFP4 or FP8 stay so; fp8: they are quantized and multiplied so (default: bfloat16)"
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help=what)
