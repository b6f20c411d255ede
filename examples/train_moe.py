"""Trains a mixture-of-experts language model on the bytes of any text file, on all devices: `jgg train` with own data.

    python examples/train_moe.py --text book.txt                        # on GPUs layers of Qwen3-30B-A3B's shape
    python examples/train_moe.py --text book.txt --preset tiny          # the default without a GPU: a minute on a CPU
    python examples/train_moe.py --text book.txt --checkpoints run1     # saves, and goes on from there when run again

Tokens are split over all devices, experts over `--expert-parallel` of them; the devices that have the same experts
store all weights split (FSDP). Needs `pip install '.[train]'`.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg.models
import jgg.train
from jgg.sharding import MoESharding

# keys of config.json, bytes of a sequence, sequences of each device, and layers of an iteration of the scan
TINY = dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TINY |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
# Qwen3-30B-A3B but for its 48 layers and its vocabulary; 65 GiB with the state of AdamW
QWEN3 = dict(num_hidden_layers=6, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
QWEN3 |= dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
PRESETS = {"tiny": (TINY, 64, 8, 1), "qwen3-30b-a3b": (QWEN3, 4096, 8, 8)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the file to learn")
    preset = "qwen3-30b-a3b" if jax.default_backend() == "gpu" else "tiny"
    parser.add_argument("--preset", choices=PRESETS, default=preset, help="(%(default)s)")
    parser.add_argument("--batch", type=int, help="sequences on each device (8)")
    parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--expert-parallel", type=int, default=1, help="devices that share the experts (%(default)s)")
    parser.add_argument("--checkpoints", type=Path, help="a folder to save in and to go on from")
    parser.add_argument("--remat", choices=("none", "attention", "names", "all"), default="none", help="(%(default)s)")
    parser.add_argument("--fp8", action="store_true", help="multiply by the experts in FP8")
    return parser.parse_args()


def loss_of(model: jgg.models.Decoder, text: jax.Array):
    """The loss of a batch, [B, S + 1], and what is printed: the loss in nats per byte, and the load of experts."""
    loss, sown = nnx.capture(model.loss, nnx.Intermediate)(text[:, :-1], text[:, 1:])
    (imbalance,), (group_sizes,) = sown["load_balancing_loss"], sown["group_sizes"]
    load = jnp.max(group_sizes, axis=1) / jnp.mean(group_sizes.astype(jnp.float32), axis=1)
    return loss + 0.02 * jnp.mean(imbalance), {"loss": loss, "load": load}


def main() -> None:
    options = parse()
    sizes, length, batch, unroll = PRESETS[options.preset]
    config = dict(model_type="qwen3_moe", vocab_size=256, norm_topk_prob=True, rms_norm_eps=1e-6, rope_theta=1e6)
    config |= sizes | {"initializer_range": sizes["hidden_size"] ** -0.5}
    shape = jax.device_count() // options.expert_parallel, options.expert_parallel
    mesh = jax.make_mesh(shape, ("fsdp", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = MoESharding(mesh, fsdp="fsdp", expert="expert")
    model = jgg.models.Decoder(
        jgg.models.model_config(config),
        remat=options.remat,
        unroll=unroll,
        quantization=jgg.Fp8() if options.fp8 else None,
        sharding=sharding,
        rngs=nnx.Rngs(0),
    )
    # attention adds little to the embedding at first: else all tokens become the same mean and choose the same experts
    model.w_embedding[...] *= sizes["hidden_size"] ** 0.5
    model.layers.attention.w_o[...] *= (0.1 / sizes["num_hidden_layers"]) ** 0.5

    text = np.frombuffer(options.text.read_bytes(), np.uint8)
    lengths = np.full((options.batch or batch) * jax.device_count(), length)

    def batch_of(step: int) -> np.ndarray:
        """Random windows of the text, uint8 [batch, S + 1]; a step has the same windows in every run."""
        starts = np.random.default_rng(step).integers(0, len(text) - length, len(lengths))
        return text[starts[:, None] + np.arange(length + 1)]

    schedule = optax.warmup_cosine_decay_schedule(0, 1e-3, 20, max(options.steps, 21))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    place = sharding.named(sharding.token_spec)
    trainer = jgg.train.Trainer(model, optimizer, loss_of, lengths_of=lambda _: lengths, batch_sharding=place)
    for record in trainer.fit(batch_of, options.steps, first=True, checkpoints=options.checkpoints):
        loss, load = record.metrics["loss"][-1], record.metrics["load"][-1]
        fullest = f"fullest expert {load.mean():.1f}, at most {load.max():.1f} x even"
        print(f"step {record.step}: loss {loss:.3f}, {record.speed}, {fullest}", flush=True)


if __name__ == "__main__":
    main()
