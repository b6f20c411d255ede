"""The options of `jgg generate`."""

import math
from pathlib import Path

from _jgg_command.arguments import Parser, number, positive_float, positive_int, seed, whole
from _jgg_command.options import add_experts, add_model_and_adapter, add_shared

DESCRIPTION = "Continue a prompt with a model of a Hugging Face folder, and an adapter, or talk with it."


def add_arguments(parser: Parser) -> None:
    """Declares the options."""
    add_model_and_adapter(parser)
    _add_prompt(parser)
    _add_drawing(parser)
    what = "ends a text, and is left out of it; may be repeated (default: stop_strings of generation_config.json)"
    parser.add_argument("--stop", action="append", metavar="TEXT", help=what)
    what = "new tokens, at most (default: that of generation_config.json, else 256)"
    parser.add_argument("--max-new-tokens", type=positive_int, metavar="N", help=what)
    parser.add_argument("--samples", type=positive_int, default=1, metavar="N", help="texts (default: %(default)s)")
    add_experts(parser)
    what = "tokens of the prompt that run at once, to save memory (default: all)"
    parser.add_argument("--prefill-chunk", type=positive_int, metavar="N", help=what)
    what = "measure a second run, and print the speeds to stderr, or with --json among the rest"
    parser.add_argument("--speed", action="store_true", help=what)
    add_shared(parser, json={"help": "print one JSON document in the end, in the place of text"})


def _add_prompt(parser: Parser) -> None:
    """Declares where the prompt comes from; without any of these it is standard input."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt, taken as it is (default: standard input)")
    what = "file of the prompt, UTF-8, without the line break at its end"
    parser.alternatives = (("prompt", "prompt_file"),)
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help=what)
    what = "write by the folder's chat template: answer --prompt or --prompt-file, or else each line of standard input"
    parser.add_argument("--chat", action="store_true", help=what)
    parser.add_argument("--system", metavar="TEXT", help="what the system says first in a --chat")


def _add_drawing(parser: Parser) -> None:
    """Declares how tokens are drawn."""
    part = number("at least 0 and at most 1", lambda value: 0 <= value <= 1)
    positive_part = number("greater than 0 and at most 1", lambda value: 0 < value <= 1)
    finite = number("finite", math.isfinite)
    temperature = number("at least 0 and finite", lambda value: 0 <= value < math.inf)
    for name, kind, meaning in (
        ("temperature", temperature, "divides logits before tokens are drawn; 0: the likeliest token"),
        ("top-k", whole(0), "draws among so many of the likeliest tokens; 0: all"),
        ("top-p", positive_part, "draws among the likeliest tokens that together have this probability"),
        ("min-p", part, "draws among tokens with at least this part of the likeliest one's probability"),
        ("repetition-penalty", positive_float, "makes tokens less likely that the prompt or the text has; 1: none"),
    ):
        what = f"{meaning} (default: as transformers takes it from generation_config.json)"
        parser.add_argument(f"--{name}", type=kind, metavar="X", help=what)
    for name, meaning in (("presence", "of each token that the text has"), ("frequency", "of a token for each time")):
        what = f"is taken off the logit {meaning} (default: %(default)s)"
        parser.add_argument(f"--{name}-penalty", type=finite, default=0.0, metavar="X", help=what)
    parser.add_argument("--seed", type=seed, default=0, help="seed of what is drawn (default: %(default)s)")
