"""Continues a prompt with a model from a Hugging Face folder, and with a LoRA adapter of PEFT's format.

    python examples/generate.py FOLDER --prompt "Once upon a time"
    python examples/generate.py FOLDER ADAPTER --prompt "Once upon a time" --temperature 0.7 --top-p 0.9

FOLDER has config.json, safetensors files and tokenizer.json. The prompt is taken as it is: no chat template is applied.
ADAPTER is a folder that `jgg.models.load_adapter` reads. Each speed is measured after compiling, by a second run.
With --experts as-stored, experts in MXFP4 or FP8 stay so; else they become bfloat16.
Needs `pip install '.[flax,hf]' tokenizers`.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import numpy as np

import jgg
import jgg.models

EXPERTS = {"bfloat16": "dense", "as-stored": "as stored", "fp8": jgg.Fp8()}


def read_tokenizer(folder: Path):
    """The tokenizer of a folder's tokenizer.json."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise SystemExit("examples/generate.py needs tokenizers: pip install tokenizers") from error
    if not (folder / "tokenizer.json").exists():
        raise SystemExit(f"{folder} must have tokenizer.json, got none")
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def stop_tokens(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json, else of config.json; an empty list if neither has one."""
    for name in ("generation_config.json", "config.json"):
        text = (folder / name).read_text(encoding="utf-8") if (folder / name).exists() else "{}"
        found = json.loads(text).get("eos_token_id")
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("adapter", type=Path, nargs="?", help="the adapter's folder")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help="their dtype (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="(%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s: the likeliest token)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    options = parser.parse_args(arguments)
    tokenizer, stops = read_tokenizer(options.folder), stop_tokens(options.folder)
    model = load(options.folder, options.adapter, EXPERTS[options.experts])
    prompt = np.asarray([tokenizer.encode(options.prompt).ids], np.int32)
    run = functools.partial(
        jgg.models.generate, model, prompt, temperature=options.temperature, top_p=options.top_p,
        key=jax.random.key(options.seed), stop_tokens=stops,
    )  # fmt: skip
    new = np.asarray(run(options.max_new_tokens))[0].tolist()
    ends = [index for index, token in enumerate(new) if token in stops]
    new = new[: ends[0]] if ends else new
    print(options.prompt + tokenizer.decode(new), flush=True)
    run(1)  # compiles
    prefill, both = seconds_of(lambda: run(1)), seconds_of(lambda: run(options.max_new_tokens))
    print(f"prefill: {prompt.size / prefill:,.0f} tokens/s")
    decoded = (ends[0] + 1 if ends else options.max_new_tokens) - 1  # the first new token comes of the prefill
    if decoded > 0 and both > prefill:
        print(f"decode: {decoded / (both - prefill):,.1f} tokens/s")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    print(f"peak memory: {peak / 2**30:.1f} GiB" if peak else "peak memory: unknown on this device")


if __name__ == "__main__":
    main()
