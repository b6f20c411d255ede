"""Reads prompts: their tokens, and the columns that a reward function gets."""

import datetime
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jgg.data
from jgg.cli.training.data import counted
from jgg.data.tokenizers import Tokenizer
from jgg.models import ModelConfig

_PROMPT = "prompt"


class Prompt(NamedTuple):
    """A prompt's tokens, and its row, whose "prompt" is a text or a list of messages."""

    ids: list[int]
    row: Mapping[str, object]


class Prompts(NamedTuple):
    """The prompts of some files.

    Attributes:
      prompts: all that are short enough.
      columns: the other columns of the rows; a row that lacks one has None.
      num_left_out: how many were too long.
      digest: hex digest of the tokens and the rows.
    """

    prompts: list[Prompt]
    columns: list[str]
    num_left_out: int
    digest: str

    @property
    def longest(self) -> int:
        """The most tokens of a prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)

    def of_batch(self, number: int, size: int, seed: int) -> list[Prompt]:
        """The prompts of a batch, from 0: each prompt once in an epoch, in an order of its own."""
        count = len(self.prompts)
        places = range(number * size, (number + 1) * size)
        epochs = {place // count for place in places}
        orders = {epoch: np.random.default_rng((seed, epoch)).permutation(count) for epoch in epochs}
        return [self.prompts[orders[place // count][place % count]] for place in places]


class Data(NamedTuple):
    """What a run of `jgg grpo` learns from; attributes as those of `jgg.cli.training.data.Data`."""

    learned: Prompts
    held_out: Prompts | None
    end_tokens: list[int]
    date: datetime.date

    @property
    def columns(self) -> list[str]:
        """The columns of all prompts."""
        held_out = [] if self.held_out is None else self.held_out.columns
        return [*dict.fromkeys([*self.learned.columns, *held_out])]

    def in_words(self) -> str:
        """What is learned."""
        own = self.learned
        left_out = f", {counted(own.num_left_out, 'longer one')} left out" if own.num_left_out else ""
        return f"{counted(len(own.prompts), 'prompt')} of at most {counted(own.longest, 'token')}{left_out}"

    def steps(self, args) -> int:
        """The number of the last step."""
        return args.steps or math.ceil(args.epochs * len(self.learned.prompts) / args.problems) * args.updates


def read_prompts(
    option: str, files: list[Path], tokenizer: Tokenizer, config: ModelConfig, most: int | None, date: datetime.date
) -> Prompts:
    """Reads and tokenizes the prompts of files, which the option names.

    Raises: OSError, ValueError, ImportError: a file or a row is wrong, or no prompt has `most` tokens or fewer.
    """
    digest, prompts, columns, num_left_out = hashlib.sha256(), list[Prompt](), dict[str, None](), 0
    for name, prompt in _prompts(files, tokenizer, date):
        if not prompt.ids:
            raise ValueError(f'{name}: "prompt" must have tokens, got {json.dumps(prompt.row[_PROMPT])}')
        jgg.data.check_vocabulary(tokenizer, prompt.ids, config, name)
        if most is not None and len(prompt.ids) > most:
            num_left_out += 1
            continue
        prompts.append(prompt)
        columns |= dict.fromkeys(prompt.row)
        digest.update(json.dumps([*prompt], default=str, sort_keys=True).encode())
    if not prompts:
        found = f"{counted(num_left_out, 'longer one')}" if num_left_out else "none"
        limit = "" if most is None else f" of at most --max-prompt-tokens {most} tokens"
        raise ValueError(f"{option} {', '.join(map(str, files))} must have a prompt{limit}, got {found}")
    columns.pop(_PROMPT)
    return Prompts(prompts, list(columns), num_left_out, digest.hexdigest())


def _prompts(files: list[Path], tokenizer: Tokenizer, date: datetime.date) -> Iterator[tuple[str, Prompt]]:
    """The prompts of files, each with the name of its row."""
    for file in files:
        row: Any
        for name, row in jgg.data.rows(file, needed=_PROMPT):
            try:
                match row:
                    case {"prompt": str(text)}:
                        ids, _ = jgg.data.encode(tokenizer, text)
                    case {"prompt": [{"role": str()}, *_] as messages}:
                        text = jgg.data.prompt_of(tokenizer, messages, date=date)
                        ids, _ = jgg.data.encode(tokenizer, text, is_rendered=True)
                    case _:
                        got = json.dumps(row, default=str)[:80]
                        raise ValueError(f'"prompt" must be a text or a list of messages with roles, got {got}')
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            yield name, Prompt(ids, row)
