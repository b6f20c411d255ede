"""Continues a prompt with a model from a Hugging Face folder, and with a LoRA adapter of PEFT's format.

    python examples/generate.py FOLDER --prompt "Once upon a time"
    python examples/generate.py FOLDER ADAPTER --prompt "Once upon a time" --temperature 0.7 --top-p 0.9 --samples 4

FOLDER has config.json, safetensors files and tokenizer.json. The prompt is taken as it is: no chat template is applied.
If it begins with the token that the tokenizer puts first, such as "<s>", no second one is put there. ADAPTER is a
folder that `jgg.models.load_adapter` reads. The text ends at `eos_token_id` of generation_config.json or config.json,
at the tokenizer's end token, at a token that finetune.py noted in the adapter's folder, or where the tokens of a --stop
come, if they come as the tokenizer writes that text alone.

Each speed is measured after compiling, by a second run. With --experts as-stored, experts in MXFP4 or FP8 stay so; else
they become bfloat16. Needs `pip install '.[flax,hf]' transformers jinja2`, and the two files beside it that it
imports.
"""

import argparse
import functools
import math
import time
from pathlib import Path

import jax
import numpy as np
from arguments import Parser, enough_memory, number, whole
from folders import check_vocabulary, continuation, encode, load_tokenizer, one_line, read_config, stop_tokens

import jgg
import jgg.models

EXPERTS = {"bfloat16": "dense", "as-stored": "as stored", "fp8": jgg.Fp8()}


def load(folder: Path, adapter: Path | None, experts) -> jgg.models.Decoder:
    """The model, with the adapters of a folder, if one is given."""
    model = jgg.models.load(folder, experts=experts)
    if adapter is not None:
        jgg.models.load_adapter(model, adapter)
    return model


def seconds_of(function) -> float:
    """The time that a call takes."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def tokens_of(tokenizer, config, text: str, option: str, *, adds: bool = True) -> list[int]:
    """The tokens of an option's text, with what the tokenizer puts before a text if it `adds` that."""
    with one_line():
        ids, _ = encode(tokenizer, text, is_rendered=not adds)
    if not ids:
        raise SystemExit(f"{option} must have a token, got {text!r}")
    check_vocabulary(tokenizer, ids, config, option)
    return ids


def print_text(prompt: str, tokenizer, ids: list[int], new: list[int], stops: list[list[int]]) -> int:
    """Prints a prompt and what new tokens add to it, up to what stops them; returns their number, with what does."""
    length, kept = len(new), len(new)
    for end in range(len(new), 0, -1):
        for stop in stops:
            if new[max(0, end - len(stop)) : end] == stop:
                length, kept = end, end - len(stop)
    if -1 in new[:length]:
        raise SystemExit(f"the model's logits are NaN after {new.index(-1)} new tokens")
    print(prompt + continuation(tokenizer, ids, new[:kept]), flush=True)
    return length


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    temperature = number("a finite number of at least 0", lambda value: 0 <= value < math.inf)
    top_p = number("a number above 0 and at most 1", lambda value: 0 < value <= 1)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("adapter", type=Path, nargs="?", help="the adapter's folder")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help="their dtype (%(default)s)")
    parser.add_argument("--max-new-tokens", type=whole(1), default=64, help="(%(default)s)")
    parser.add_argument("--temperature", type=temperature, default=0.0, help="(%(default)s: the likeliest token)")
    parser.add_argument("--top-p", type=top_p, default=1.0, help="(%(default)s)")
    parser.add_argument("--top-k", type=whole(1), help="draws among so many of the likeliest tokens (all)")
    parser.add_argument("--samples", type=whole(1), default=1, help="how many texts (%(default)s)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")
    parser.add_argument("--prefill-chunk", type=whole(1), help="tokens of the prompt that run at once (all)")
    parser.add_argument("--seed", type=whole(0), default=0, help="(%(default)s)")
    return parser.parse_intermixed_args(arguments)  # takes the adapter also behind options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with enough_memory("--max-new-tokens or --prompt"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Prints the text and the speeds; what can be wrong is looked at before the model is loaded."""
    config, tokenizer = read_config(options.folder), load_tokenizer(options.folder)
    stops = [[token] for token in stop_tokens(options.folder, options.adapter)]
    stops += [] if tokenizer.eos_token_id is None else [[tokenizer.eos_token_id]]
    ids = tokens_of(tokenizer, config, options.prompt, "--prompt")
    stops += [tokens_of(tokenizer, config, text, "--stop", adds=False) for text in options.stop]
    with one_line():
        model = load(options.folder, options.adapter, EXPERTS[options.experts])
    prompt = np.asarray([ids], np.int32)
    continued = functools.partial(
        jgg.models.generate,
        model,
        prompt,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        num_samples=options.samples,
        prefill_chunk=options.prefill_chunk,
        key=jax.random.key(options.seed),
        stop_tokens=stops,
    )
    with one_line():
        rows = np.asarray(continued(options.max_new_tokens)).tolist()
    lengths = [print_text(options.prompt, tokenizer, ids, row, stops) for row in rows]
    continued(1)  # compiles
    prefill, both = seconds_of(lambda: continued(1)), seconds_of(lambda: continued(options.max_new_tokens))
    print(f"prefill: {prompt.size / prefill:,.0f} tokens/s")
    decoded = sum(lengths) - len(lengths)  # the first new token of each comes of the prefill
    if decoded > 0 and both > prefill:
        print(f"decode: {decoded / (both - prefill):,.1f} tokens/s")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    print(f"peak memory: {peak / 2**30:.1f} GiB" if peak else "peak memory: unknown on this device")


if __name__ == "__main__":
    main()
