"""Texts for whole models: reads rows, tokenizes them as a Hugging Face folder says, and makes batches."""

from jgg.data.batching import Batches, batches
from jgg.data.chat import encode_conversation, prompt_of
from jgg.data.examples import Example, examples_of
from jgg.data.packing import lengths_of
from jgg.data.reading import rows
from jgg.data.rendering import UnmarkedError
from jgg.data.tokenizers import check_vocabulary, continuation, encode, end_of, load_tokenizer, stop_tokens

__all__ = [
    "Batches",
    "Example",
    "UnmarkedError",
    "batches",
    "check_vocabulary",
    "continuation",
    "encode",
    "encode_conversation",
    "end_of",
    "examples_of",
    "lengths_of",
    "load_tokenizer",
    "prompt_of",
    "rows",
    "stop_tokens",
]
