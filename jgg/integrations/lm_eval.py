"""jgg's models in EleutherAI's lm-eval, as its model "jgg". Tested with lm-eval 0.4.13, which needs no PyTorch for it.

    python -m jgg.integrations.lm_eval --model jgg --model_args pretrained=FOLDER,adapter=FOLDER --tasks TASKS

runs the command `lm_eval` with "jgg" registered. Importing this module registers it too, for
`lm_eval.simple_evaluate(model="jgg", model_args={"pretrained": FOLDER}, tasks=[...])`.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import jgg.models
from jgg.core.arguments import as_int, check
from jgg.core.quantized import count_numbers
from jgg.data.tokenizers import check_vocabulary, encode, load_tokenizer, special_token, stop_tokens, text_of
from jgg.hf import read_config
from jgg.hf.hub import folder_of
from jgg.hf.settings import language_model
from jgg.integrations.lm_eval_batches import Batch, Pair, batches, score
from jgg.models import Decoder
from jgg.models.decoder_stacks import as_cache_dtype
from jgg.models.loading import EXPERTS_BY_NAME
from jgg.models.placement import on_host

_DRAWING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_LENGTH_KEY, _MAX_LENGTH = "max_position_embeddings", 2048  # the latter of a model that does not say
_logger = logging.getLogger("jgg")


class JggLM(TemplateLM):
    """A model in a Hugging Face folder, run by `jgg.models`.

    Requests run in batches of few shapes, the longest first. If all answers to a question are one token long, as in
    MMLU, the question runs through the model once. With several processes, each process has all requests.

    Args:
      pretrained: the folder with config.json, safetensors files and tokenizer.json, or a model's name on the Hub.
      adapter: a folder with a LoRA adapter, for `jgg.models.load_adapter`.
      model: a model that is loaded already; `adapter` then only tells which tokens end a text.
      experts: "bfloat16", in the dtype of the computation; "as-stored", quantized where the folder has them so;
        "fp8", quantized and multiplied in FP8; or "mxfp4", quantized to 4 bits.
      dtype: dtype of the computation.
      batch_size: sequences of a batch; "auto" for as many as have 16,384 tokens. With a sharding it is rounded up to a
        multiple of the devices that split sequences.
      max_length: the maximum number of tokens in a sequence, by default max_position_embeddings of config.json.
        Contexts that exceed the remaining length are cut from the left.
      max_gen_toks: the maximum number of new tokens for requests that do not set one.
      prefix_token_id: the token before a text without a context; by default the tokenizer's bos_token or eos_token.
      seed: for sampling, in tasks that set a temperature.
      cache_dtype: as in `jgg.models.generate`.
      max_batch_size, device: lm-eval passes them to each model; they have no effect.

    Raises: ValueError, OSError: an argument or a file is wrong, as in `jgg.models.load`.
    """

    def __init__(
        self,
        pretrained: str | Path,
        adapter: str | Path | None = None,
        *,
        model: Decoder | None = None,
        experts: str = "bfloat16",
        dtype: str = "bfloat16",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        prefix_token_id: int | None = None,
        seed: int = 0,
        cache_dtype: str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()
        check(experts in EXPERTS_BY_NAME, f"experts must be of {', '.join(EXPERTS_BY_NAME)}, got {experts!r}.")
        is_auto = isinstance(batch_size, str) and batch_size.partition(":")[0] == "auto"
        self.batch_size = None if is_auto else as_int("batch_size", int(batch_size), 1)
        pretrained, self._pretrained = folder_of(pretrained), str(pretrained)
        self.tokenizer = load_tokenizer(pretrained)
        own_ends = [token for token in [special_token(self.tokenizer, "eos_token_id")] if token is not None]
        self._ends = list(dict.fromkeys([*stop_tokens(pretrained, adapter), *own_ends]))
        self._prefix = prefix_token_id
        self.max_length = _max_length(pretrained) if max_length is None else as_int("max_length", max_length, 1)
        self.max_gen_toks, self._seed = as_int("max_gen_toks", max_gen_toks, 1), as_int("seed", seed, 0)
        if model is None:
            model = jgg.models.load(pretrained, experts=EXPERTS_BY_NAME[experts], dtype=dtype)
            if adapter is not None:
                jgg.models.load_adapter(model, adapter)
        self.model = model
        if cache_dtype is not None:
            as_cache_dtype(cache_dtype, model.config, model.options)
        self._cache_dtype = cache_dtype

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        check(bool(self._ends), f"{self._pretrained} must have eos_token_id in generation_config.json, got none")
        return self._ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        own = (special_token(self.tokenizer, name) for name in ("bos_token_id", "eos_token_id"))
        for token in (self._prefix, *own):
            if token is not None:
                return token
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the caches of requests."""
        return self._pretrained.replace("/", "__")

    def get_model_info(self) -> dict[str, object]:
        """What lm-eval writes about the model along with its results."""
        parameters = count_numbers(jax.eval_shape(lambda: self.model))
        return {"model_num_parameters": parameters, "model_dtype": str(self.model.options.dtype)}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The messages as the chat template writes them; without `add_generation_prompt`, the last one goes on."""
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """The tokens of a text, with what the tokenizer puts before it, unless the text begins with that."""
        ids = encode(self.tokenizer, string, is_rendered=add_special_tokens is False)[0]
        check_vocabulary(self.tokenizer, ids, self.model.config, repr(string[:80]))
        return ids

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        for texts, _context, own in requests:
            check(bool(own), f"a continuation must have tokens behind its context, got none in {texts!r}")
        # lm-eval moves white space at the end of a context into the continuation, which may leave no context
        pairs = [Pair(context or [self.prefix_token_id], own) for _, context, own in requests]
        self._tell_of_cuts(len(pair.context) + len(pair.continuation) - 1 for pair in pairs)
        results: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Running loglikelihood requests") as progress:
            for number, answer in score(self.model, pairs, self.batch_size, self.max_length):
                results[number] = answer
                if requests[number][0] is not None:  # which a part of a rolling request has not
                    self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                progress.update()
        return [results[number] for number in range(len(pairs))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The natural logarithm of each text's probability; texts longer than max_length in disjoint windows."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            of_text = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(window)) for window in of_text]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[number] += value
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model adds to each context, up to a text of the option "until" or a token that ends a text.

        Of lm-eval's other options it knows max_gen_toks, do_sample, temperature, and those of `jgg.models.generate`:
        top_p, top_k, min_p and penalties.

        Raises: ValueError: another option, or more new tokens than max_length leaves.
        """
        alike: dict[str, list[int]] = {}  # requests with the same options
        arguments: list[Any] = [request.args for request in requests]  # a context and its options
        for number, (_, kwargs) in enumerate(arguments):
            alike.setdefault(json.dumps(kwargs, sort_keys=True), []).append(number)
        results = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as progress:
            for numbers in alike.values():
                contexts, kwargs = [arguments[number][0] for number in numbers], arguments[numbers[0]][1]
                for index, text in self._generate(contexts, kwargs, numbers):
                    results[numbers[index]] = text
                    self.cache_hook.add_partial("generate_until", (contexts[index], kwargs), text)
                    progress.update()
        return results

    def _generate(
        self, contexts: Sequence[str], kwargs: dict[str, Any], seeds: Sequence[int]
    ) -> Iterator[tuple[int, str]]:
        """Yields the number of each context with what the model adds to it."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(kwargs, self.max_gen_toks))
        until, new = [text for text in options.pop("until") if text], options.pop("max_gen_toks")
        check(new < self.max_length, f"max_gen_toks must be less than max_length, {self.max_length}, got {new}")
        temperature, do_sample = options.pop("temperature", 0.0), options.pop("do_sample")
        unknown = ", ".join(sorted(options.keys() - set(_DRAWING)))
        known = f"until, max_gen_toks, do_sample, temperature, {', '.join(_DRAWING)}"
        check(not unknown, f"options of generation must be of {known}, got {unknown}")
        stops = [ids for text in until if (ids := self._tokens_of_stop(text))]
        whole = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        self._tell_of_cuts(len(ids) + new for ids in whole)
        prompts = [ids[new - self.max_length :] for ids in whole]
        for batch in batches(self.model, [len(ids) for ids in prompts], self.batch_size, more=new):
            # places without a prompt get copies of the first
            places = [*batch.indices, *[batch.indices[0]] * (batch.rows - len(batch.indices))]
            rows = jgg.models.generate(
                self.model,
                _padded([prompts[index] for index in places], batch),
                new,
                lengths=np.array([len(prompts[index]) for index in places]),
                key=jax.random.key(self._seed),
                seeds=np.array([seeds[index] for index in places]),
                stop_tokens=[[token] for token in self._ends] + stops,
                temperature=temperature if do_sample else 0.0,
                cache_dtype=self._cache_dtype,
                **options,
            )
            for index, row in zip(batch.indices, on_host(rows).tolist(), strict=False):
                yield index, self._text(row, stops, until)

    def _tokens_of_stop(self, text: str) -> list[int]:
        """The tokens of a text that ends generation; none where they do not stand for the whole of it."""
        ids = self.tok_encode(text, add_special_tokens=False)
        return ids if text in self.tokenizer.decode(ids) else []

    def _text(self, new: list[int], stops: Sequence[list[int]], until: Sequence[str]) -> str:
        """The text of new tokens before what ends it."""
        cuts = [start for start, token in enumerate(new) if token in self._ends]
        cuts += [n for stop in stops for n in range(len(stop), len(new) + 1) if new[n - len(stop) : n] == stop]
        new = new[: min(cuts, default=len(new))]
        check(-1 not in new, "the model must have finite logits, got NaN for a new token")
        text = text_of(
            self.tokenizer, new, skip_special_tokens=True
        )  # without the prompt, as lm-eval's other models do
        for end in until:  # in this order, as lm-eval's other models do
            text = text.split(end)[0]
        return text

    def _tell_of_cuts(self, lengths: Iterator[int]) -> None:
        cut = sum(length > self.max_length for length in lengths)
        if cut:
            _logger.warning("%d contexts are cut from the left to max_length, %d tokens", cut, self.max_length)


def _padded(rows: Sequence[Sequence[int]], batch: Batch) -> np.ndarray:
    """Int32 [rows, width]."""
    tokens = np.zeros((batch.rows, batch.width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens


register_model("jgg")(JggLM)


def _max_length(folder: str | Path) -> int:
    """max_position_embeddings of config.json, or of the language model that its text_config describes."""
    config = read_config(folder)
    found = config.get(_LENGTH_KEY) or language_model(config).get(_LENGTH_KEY)
    return as_int(_LENGTH_KEY, found, least=1) if found else _MAX_LENGTH


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
