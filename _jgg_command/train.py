"""The options of `jgg train`."""

import argparse
from pathlib import Path

from _jgg_command.arguments import Parser
from _jgg_command.training import add_model, add_training

DESCRIPTION = "Train a new model, as a config.json describes it, and save it as a Hugging Face folder."


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    add_model(parser, "CONFIG", "a folder with the new model's config.json, or that file")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="the folder of the new model")
    what = "folder with tokenizer.json and what belongs to it (default: that of config.json)"
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help=what)
    what = "dtype of the computation (default: bfloat16 on a GPU, else float32); parameters are float32"
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help=what)
    what = "multiply by the experts' weights in FP8 (default: %(default)s)"
    parser.add_argument("--fp8", action=argparse.BooleanOptionalAction, default=False, help=what)
    add_training(parser, learning_rate="1e-3", weight_decay=0.1, remat="none", split=True)
