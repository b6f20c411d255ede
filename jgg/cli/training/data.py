"""The data of a run, by its options."""

import datetime
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jgg.data
from jgg.cli.errors import UsageError
from jgg.cli.training.folders import first_day
from jgg.core.files import replace_text
from jgg.hf.files import read_object
from jgg.models import ModelConfig

_LARGEST_STEP = 2**26  # tokens; a batch lies in memory


class Data(NamedTuple):
    """What a run learns, and what it measures its loss by.

    Attributes:
      batches: of --data.
      held_out: of --eval-data, or None.
      end_tokens: those that end a text: the folder's, and those that end what is learned.
      date: what chat templates that write the date take for today: the day on which the run began.
    """

    batches: jgg.data.Batches
    held_out: jgg.data.Batches | None
    end_tokens: list[int]
    date: datetime.date

    def steps(self, args) -> int:
        """The number of the last step."""
        steps = args.steps or math.ceil(args.epochs * self.batches.num_sequences / (args.batch_size * args.accumulate))
        if steps >= 2**31:
            raise UsageError(f"--epochs must be of less than {2**31} steps, got {args.epochs}")
        return steps

    @property
    def skipped(self) -> dict[str, int | None]:
        """How many rows of each option --skip-unmarked skipped, by the names of the log; None for none."""
        held_out = self.held_out.num_skipped if self.held_out else 0
        return {"skipped_rows": self.batches.num_skipped or None, "eval_skipped_rows": held_out or None}

    def in_words(self) -> str:
        """What is learned."""
        own = self.batches
        skipped = "".join(
            f", {counted(number, 'row')} of {option} skipped that the chat template cannot mark"
            for option, number in zip(("--data", "--eval-data"), self.skipped.values(), strict=True)
            if number
        )
        cut = f", {own.num_cut} cut to --sequence-length" if own.num_cut else ""
        left_out = f", {counted(own.num_left_out, 'row')} left out without tokens to learn" if own.num_left_out else ""
        examples, sequences = counted(own.num_examples, "example"), counted(own.num_sequences, "sequence")
        return f"{examples}{cut}{left_out}{skipped}: {sequences}, {own.fill:.0%} full"


def data_of(args, folder: Path, model: Path, config: ModelConfig) -> Data:
    """Reads --data and --eval-data.

    Args:
      args: the options.
      folder: the tokenizer's folder.
      model: the folder of config.json, which says what ends a text if the tokenizer's does not.
      config: the model's.

    Raises: UsageError, OSError, ValueError, ImportError: an option, the folder or the data are wrong.
    """
    step = args.batch_size * args.accumulate * args.sequence_length
    if step > _LARGEST_STEP:
        names = "--batch-size times --accumulate times --sequence-length"
        raise UsageError(f"{names} must be at most {_LARGEST_STEP} tokens, got {step}")
    if args.mix is not None and len(args.mix) != len(args.data):
        raise UsageError(f"--mix must have a share for each of {len(args.data)} files, got {len(args.mix)}")
    if args.mix is not None and len(set(args.data)) < len(args.data):
        raise UsageError(f"--mix needs each file of --data once, got {', '.join(map(str, args.data))}")
    tokenizer, ends = jgg.data.load_tokenizer(folder), jgg.data.stop_tokens(folder)
    if not ends and tokenizer.eos_token_id is None:
        ends = [token for token in jgg.data.stop_tokens(model) if token < len(tokenizer)]
    sizes = {"length": args.sequence_length, "batch_size": args.batch_size, "packing": args.packing}
    date = first_day(args)
    sizes |= {"splits": args.split, "end_token": ends[0] if ends else None, "date": date}
    sizes |= {"skip_unmarked": args.skip_unmarked}

    def read(option: str, files: Any, **options: Any) -> jgg.data.Batches:
        found = jgg.data.batches(files, tokenizer, **sizes, **options)
        where = f"{option} {', '.join(map(str, files))}"
        jgg.data.check_vocabulary(tokenizer, [found.largest_token], config, where)
        return found

    files = args.data if args.mix is None else dict(zip(args.data, args.mix, strict=True))
    batches, held_out = read("--data", files, accumulate=args.accumulate, seed=args.seed), None
    if args.eval_data is not None:
        held_out = read("--eval-data", args.eval_data, seed=None, normalize=False)
    return Data(batches, held_out, list(dict.fromkeys([*ends, *batches.end_tokens])), date)


def note_ends(folder: Path, end_tokens: list[int]) -> None:
    """Notes in a folder's generation_config.json, which may be there, the tokens that end a text."""
    path = folder / "generation_config.json"
    if end_tokens:
        content = (read_object(path) if path.exists() else {}) | {"eos_token_id": end_tokens}
        replace_text(path, json.dumps(content, indent=2) + "\n")


def counted(number: int, what: str) -> str:
    """The number with its noun, such as "1 step" or "2 steps"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
