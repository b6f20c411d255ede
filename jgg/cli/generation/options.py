"""The options of `jgg generate`."""

import dataclasses
import functools
import math
from pathlib import Path

from jgg.cli.arguments import number, path, positive_float, positive_int, seed, whole
from jgg.cli.declarations import option, switch
from jgg.cli.evaluation.options import WithAdapter
from jgg.cli.training.options import Caches, Experts

_part = number("at least 0 and at most 1", lambda value: 0 <= value <= 1)
_positive_part = number("greater than 0 and at most 1", lambda value: 0 < value <= 1)
_finite = number("finite", math.isfinite)
_temperature = number("at least 0 and finite", lambda value: 0 <= value < math.inf)
_prompt = functools.partial(option, "prompt", alternative="a prompt", is_exclusive=True)
_text, _drawing = (functools.partial(option, group, metavar="X") for group in ("text", "sampling"))
_of_file = functools.partial(_drawing, shown="as transformers takes it from generation_config.json")

# a table: the meaning of each option, then its type, its default and the rest
# fmt: off


@dataclasses.dataclass(kw_only=True)
class Generate(Caches, Experts, WithAdapter):
    """Continue a prompt with a model of a Hugging Face folder, and an adapter, or talk with it."""

    example = 'jgg generate model adapter --prompt "Once upon a time" --temperature 0.7'
    page = "generate/"
    module = "jgg.cli.generation.run"

    prompt: str | None = _prompt("the prompt, verbatim", metavar="TEXT", shown="standard input")
    prompt_file: Path | None = _prompt("file of the prompt, UTF-8, without the line break at its end", path,
        metavar="FILE", is_read=True)
    chat: bool = switch("prompt",
        "use the folder's chat template: answer --prompt or --prompt-file, or else each line of standard input")
    system: str | None = option("prompt", "system message at the start of a --chat", metavar="TEXT")
    temperature: float | None = _of_file("sampling temperature; 0 decodes greedily", _temperature)
    top_k: int | None = _of_file("sample only from the k most likely tokens, ties included; 0: all", whole(0))
    top_p: float | None = _of_file("sample only from the most likely tokens that together have this probability",
        _positive_part)
    min_p: float | None = _of_file("sample only from tokens with at least this fraction of the top token's probability",
        _part)
    repetition_penalty: float | None = _of_file(
        "penalizes tokens that already occur in the prompt or the output; 1: none", positive_float)
    presence_penalty: float = _drawing("subtracted from the logit of each token that the output has", _finite, 0.0)
    frequency_penalty: float = _drawing("subtracted from a token's logit each time the output has it", _finite, 0.0)
    seed: int = _drawing("seed for sampling", seed, 0, metavar="SEED")
    stop: list[str] | None = _text("ends a text, and is left out of it; may be repeated", action="append",
        metavar="TEXT", shown="stop_strings of generation_config.json")
    max_new_tokens: int | None = _text("maximum number of new tokens", positive_int, metavar="N",
        shown="max_new_tokens of generation_config.json, else 256")
    samples: int = _text("number of texts", positive_int, 1, metavar="N")
    prefill_chunk: int | None = _text("prompt tokens to process at once, to save memory", positive_int,
        metavar="N", shown="all")
    speed: bool = switch("output",
        "measure a second run, and print the speeds to stderr, or with --json among the rest")
    json: bool = switch("output", "print one JSON document at the end instead of text")
