"""Teaches a model to answer by reinforcement learning with GRPO: one model samples the answers and learns from them.

    jgg demo --save tiny
    python examples/grpo.py tiny --output adapter
    python examples/grpo.py FOLDER --output adapter --batch-invariant --remat all --learning-rate 1e-4

FOLDER has config.json, safetensors files and tokenizer.json. The task here is to write as many characters of a kind as
asked, and then to end the line. For another one, replace `new_problem` and `reward_of`: any prompt, and any number that
says how good an answer is.

Each step draws some answers to each of a few new problems. The answers that are better than the mean of their problem
become likelier, the others less likely. LoRA adapters learn; the model without them is the reference of --kl.

What the gradient needs of the sampler, the log-probabilities of the tokens that it drew, is right if the trainer
computes the same. With --batch-invariant it does on a GPU, bit for bit; the program prints the largest difference. With
--replay the trainer takes the experts that the sampler chose, which removes the largest part of the difference where
bits are not the same. Needs `pip install '.[train]'`.

Sources: GRPO, https://arxiv.org/abs/2402.03300; the mean over all tokens of a batch, two bounds of the ratio and no KL
term by default, as in DAPO, https://arxiv.org/abs/2503.14476; replay, https://arxiv.org/abs/2510.11370.
"""

import argparse
import functools
import string
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg.cli
import jgg.hf
import jgg.models
import jgg.train
from jgg.cli.arguments import Parser, number, positive_float, positive_int, seed, whole
from jgg.cli.errors import enough_memory, one_line
from jgg.cli.files import Target, check_files
from jgg.cli.memory import take_most
from jgg.cli.training.results import AdapterOutput
from jgg.data import check_vocabulary, encode, load_tokenizer, stop_tokens

EXPERTS = {"bfloat16": "dense", "as-stored": "as stored", "fp8": jgg.Fp8()}
LONGEST_PROMPT = 12  # tokens; programs are compiled for this length
KINDS = {"digits": string.digits, "letters": string.ascii_lowercase, "capitals": string.ascii_uppercase}


class Problem(NamedTuple):
    """A prompt, and what answers are compared with."""

    prompt: str
    characters: str  # one of KINDS
    count: int  # of characters, before the end of the line


def new_problem(rng: np.random.Generator) -> Problem:
    """Asks for a line of 1 to 4 characters of a kind, such as "3 digits: "."""
    kind, count = rng.choice(list(KINDS)), int(rng.integers(1, 5))
    return Problem(f"{count} {kind}: ", KINDS[kind], count)


def reward_of(problem: Problem, text: str) -> float:
    """From 0 to 1: the share of the characters that are right, so that there is something to learn from the start."""
    wanted = [problem.characters] * problem.count + ["\n"]
    right = sum(own in allowed for own, allowed in zip(text, wanted, strict=False))
    return right / max(len(text), len(wanted))


class Sampler:
    """Draws answers to new problems with the trainer's model, and makes batches of them.

    Attributes:
      told: for each batch since the last report the mean reward, the share of answers that are all right, the mean
        length in tokens, and the seconds of sampling.
    """

    def __init__(self, options: argparse.Namespace, tokenizer: Any, config: jgg.models.ModelConfig) -> None:
        self.options, self.tokenizer, self.config, self.told = options, tokenizer, config, []
        own_end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.stops = [*stop_tokens(options.folder), *own_end, *encode(tokenizer, "\n")[0][-1:]]
        self.trainer: jgg.train.Trainer | None = None
        # the trainer may ask for a batch more than once, and does so for --updates
        self.batch_number = functools.lru_cache(1)(self._batch_number)

    def batch_of(self, step: int) -> dict[str, np.ndarray]:
        """The batch of a step, from 1."""
        return self.batch_number((step - 1) // self.options.updates)

    def _batch_number(self, number: int) -> dict[str, np.ndarray]:
        model, options = self.trainer.model, self.options
        jax.block_until_ready(nnx.state(model, nnx.LoRAParam))  # or the step before would count as sampling
        start = time.perf_counter()
        rng = np.random.default_rng((options.seed, number))
        problems = [new_problem(rng) for _ in range(options.problems)]
        prompts, lengths = self._prompts(problems)
        drawn = jgg.models.generate(
            model,
            prompts,
            options.max_new_tokens,
            lengths=lengths,
            temperature=1.0,
            seeds=rng.integers(2**31, size=len(problems)),
            num_samples=options.samples,
            stop_tokens=self.stops,
            details=True,
        )
        rewards = self._rewards(problems, drawn)
        rows = drawn.training_rows(prompts, lengths)
        seconds = time.perf_counter() - start
        self.told.append((np.mean(rewards), np.mean(rewards == 1), np.mean(drawn.lengths), seconds))
        return self._batch(rows, advantages_of(rewards))

    def _prompts(self, problems: list[Problem]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of prompts, int32 [problems, LONGEST_PROMPT], and their lengths."""
        ids = [encode(self.tokenizer, problem.prompt)[0] for problem in problems]
        lengths = np.array([len(own) for own in ids], np.int32)
        if not 0 < lengths.min() <= lengths.max() <= LONGEST_PROMPT:
            raise SystemExit(f"prompts must have 1 to {LONGEST_PROMPT} tokens, got {lengths.min()} to {lengths.max()}")
        with one_line():
            check_vocabulary(self.tokenizer, np.concatenate(ids), self.config, "the prompts")
        return np.array([own + [0] * (LONGEST_PROMPT - len(own)) for own in ids], np.int32), lengths

    def _rewards(self, problems: list[Problem], drawn: Any) -> np.ndarray:
        """The reward of each answer, float [problems, samples]."""
        tokens, lengths = np.asarray(drawn.tokens), np.asarray(drawn.lengths)
        texts = self.tokenizer.batch_decode([own[:length] for own, length in zip(tokens, lengths, strict=True)])
        samples = self.options.samples
        rewards = [reward_of(problems[row // samples], text) for row, text in enumerate(texts)]
        return np.reshape(rewards, (-1, samples))

    def _batch(self, rows: Any, advantages: np.ndarray) -> dict[str, np.ndarray]:
        """What the loss needs of the rows; the first axis is the parts that a batch is computed in."""
        parts, is_new = self.options.accumulate, np.asarray(rows.is_new)
        batch = {
            "tokens": rows.tokens,
            "targets": rows.targets,
            "mask": rows.mask,
            "log_probabilities": rows.log_probabilities,
            "advantages": advantages.reshape(-1, 1).astype(np.float32),
            # the mean of the parts' losses is then the mean over all new tokens of the batch
            "weights": is_new * np.float32(parts / is_new.sum()),
        }
        batch = {name: np.asarray(array).reshape(parts, -1, *array.shape[1:]) for name, array in batch.items()}
        if self.options.replay:
            layers, _, *others = rows.topk_indices.shape
            choices = np.asarray(rows.topk_indices).reshape(layers, parts, -1, *others)
            batch["topk_indices"] = np.moveaxis(choices, 1, 0)
        # the trainer gives the mean of the parts' metrics: each part's number stands in a place of its own
        return batch | {"place": parts * np.eye(parts, dtype=np.float32)}


def advantages_of(rewards: np.ndarray) -> np.ndarray:
    """How much better each answer is than the mean of its problem, in standard deviations; [problems, samples]."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    return centered / (rewards.std(axis=1, keepdims=True) + 1e-4)


def loss_of(options: argparse.Namespace):
    """The function that gives the loss of a part of a batch, and what is printed of it."""

    def loss(model: jgg.models.Decoder, part: dict[str, jax.Array]):
        inputs = part["tokens"], part["targets"]
        is_new, weights = part["weights"] > 0, part["weights"]
        log_probabilities = -model.losses(*inputs, mask=part["mask"], topk_indices=part.get("topk_indices"))
        difference = jnp.where(is_new, log_probabilities - part["log_probabilities"], 0.0)
        ratio = jnp.exp(difference)
        bounded = jnp.clip(ratio, 1 - options.clip[0], 1 + options.clip[1])
        gains = jnp.minimum(ratio * part["advantages"], bounded * part["advantages"])
        value = -jnp.sum(weights * gains)
        if options.kl:
            # not below 0, and its mean is the KL divergence: http://joschu.net/blog/kl-approx.html
            of_reference = -jax.lax.stop_gradient(model.losses(*inputs, mask=part["mask"], adapters=False))
            further = jnp.where(is_new, of_reference - log_probabilities, 0.0)
            value += options.kl * jnp.sum(weights * (jnp.exp(further) - further - 1))
        return value, part["place"] * jnp.max(jnp.abs(difference))

    return loss


def load(options: argparse.Namespace) -> jgg.models.Decoder:
    """The model, with new adapters."""
    return jgg.models.load(
        options.folder,
        dtype=options.dtype,
        experts=EXPERTS[options.experts],
        remat=options.remat,
        lora_rank=options.lora_rank,
        lora_alpha=2.0 * options.lora_rank,
        batch_invariant=options.batch_invariant,
        rngs=nnx.Rngs(options.seed),
    )


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Adam with a rate that rises in the first steps and then falls to 0.

    When most answers are right, the gradient is only noise, but Adam's steps stay as long. With a constant rate, the
    model would then unlearn what it had learned.
    """
    steps, peak = options.steps * options.updates, options.learning_rate
    rate = optax.warmup_cosine_decay_schedule(peak / 10, peak, min(10, steps // 4), steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.95))


def train(options: argparse.Namespace) -> None:
    """Trains, prints and writes the adapter; what can be wrong is looked at before the model is loaded."""
    output = AdapterOutput(options.output)
    with one_line():
        check = functools.partial(output.check, "--output", options.output)
        target = Target("--output", options.output, "a folder", options.output, check, is_whole=False)
        check_files([("FOLDER", options.folder)], [target])
        config = jgg.models.model_config(jgg.hf.read_config(options.folder))
        sampler = Sampler(options, load_tokenizer(options.folder), config)
        model = load(options)
    optimizer = make_optimizer(options)
    sampler.trainer = jgg.train.Trainer(model, optimizer, loss_of(options), wrt=nnx.LoRAParam, accumulate=True)
    updates, every = options.updates, (options.log_every * options.updates, options.save_every * options.updates)
    last = options.steps * updates
    saved_after = {*range(every[1], last, every[1]), last}
    for record in sampler.trainer.fit(sampler.batch_of, last, every=every, first=True):
        report(record, sampler, updates)
        if record.step in saved_after:
            output.write(sampler.trainer.model)
    print(f"wrote {output.folder}")


def report(record: jgg.train.Record, sampler: Sampler, updates: int) -> None:
    """Prints what was measured of the batches since the last report."""
    if not sampler.told:  # the record has later updates alone, of a batch that is reported already
        return
    step = -(-record.step // updates)
    (reward, is_right, length, sampling), sampler.told = np.mean(sampler.told, axis=0), []
    seconds = record.speed.seconds * updates / len(record.metrics)
    # the first batch is drawn before the first step is timed
    of_sampling = f"{sampling:.2f} s of it" if step > 1 else f"after {sampling:.0f} s of compiling and"
    print(
        f"step {step}: reward {reward:.3f}, {is_right:.0%} right, {length:.1f} tokens, "
        f"sampler and trainer differ by up to {np.max(of_first_updates(record, updates)):.3g}, "
        f"{seconds:.2f} s a step, {of_sampling} sampling",
        flush=True,
    )


def of_first_updates(record: jgg.train.Record, updates: int) -> np.ndarray:
    """The differences of each batch's first update: later ones are of another model than the one that drew it."""
    steps = np.arange(record.step - len(record.metrics), record.step)  # from 0
    return record.metrics[steps % updates == 0]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of a command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, positive, share = positive_int, positive_float, number("0 or more", lambda value: value >= 0)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--steps", type=count, default=400, help="batches of answers (%(default)s)")
    parser.add_argument("--problems", type=count, default=16, help="in a batch (%(default)s)")
    parser.add_argument("--samples", type=whole(2), default=16, help="answers to a problem (%(default)s)")
    parser.add_argument("--max-new-tokens", type=count, default=6, help="of an answer (%(default)s)")
    parser.add_argument("--updates", type=count, default=1, help="steps of the optimizer for a batch (%(default)s)")
    parser.add_argument("--accumulate", type=count, default=1, help="parts in which a batch is learned (%(default)s)")
    parser.add_argument("--learning-rate", type=positive, default=2e-3, help="the highest (%(default)s)")
    parser.add_argument("--lora-rank", type=whole(1, 2**16), default=16, help="(%(default)s)")
    parser.add_argument("--clip", type=share, nargs=2, default=(0.2, 0.28), help="bounds of the ratio: 1 - a, 1 + b")
    parser.add_argument("--kl", type=share, default=0.0, help="weight of the distance from the model without adapters")
    parser.add_argument("--batch-invariant", action="store_true", help="the trainer computes the sampler's bits")
    parser.add_argument("--replay", action="store_true", help="the trainer takes the experts that the sampler chose")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help="their dtype (%(default)s)")
    parser.add_argument("--remat", choices=("none", "attention", "names", "all"), default="none", help="(%(default)s)")
    parser.add_argument("--save-every", type=count, default=100, help="steps (%(default)s)")
    parser.add_argument("--log-every", type=count, default=10, help="steps (%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="(%(default)s)")
    parser.set_defaults(parser=parser)
    options = parser.parse_args(arguments)
    if options.problems * options.samples % options.accumulate:
        parser.error("--accumulate must divide --problems times --samples")
    return options


def main(arguments: list[str] | None = None) -> None:
    def run(options: argparse.Namespace) -> int:
        with enough_memory("--problems, --samples or --lora-rank, or more of --accumulate or --remat"):
            try:
                train(options)
            except jgg.train.TrainingError as error:
                raise SystemExit(f"grpo.py: {error}") from error
        return 0

    take_most()
    if code := jgg.cli.run(parse(arguments), run):  # which tells mistakes in one line
        raise SystemExit(code)


if __name__ == "__main__":
    main()
