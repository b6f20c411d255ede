"""Trains a decoder-only mixture-of-experts language model on the bytes of any text file, on all devices at hand.

    python examples/train_moe.py --text book.txt                        # on GPUs layers of Qwen3-30B-A3B's shape
    python examples/train_moe.py --text book.txt --preset tiny          # the default without a GPU: a minute on a CPU
    python examples/train_moe.py --text book.txt --checkpoints run1     # saves, and goes on from there when run again

The model is a `jgg.models.Decoder` of the family Qwen3-MoE. Tokens are split over all devices, experts over
`--expert-parallel` of them; the devices that have the same experts store all weights split (FSDP).
`jgg.train.Trainer` is the loop, and counts the FLOPs behind MFU (model FLOPs utilization). Needs
`pip install '.[flax,hf]'`.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg.models
import jgg.train
from jgg.sharding import MoESharding

# size of the model, which is an option: its key in config.json
SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "experts": "num_experts",
    "topk": "num_experts_per_tok",
    "expert_hidden": "moe_intermediate_size",
}
# sizes of the model and of a step; batch is the number of sequences on each device
TINY = dict(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8, topk=2, expert_hidden=64)
QWEN3 = dict(layers=6, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, topk=8, expert_hidden=768)
PRESETS = {
    "tiny": TINY | {"seq": 64, "batch": 8, "unroll": 1},
    # Qwen3-30B-A3B but for its 48 layers and its vocabulary; 65 GiB with the state of AdamW
    "qwen3-30b-a3b": QWEN3 | {"seq": 4096, "batch": 8, "unroll": 8},
}


def make_model(options: argparse.Namespace, sharding: MoESharding) -> jgg.models.Decoder:
    """Makes the model, split over the devices."""
    config = {key: getattr(options, name) for name, key in SIZES.items()} | {
        "model_type": "qwen3_moe",
        "vocab_size": 256,  # bytes
        "norm_topk_prob": True,
        "initializer_range": options.hidden**-0.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    model = jgg.models.Decoder(
        jgg.models.model_config(config),
        remat=options.remat,
        unroll=options.unroll,
        quantization=jgg.Fp8() if options.fp8 else None,
        implementation=options.implementation,
        sharding=sharding,
        rngs=nnx.Rngs(options.seed),
    )
    # attention adds little to the embedding at first: else all tokens become the same mean and choose the same experts
    model.w_embedding[...] *= options.hidden**0.5
    model.layers.attention.w_o[...] *= (0.1 / options.layers) ** 0.5
    return model


def loss_of(model: jgg.models.Decoder, text: jax.Array):
    """The loss of a batch, [B, S + 1], and what is printed: the loss in nats per byte, and the load of experts."""
    loss, sown = nnx.capture(model.loss, nnx.Intermediate)(text[:, :-1], text[:, 1:])
    (imbalance,), (group_sizes,) = sown["load_balancing_loss"], sown["group_sizes"]
    load = jnp.max(group_sizes, axis=1) / jnp.mean(group_sizes.astype(jnp.float32), axis=1)
    return loss + 0.02 * jnp.mean(imbalance), {"loss": loss, "load": load}


def train(options: argparse.Namespace) -> None:
    """Trains and prints progress."""
    text = np.frombuffer(options.text.read_bytes(), np.uint8)
    if len(text) <= options.seq:
        raise SystemExit(f"--text must have more than {options.seq} bytes, got {len(text)}")
    devices = jax.device_count()
    shape = (devices // options.expert_parallel, options.expert_parallel)
    if math.prod(shape) != devices:
        raise SystemExit(f"--expert-parallel must divide {devices}, the number of devices")
    mesh = jax.make_mesh(shape, ("fsdp", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = MoESharding(mesh, fsdp="fsdp", expert="expert", buffer_factor=options.buffer_factor)
    lengths = np.full(options.batch * devices, options.seq)

    def batch_of(step: int) -> jax.Array:
        """Random windows of the text, uint8 [batch, seq + 1]; a step has the same windows in every run."""
        starts = np.random.default_rng((options.seed, step - 1)).integers(0, len(text) - options.seq, len(lengths))
        windows = text[starts[:, None] + np.arange(options.seq + 1)]
        return jax.device_put(windows, sharding.named(jax.P(mesh.axis_names)))

    model = make_model(options, sharding)
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    kind = jax.devices()[0].device_kind
    print(f"{count / 1e6:,.1f} million parameters on {devices} x {kind}, mesh {dict(mesh.shape)}", flush=True)
    decay_end = max(options.steps, options.warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0, options.learning_rate, options.warmup, decay_end)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    trainer = jgg.train.Trainer(model, optimizer, loss_of, lengths_of=lambda _: lengths)
    saving = {"checkpoints": options.checkpoints, "save_every": options.save_every}
    for record in trainer.fit(batch_of, options.steps, first=True, **saving):
        loss, load = record.metrics["loss"][-1], record.metrics["load"][-1]
        fullest = f"fullest expert {load.mean():.1f}, at most {load.max():.1f} x even"
        print(f"step {record.step}: loss {loss:.3f}, {record.speed}, {fullest}", flush=True)


def parse() -> argparse.Namespace:
    """The options of the command line; every size of a preset is an option too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="the file to learn")
    preset = "qwen3-30b-a3b" if jax.default_backend() == "gpu" else "tiny"
    parser.add_argument("--preset", choices=PRESETS, default=preset, help="(qwen3-30b-a3b on a GPU, tiny elsewhere)")
    parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="(%(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="steps (%(default)s)")
    parser.add_argument("--expert-parallel", type=int, default=1, help="devices that share the experts (%(default)s)")
    parser.add_argument("--buffer-factor", type=float, help="as in jgg.sharding.MoESharding; by default room for all")
    parser.add_argument("--checkpoints", type=Path, help="a folder to save in and to go on from")
    parser.add_argument("--save-every", type=int, default=1000, help="steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument(
        "--remat", choices=("none", "attention", "names", "all"), default="none", help="as in jgg.models.Decoder"
    )
    parser.add_argument("--implementation", choices=("triton", "xla"), help="as in jgg.grouped_gemm")
    parser.add_argument("--fp8", action="store_true", help="multiply by the experts in FP8")
    for name in PRESETS[preset]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    sizes = argparse.Namespace(**PRESETS[parser.parse_args().preset])
    return parser.parse_args(namespace=sizes)  # where an option is not given, sizes stay


if __name__ == "__main__":
    try:
        train(parse())
    except jgg.train.TrainingError as error:
        raise SystemExit(str(error)) from error
