"""Fine-tunes a model of a Hugging Face folder with LoRA, on one device: the heart of `jgg finetune`, to be changed.

    python examples/finetune.py FOLDER --data train.jsonl --output adapter --checkpoints run1

Run again, it goes on from the last checkpoint. Needs `pip install '.[train]'`.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import optax
from flax import nnx

import jgg.data
import jgg.models
import jgg.train
from jgg.cli.errors import UsageError
from jgg.cli.training.results import AdapterOutput


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--data", type=Path, required=True, help="JSONL or parquet, as docs/fine-tune.md describes it")
    parser.add_argument("--output", type=Path, required=True, help="the adapter's folder")
    parser.add_argument("--checkpoints", type=Path, help="a folder to save in and to go on from")
    parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences at once (%(default)s)")
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-4, help="(%(default)s)")
    return parser.parse_args(arguments)


def loss_of(model: jgg.models.Decoder, batch):
    """The loss of a part of a batch, and what is printed of it: the mean loss of the tokens that are learned."""
    segments = batch["segments"]  # the example that each token is of, 0 for padding, which goes to no expert
    call = nnx.capture(model.loss, nnx.Intermediate)
    loss, sown = call(batch["tokens"], batch["targets"], segments, weights=batch["weights"], mask=segments > 0)
    (imbalance,) = sown["load_balancing_loss"]
    return loss + jgg.train.balance_weight(model.config) * jnp.mean(imbalance), loss


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    output = AdapterOutput(options.output, options.checkpoints)
    try:
        output.check("--output", options.output)  # it has no adapter of another run
    except UsageError as error:
        raise SystemExit(f"finetune.py: {error}") from error
    tokenizer = jgg.data.load_tokenizer(options.folder)
    ends = jgg.data.stop_tokens(options.folder)
    batches = jgg.data.batches(
        options.data,
        tokenizer,
        length=options.sequence_length,
        batch_size=options.batch_size,
        end_token=ends[0] if ends else None,
    )
    print(f"{batches.num_sequences} sequences, {batches.fill:.0%} full; {len(batches)} steps are an epoch")

    # frozen weights in bfloat16, adapters in float32
    model = jgg.models.load(options.folder, remat="names", lora_rank=16, lora_alpha=32)
    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.0))

    # accumulate: a batch has a first axis of parts, here one, over which gradients are added up
    settings = {"wrt": nnx.LoRAParam, "accumulate": True, "lengths_of": jgg.data.lengths_of}
    trainer = jgg.train.Trainer(model, optimizer, loss_of, **settings)
    for record in trainer.fit(batches.of_step, options.steps, first=True, checkpoints=options.checkpoints):
        print(f"step {record.step}: loss {record.metrics[-1]:.4f}, {record.speed}", flush=True)
    print(f"wrote {output.write(trainer.model)}")


if __name__ == "__main__":
    main()
