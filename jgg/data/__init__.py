"""Reads texts for whole models: the tokenizer and the chat template of a Hugging Face folder."""

from jgg.data.tokenizers import check_vocabulary, continuation, encode, end_of, load_tokenizer, stop_tokens

__all__ = ["check_vocabulary", "continuation", "encode", "end_of", "load_tokenizer", "stop_tokens"]
