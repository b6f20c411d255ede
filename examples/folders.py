"""What the examples read of a Hugging Face folder; errors end the program in one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jgg.data
import jgg.hf
import jgg.models
from jgg.data.chat import render
from jgg.hf.files import read_object

__all__ = [
    "check_vocabulary",
    "continuation",
    "encode",
    "end_of",
    "load_tokenizer",
    "one_line",
    "parts_of",
    "read_config",
    "read_json",
    "render",
    "stop_tokens",
]

continuation, encode, end_of = jgg.data.continuation, jgg.data.encode, jgg.data.end_of


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Ends the program by the message of an error, in one line, in the place of a traceback."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise SystemExit(" ".join(str(error).split())) from error


read_json = one_line()(read_object)
load_tokenizer = one_line()(jgg.data.load_tokenizer)
stop_tokens = one_line()(jgg.data.stop_tokens)
check_vocabulary = one_line()(jgg.data.check_vocabulary)


def read_config(folder: Path) -> jgg.models.ModelConfig:
    """What config.json says of the model."""
    if folder.exists() and not folder.is_dir():
        raise SystemExit(f"{folder} must be a model's folder, got a file")
    with one_line():
        return jgg.models.model_config(jgg.hf.read_config(folder))


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The content of config.json, and its "text_config" where the language model is beside towers."""
    return [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
