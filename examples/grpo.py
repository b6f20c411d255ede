"""Teaches a model to answer by reinforcement learning with GRPO: one model samples the answers and learns from them.

    jgg demo --save model
    python examples/grpo.py model --output adapter --dtype float32

The task is to write as many characters of a kind as asked, and then to end the line. Each step draws 16 answers to each
of 16 new problems; those that are better than the mean of their problem become likelier. For a task of your own,
replace `new_problem` and `reward_of`, or give `jgg grpo` a file of prompts: it has GRPO's variants, checkpoints and
several GPUs. The difference that is printed is 0 on a GPU with `load(..., batch_invariant=True)`.
"""

import argparse
import string
from pathlib import Path

import numpy as np
import optax
from flax import nnx

import jgg
from jgg.train import grpo

KINDS = {"digits": string.digits, "letters": string.ascii_lowercase, "capitals": string.ascii_uppercase}
PROBLEMS, SAMPLES, NEW_TOKENS, LONGEST = 16, 16, 6, 12  # the last is of prompts, in tokens


def new_problem(rng):
    """A prompt, such as "3 digits: ", and the characters that each place of the answer may have."""
    kind, count = rng.choice(list(KINDS)), int(rng.integers(1, 5))
    return f"{count} {kind}: ", [KINDS[kind]] * count + ["\n"]


def reward_of(wanted, text):
    """From 0 to 1: the share of the characters that are right, so that there is something to learn from the start."""
    return sum(own in allowed for own, allowed in zip(text, wanted, strict=False)) / max(len(text), len(wanted))


def train(folder, output, steps, dtype, rate=2e-3):
    tokenizer, told = jgg.data.load_tokenizer(folder), []
    stops = [*jgg.data.stop_tokens(folder), *jgg.data.encode(tokenizer, "\n")[0][-1:]]
    model = jgg.models.load(folder, dtype=dtype, lora_rank=16, lora_alpha=32.0, rngs=nnx.Rngs(0))

    def batch_of(step):
        rng = np.random.default_rng((0, step - 1))
        problems = [new_problem(rng) for _ in range(PROBLEMS)]
        ids = [jgg.data.encode(tokenizer, prompt)[0] for prompt, _ in problems]
        lengths = [len(own) for own in ids]
        prompts = np.array([own + [0] * (LONGEST - len(own)) for own in ids])  # one shape, for one program
        options = {"temperature": 1.0, "num_samples": SAMPLES, "stop_tokens": stops, "details": True}
        seeds = rng.integers(2**31, size=PROBLEMS)
        drawn = jgg.models.generate(trainer.model, prompts, NEW_TOKENS, lengths=lengths, seeds=seeds, **options)
        answers = zip(np.asarray(drawn.tokens), np.asarray(drawn.lengths), strict=True)
        texts = tokenizer.batch_decode([own[:length] for own, length in answers])
        rewards = [reward_of(problems[row // SAMPLES][1], text) for row, text in enumerate(texts)]
        told.append((np.mean(rewards), np.mean(np.equal(rewards, 1)), np.mean(drawn.lengths)))
        rows, advantages = drawn.training_rows(prompts, lengths), np.reshape(rewards, (PROBLEMS, SAMPLES))
        return grpo.batch_of(rows, grpo.token_weights(rows.is_new), grpo.advantages(advantages))

    # with a rate that stays as it is, a model unlearns what it had learned: Adam's steps are as long where all is noise
    schedule = optax.warmup_cosine_decay_schedule(rate / 10, rate, min(10, steps // 4), steps + 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, b2=0.95))
    trainer = jgg.train.Trainer(model, optimizer, grpo.loss_of(), wrt=nnx.LoRAParam, accumulate=True)
    for record in trainer.fit(batch_of, steps, first=True):
        (reward, right, length), told[:] = np.mean(told, axis=0), []
        seconds = record.speed.seconds / len(record.metrics["tokens"])
        line = (
            f"step {record.step}: reward {reward:.3f}, {right:.0%} right, {length:.1f} tokens, {seconds:.2f} s a step"
        )
        difference = np.max(record.metrics["differences"])
        print(f"{line}, sampler and trainer differ by up to {difference:.3g}", flush=True)
    jgg.models.save_adapter(trainer.model, output)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the model, with config.json, safetensors files, tokenizer.json")
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--steps", type=int, default=400, help="batches of answers (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the computation (%(default)s)")
    train(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
