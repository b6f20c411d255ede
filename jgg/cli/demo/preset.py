"""What `jgg demo` trains as `jgg train` does: texts that Python carries, a tokenizer of bytes, a small config.json."""

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jgg.cli.training.options import Train

HEAD_DIM, NUM_BYTES = 64, 256
_HELD_OUT_FRACTION = 0.1
_SPLIT_SEED = 0
_BALANCE_WEIGHT = 0.1
_MEASUREMENTS = 8
_LOG_EVERY = 10  # steps; the host waits for the device no more often


def write_preset(args: Any, folder: Path) -> Train:
    """Writes config.json, a tokenizer and the texts into a folder, and returns the options of `jgg train` for them."""
    for name, texts in zip(("train", "held-out"), load_texts(), strict=True):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    files = {"config": config_of(args), "tokenizer": _tokenizer(), "tokenizer_config": own}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return Train(
        model=str(folder),
        tokenizer=folder,
        data=[folder / "train.jsonl"],
        eval_data=[folder / "held-out.jsonl"],
        eval_every=-(-args.steps // _MEASUREMENTS),
        log_every=_LOG_EVERY,
        sequence_length=args.seq,
        packing=False,
        batch_size=args.batch,
        steps=args.steps,
        learning_rate=3e-3,
        warmup=max(args.steps // 10, 1),
        dtype=args.dtype,
        fp8=args.fp8,
        seed=args.seed,
        output=folder / "output",
        quiet=args.quiet,
    )


def load_texts() -> tuple[list[str], list[str]]:
    """The texts to learn and those that are held out, whole topics of which no paragraph is learned.

    They are `pydoc_data.topics`, which CPython carries for `help()`: 0.35 MB of English and examples. Topics repeat
    each other ("with" is a part of "compound"), so each paragraph is kept once, in the longest topic that has it.
    Tables, which are mostly spaces and lines, are left out. The split is always the same for one version of Python;
    another version has another text.
    """
    from pydoc_data.topics import topics

    texts = list(_without_repeats_and_tables(topics.values()))
    random.Random(_SPLIT_SEED).shuffle(texts)
    room = _HELD_OUT_FRACTION * sum(map(len, texts))
    learned, held_out = [], []
    for text in texts:
        if len(text) <= room:
            held_out.append(text)
            room -= len(text)
        else:
            learned.append(text)
    return learned, held_out


def _without_repeats_and_tables(topics: Iterable[str]) -> Iterator[str]:
    """Yields what is kept of each topic, longest topic first."""
    seen = set()
    for text in sorted(topics, key=lambda text: (-len(text), text)):
        paragraphs = [
            each
            for each in re.split(r"\n\n+", text.strip("\n"))
            if each not in seen and not each.lstrip().startswith(("+-", "|"))
        ]
        seen.update(paragraphs)
        if paragraphs:
            yield "\n\n".join(paragraphs) + "\n"


def config_of(args: Any) -> dict[str, Any]:
    """The content of config.json, of the family Qwen3-MoE."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": NUM_BYTES,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // HEAD_DIM,
        "num_key_value_heads": args.hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "num_experts": args.experts,
        "num_experts_per_tok": args.topk,
        "moe_intermediate_size": args.hidden,
        "norm_topk_prob": args.topk > 1,
        "router_aux_loss_coef": _BALANCE_WEIGHT / args.topk,
        "hidden_act": "silu",
        "initializer_range": args.hidden**-0.5,
        "rms_norm_eps": 1e-6,
        # windows are short: with a base of 500 rather than 10,000 the model learned faster
        "rope_theta": 500.0,
        # no byte attends further back than in training, however long the text becomes
        "use_sliding_window": True,
        "sliding_window": args.seq,
        "max_window_layers": 0,
        "tie_word_embeddings": False,
    }


def _tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json: byte-level BPE without merges, so that a token is the value of its byte.

    Source: the characters that stand for bytes are those of Radford et al., GPT-2, 2019.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {characters[byte]: byte for byte in range(NUM_BYTES)}, "merges": []},
    }
