"""Fine-tunes a model from a Hugging Face folder with LoRA, on one device, and writes an adapter that PEFT loads.

    python examples/finetune.py FOLDER --data train.jsonl --output adapter --checkpoints run1
    python examples/generate.py FOLDER adapter --prompt "Once upon a time"

FOLDER has config.json, safetensors files and tokenizer.json. Each line of the data is a JSON object:

    {"prompt": "...", "completion": "..."}    learns the completion and the token that ends a text
    {"text": "..."}                           learns all of it
    {"messages": [{"role": ..., "content": ...}, ...]}    learns the last message alone, which is the assistant's

A row of messages may have "tools". Transformers tokenizes, and writes messages by the folder's chat template. The
adapter's folder notes the tokens that ended what was learned, and generate.py stops at them. With --checkpoints, the
same command run again goes on from the last checkpoint. A loss that is not finite ends the training before anything is
written.

Examples are packed into sequences and attend to themselves alone; the positions that are left at the end of a sequence
count in no loss. Attention is then computed for all pairs of tokens, and masked. With --no-packing each sequence has
one example and attention is causal, whose masked half cuDNN's kernel skips: better for long examples.

`jgg.train.Trainer` is the loop, and counts the FLOPs behind MFU. Needs `pip install '.[flax,hf]' transformers jinja2`,
and the files beside it that it imports.
"""

import argparse
import functools
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from arguments import enough_memory
from finetune_options import EXPERTS, check_folder, check_same_run, parse
from flax import nnx
from folders import check_vocabulary, end_of, load_tokenizer, one_line, parts_of, read_config, stop_tokens
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from training_data import batch_of, lengths_of, pack, read_examples

import jgg
import jgg.models
import jgg.train


def balance_weight(config: jgg.models.ModelConfig) -> float:
    """The weight of the routers' balancing loss: the loss of transformers is topk times that of jgg."""
    coefficient = parts_of(config.hf)[-1].get("router_aux_loss_coef")
    coefficient = 0 if coefficient is None else coefficient
    if isinstance(coefficient, bool) or not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
        raise SystemExit(f"router_aux_loss_coef must be a number of at least 0 or null, got {coefficient!r}")
    return coefficient * config.moe.topk


def loss_of(options: argparse.Namespace, balance_weight: float):
    """The function that gives the loss of a part of a batch and, without the routers' losses, what is printed of it."""

    def loss(model: jgg.models.Decoder, part: dict[str, jax.Array]):
        segments = part["segments"] if options.packing else None  # causal attention never sees what follows an example
        call, is_real = nnx.capture(model.loss, nnx.Intermediate), part["segments"] > 0
        learned, sown = call(part["tokens"], part["targets"], segments, weights=part["weights"], mask=is_real)
        (balance,) = sown["load_balancing_loss"]
        return learned + balance_weight * jnp.mean(balance), learned

    return loss


def make_trainer(options: argparse.Namespace, config: jgg.models.ModelConfig, steps: int) -> jgg.train.Trainer:
    """Loads the model, and makes what trains its adapters."""
    model = jgg.models.load(
        options.folder,
        experts=EXPERTS[options.experts],
        remat=options.remat,
        lora_rank=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_targets=tuple(options.targets),
        rngs=nnx.Rngs(options.seed),
    )
    rate, warmup = options.learning_rate, max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(rate / warmup, rate, warmup, max(steps, warmup + 1))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))
    loss = loss_of(options, balance_weight(config))
    return jgg.train.Trainer(model, optimizer, loss, wrt=nnx.LoRAParam, accumulate=True, lengths_of=lengths_of)


def read_data(options: argparse.Namespace, config: jgg.models.ModelConfig) -> tuple[dict[str, np.ndarray], list[int]]:
    """The packed data, and the tokens that end a text: those of the folder, and those that end what is learned."""
    tokenizer = load_tokenizer(options.folder)
    examples = read_examples(options, tokenizer)
    check_vocabulary(tokenizer, np.concatenate([ids for ids, _ in examples]), config, options.data)
    ends = {end_of(tokenizer, ids) for ids, _ in examples if len(ids) <= options.sequence_length} - {None}
    ends = list(dict.fromkeys([*stop_tokens(options.folder), *sorted(ends)]))
    return pack(examples, options.sequence_length, options.packing), ends


def run_steps(trainer: jgg.train.Trainer, data: dict[str, np.ndarray], options: argparse.Namespace, steps: int) -> None:
    """Trains from the last checkpoint on, saves others and prints progress."""
    columns, console = (*Progress.get_default_columns(), MofNCompleteColumn()), Console(stderr=True)
    # no automatic refresh: its thread would disturb what is timed
    bar = Progress(*columns, console=console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
    saving = {"checkpoints": options.checkpoints, "save_every": options.save_every}
    with bar:
        task = bar.add_task("training", total=steps)
        batches = functools.partial(batch_of, data, options=options)
        for record in trainer.fit(batches, steps, every=(options.log_every,), first=True, **saving):
            print(f"step {record.step}: loss {record.metrics[-1]:.4f}, {record.speed}", flush=True)
            bar.update(task, completed=record.step, refresh=True)


def train(options: argparse.Namespace) -> None:
    """Trains and writes the adapter; what can be wrong is looked at before the model is loaded."""
    check_folder("--output", options.output, [options.folder])
    config = read_config(options.folder)
    balance_weight(config)
    data, ends = read_data(options, config)
    count, full = len(data["tokens"]), np.mean(data["segments"] > 0)
    steps = options.steps or math.ceil(options.epochs * count / (options.batch_size * options.accumulate))
    if steps >= 2**31:
        raise SystemExit(f"--epochs must be of less than {2**31} steps, got {options.epochs}")
    if options.checkpoints is not None:
        check_folder("--checkpoints", options.checkpoints, [options.folder, options.output])
        check_same_run(options, steps)
    print(f"{count} sequences, {full:.0%} full, for {steps} steps", flush=True)
    with one_line():
        trainer = make_trainer(options, config, steps)
    try:
        run_steps(trainer, data, options, steps)
    except jgg.train.TrainingError as error:
        raise SystemExit(str(error)) from error
    jgg.models.save_adapter(trainer.model, options.output)
    if ends:
        note = json.dumps({"eos_token_id": ends}, indent=2) + "\n"
        (options.output / "generation_config.json").write_text(note, encoding="utf-8")
    print(f"wrote {options.output}")


def main(arguments: list[str] | None = None) -> None:
    options = parse(__doc__, arguments)
    with enough_memory("--batch-size, --sequence-length or --lora-rank, or more of --remat"):
        train(options)


if __name__ == "__main__":
    main()
