"""Draws answers to prompts with the model that is trained, rewards them, and makes batches of them."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jgg.models
from jgg.cli.grpo.prompts import Data, Prompt
from jgg.cli.grpo.rewards import Reward
from jgg.data.tokenizers import Tokenizer, special_token
from jgg.models.rollouts import Generated
from jgg.train import grpo


class Answers(NamedTuple):
    """Answers to P prompts, S to each, whose rows are next to each other.

    Attributes:
      rows: TrainingRows of NumPy arrays, also topk_indices with the rows first: int32 [R, L, W, k].
      rewards: float64 [P, S].
      lengths: int [P, S], in tokens.
      is_cut: bool [P, S], where no stop token ended the answer.
    """

    rows: Any
    rewards: np.ndarray
    lengths: np.ndarray
    is_cut: np.ndarray

    @property
    def is_equal(self) -> np.ndarray:
        """Which prompts' answers all have the same reward, from which nothing is learned; bool [P]."""
        return np.ptp(self.rewards, axis=1) == 0

    def replaced(self, places: np.ndarray, other: "Answers", others: np.ndarray) -> "Answers":
        """These answers with those to some prompts, at `places`, replaced by other answers, at `others`."""

        def of_prompts(own: np.ndarray, new: np.ndarray) -> np.ndarray:
            result, new = (each.reshape(len(self.rewards), -1) for each in (own.copy(), new))
            result[places] = new[others]
            return result.reshape(own.shape)

        return jax.tree.map(of_prompts, self, other)


class Sampler:
    """Draws and rewards."""

    def __init__(self, args, data: Data, tokenizer: Tokenizer, reward: Reward) -> None:
        self._args, self._data, self._tokenizer, self._reward = args, data, tokenizer, reward
        own_end = special_token(tokenizer, "eos_token_id")
        self._stops: list[int] = [*data.end_tokens, *([] if own_end is None else [own_end])]
        self._batch: tuple[int, dict[str, np.ndarray]] | None = None
        self._told: list[dict[str, float]] = []  # what is measured of each batch since the last report
        self._before: dict[str, float] = {}  # the means of that report

    def batch_of(self, model: jgg.models.Decoder, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, from 1; steps that learn from the same answers get them again."""
        number = (step - 1) // self._args.updates
        if self._batch is None or self._batch[0] != number:
            jax.block_until_ready(nnx.state(model))  # or the step before would count as sampling
            self._batch = number, self._new_batch(model, number)
        return self._batch[1]

    def held_out_reward(self, model: jgg.models.Decoder) -> float:
        """The mean reward of an answer to each prompt of --eval-prompts."""
        args, prompts = self._args, self._data.held_out.prompts if self._data.held_out else []
        size, rewards = min(args.problems * args.samples, len(prompts)), list[np.ndarray]()
        for start in range(0, len(prompts), size):
            own = prompts[start : start + size]
            padded = [*own, *own[-1:] * (size - len(own))]  # to one shape
            seeds = np.random.default_rng((args.seed, start)).integers(2**31, size=size)
            drawn, *_ = self._sample(model, padded, seeds, args.eval_temperature, 1)
            rewards.append(self._rewards(padded, drawn)[: len(own)])
        return float(np.mean(np.concatenate(rewards)))

    def take_told(self) -> dict[str, float]:
        """Means over the batches since the last report, by the names of the log, and the seconds that were timed."""
        # the first batch of a run is drawn before the first step is timed
        timed = sum(each["sampling_seconds"] for each in self._told[0 if self._before else 1 :])
        if self._told:
            self._before = {name: float(np.mean([each[name] for each in self._told])) for name in self._told[0]}
        self._told = []
        return self._before | {"timed_seconds": timed}

    def _new_batch(self, model: jgg.models.Decoder, number: int) -> dict[str, np.ndarray]:
        """Draws the answers of a batch, from 0, and notes what is measured of them."""
        args, start = self._args, time.perf_counter()
        prompts = self._data.learned
        answers = self._answers(model, prompts.of_batch(number, args.problems, args.seed), number, 0)
        equal, rounds = float(np.mean(answers.is_equal)), 0
        while answers.is_equal.any() and rounds < args.dynamic_sampling:
            rounds += 1
            chosen = np.random.default_rng((args.seed, number, rounds)).choice(len(prompts.prompts), args.problems)
            other = self._answers(model, [prompts.prompts[each] for each in chosen], number, rounds)
            places, others = np.flatnonzero(answers.is_equal), np.flatnonzero(~other.is_equal)
            count = min(len(places), len(others))
            answers = answers.replaced(places[:count], other, others[:count])
        rewards = answers.rewards
        self._told.append(
            {
                "reward": float(np.mean(rewards)),
                "reward_std": float(np.mean(np.std(rewards, axis=1, ddof=1))),
                "equal_rewards": equal,
                "answer_tokens": float(np.mean(answers.lengths)),
                "cut_answers": float(np.mean(answers.is_cut)),
                "further_draws": float(rounds),
                "sampling_seconds": time.perf_counter() - start,
            }
        )
        rows = answers.rows._replace(topk_indices=np.moveaxis(answers.rows.topk_indices, 1, 0))
        weights = grpo.token_weights(rows.is_new, args.aggregation, max_length=args.max_new_tokens)
        advantages = grpo.advantages(rewards, scale=args.scale_rewards)
        options = {"parts": args.accumulate, "replay": args.replay, "at_temperature": args.temperature != 1}
        return grpo.batch_of(rows, weights, advantages, **options)

    def _answers(self, model: jgg.models.Decoder, prompts: Sequence[Prompt], number: int, again: int) -> Answers:
        """Answers to the prompts of a batch; `again` counts the further draws of the same batch."""
        args = self._args
        seeds = np.random.default_rng((args.seed, 1, number, again)).integers(2**31, size=len(prompts))
        drawn, padded, sizes = self._sample(model, prompts, seeds, args.temperature, args.samples)
        rows = drawn.training_rows(padded, sizes)
        choices = jnp.moveaxis(rows.topk_indices if args.replay else rows.topk_indices[:0], 1, 0)
        shape = len(prompts), args.samples
        lengths, tokens = np.asarray(drawn.lengths), np.asarray(drawn.tokens)
        last = tokens[np.arange(len(tokens)), np.maximum(lengths - 1, 0)]
        is_cut = ~np.isin(last, self._stops)
        rewards = self._rewards([prompt for prompt in prompts for _ in range(args.samples)], drawn)
        whole = jax.device_get(rows._replace(topk_indices=choices))
        return Answers(whole, rewards.reshape(shape), lengths.reshape(shape), is_cut.reshape(shape))

    def _sample(
        self, model: jgg.models.Decoder, prompts: Sequence[Prompt], seeds: np.ndarray, temperature: float, samples: int
    ) -> tuple[Generated, np.ndarray, np.ndarray]:
        """Draws answers, in the one place that calls the sampler; also returns the padded prompts and their lengths."""
        held_out = [] if self._data.held_out is None else [self._data.held_out.longest]
        longest = max([self._data.learned.longest, *held_out])  # one shape, for one program
        lengths = np.array([len(prompt.ids) for prompt in prompts], np.int32)
        padded = np.array([prompt.ids + [0] * (longest - len(prompt.ids)) for prompt in prompts], np.int32)
        drawn = jgg.models.generate(
            model,
            padded,
            self._args.max_new_tokens,
            lengths=lengths,
            temperature=temperature,
            seeds=seeds,
            num_samples=samples,
            stop_tokens=self._stops,
            details=True,
            rows=self._args.rows,
            cache_dtype=self._args.cache_dtype,
        )
        return drawn, padded, lengths

    def _rewards(self, prompts: Sequence[Prompt], drawn: Generated) -> np.ndarray:
        """The rewards of answers, one to each prompt, float64 [answers]."""
        ids = [
            own[:length].tolist()
            for own, length in zip(np.asarray(drawn.tokens), np.asarray(drawn.lengths), strict=True)
        ]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = [
            text if isinstance(prompt.row["prompt"], str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        columns = {name: [prompt.row.get(name) for prompt in prompts] for name in self._data.columns}
        own: dict[str, Sequence[object]] = {
            "prompts": [prompt.row["prompt"] for prompt in prompts],
            "completions": completions,
        }
        return self._reward(columns | own | {"completion_ids": ids})
