"""`Speaker`: a model of a folder with its tokenizer, which continues texts and conversations."""

import argparse
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jgg.hf
import jgg.models
from jgg.cli.folders import check_adapter, model_folder
from jgg.cli.generation.settings import settings_of
from jgg.data import check_vocabulary, continuation, encode, load_tokenizer, prompt_of, stop_tokens
from jgg.models.decoder_stacks import as_cache_dtype
from jgg.models.loading import EXPERTS_BY_NAME


class Speaker:
    """Continues prompts as the options of `jgg generate` say.

    What can be wrong with files and texts is found before the model is loaded, by `load` or the first `stream`.

    Attributes:
      settings: how tokens are drawn.
      adapter: the adapter's folder, or None.
      tokenizer: the tokenizer in the model's folder.
      stop_tokens: tokens that end a text: those of folder and adapter, and the tokenizer's end.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._folder = args, model_folder(args.model)
        self.adapter = args.adapter
        check_adapter(self.adapter)
        self._model: jgg.models.Decoder | None = None
        self._config = jgg.models.model_config(jgg.hf.read_config(self._folder))
        if args.cache_dtype is not None:
            as_cache_dtype(args.cache_dtype, self._config)
        self.tokenizer = load_tokenizer(self._folder)
        self.settings = settings_of(args, self._folder)
        ends = [*stop_tokens(self._folder, self.adapter), self.tokenizer.eos_token_id]
        self.stop_tokens = list(dict.fromkeys(token for token in ends if token is not None))

    def load(self) -> jgg.models.Decoder:
        """The model, with the adapter if there is one; it is read once."""
        if self._model is None:
            model = jgg.models.load(self._folder, experts=EXPERTS_BY_NAME[self._args.experts])
            if self.adapter is not None:
                jgg.models.load_adapter(model, self.adapter)
            self._model = model
        return self._model

    def ids_of(self, text: str, where: str, *, is_rendered: bool = False) -> list[int]:
        """The tokens of a prompt, which `where` names; raises ValueError if there is none, or one the model lacks."""
        try:
            ids, _ = encode(self.tokenizer, text, is_rendered=is_rendered)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not ids:
            raise ValueError(f"{where} must have a token, got {text!r}")
        check_vocabulary(self.tokenizer, ids, self._config, where)
        return ids

    def ids_of_chat(self, messages: Sequence[dict[str, Any]], where: str) -> list[int]:
        """The tokens of a conversation by the chat template, which asks for an answer."""
        return self.ids_of(prompt_of(self.tokenizer, messages), where, is_rendered=True)

    def stream(self, ids: list[int], chunk: int, *, is_padded: bool = False, turn: int = 0) -> jgg.models.Stream:
        """The tokens that continue a prompt, as they come.

        Args:
          is_padded: whether to pad the prompt, so that programs are compiled for few lengths.
          turn: number of the answer in a conversation; others draw otherwise.
        """
        width = max(256, 2 ** (len(ids) - 1).bit_length()) if is_padded else len(ids)
        return jgg.models.stream(
            self.load(),
            np.pad(np.asarray([ids], np.int32), ((0, 0), (0, width - len(ids)))),
            self.settings.max_new_tokens,
            lengths=np.asarray([len(ids)]) if is_padded else None,
            key=jax.random.fold_in(jax.random.key(self._args.seed), turn),
            num_samples=self._args.samples,
            stop_tokens=self.stop_tokens,
            prefill_chunk=self._args.prefill_chunk,
            cache_dtype=self._args.cache_dtype,
            chunk=chunk,
            **self.settings.drawing(),
        )

    def texts(self, ids: list[int], stream: jgg.models.Stream) -> Iterator[list[str]]:
        """The text that each sample adds to a prompt's tokens, piece by piece."""
        decoders = [functools.partial(continuation, self.tokenizer, ids)] * self._args.samples
        return jgg.models.stream_text(stream, decoders, stop=self.settings.stop, stop_tokens=self.stop_tokens)

    def speeds(self, ids: list[int]) -> dict[str, float | None]:
        """Speeds of a run of programs that are compiled, in tokens a second, and the peak of memory in bytes."""
        stream = self.stream(ids, self.settings.max_new_tokens)
        times = [time.perf_counter()]
        for _ in stream:  # the first token alone, then all others
            times.append(time.perf_counter())
        decoded = int(stream.lengths.sum()) - len(stream.lengths)
        return {
            "prefill": len(ids) / (times[1] - times[0]),
            "decode": decoded / (times[2] - times[1]) if len(times) > 2 else None,
            "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }
