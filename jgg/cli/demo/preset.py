"""What `jgg demo` trains as `jgg train` does: texts that Python carries, and a small model."""

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jgg.cli.commands import Demo
from jgg.cli.demo.model import _tokenizer, config_of
from jgg.cli.training.options import Train

_HELD_OUT_FRACTION = 0.1
_SPLIT_SEED = 0
_MEASUREMENTS = 8
_LOG_EVERY = 10  # steps; the host waits for the device no more often


def write_preset(args: Demo, folder: Path) -> Train:
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
    """The texts to learn and the held-out texts: whole topics, without a paragraph that is learned.

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
