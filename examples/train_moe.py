"""Trains a decoder-only mixture-of-experts language model on the bytes of any text file, on all devices at hand.

    python examples/train_moe.py --text book.txt                        # on GPUs layers of Qwen3-30B-A3B's shape
    python examples/train_moe.py --text book.txt --preset tiny          # the default without a GPU: a minute on a CPU
    python examples/train_moe.py --text book.txt --checkpoints run1     # saves, and goes on from there when run again

The model is a `jgg.models.Decoder` of the family Qwen3-MoE. Tokens are split over all devices, experts over
`--expert-parallel` of them; the devices that have the same experts store all weights split (FSDP).
MFU is model FLOPs utilization: the FLOPs that the model needs, without those that rematerialization repeats, over what
the GPUs could do at most (Chowdhery et al., PaLM, 2022, appendix B). Needs `pip install '.[flax,hf]'`.
"""

import argparse
import dataclasses
import functools
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg.models
from jgg.sharding import MoESharding

PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bfloat16, by the beginning of a device's name
VOCABULARY = 256  # bytes
LOG_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of a step, and its options; `batch` is the number of sequences on each device."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    topk: int
    expert_hidden: int
    seq: int
    batch: int
    unroll: int = 1
    remat: str = "none"
    implementation: str | None = None
    fp8: bool = False

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the forward and backward pass: causal attention reads half of the sequence on average."""
        projections = 2 * self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        attention = 4 * self.heads * self.head_dim * (self.seq + 1) / 2
        router = 2 * self.hidden * self.experts
        experts = 6 * self.hidden * self.expert_hidden * self.topk
        return 3 * (self.layers * (projections + attention + router + experts) + 2 * self.hidden * VOCABULARY)


PRESETS = {
    "tiny": Config(2, 64, 4, 2, 16, experts=8, topk=2, expert_hidden=64, seq=64, batch=8),
    # Qwen3-30B-A3B but for its 48 layers and its vocabulary; 65 GiB with the state of AdamW
    "qwen3-30b-a3b": Config(6, 2048, 32, 4, 128, experts=128, topk=8, expert_hidden=768, seq=4096, batch=8, unroll=8),
}


def make_model(config: Config, sharding: MoESharding, rngs: nnx.Rngs) -> jgg.models.Decoder:
    """Makes the model, split over the devices."""
    sizes = {
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_experts": config.experts,
        "num_experts_per_tok": config.topk,
        "moe_intermediate_size": config.expert_hidden,
        "norm_topk_prob": True,
        "initializer_range": config.hidden**-0.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    model = jgg.models.Decoder(
        jgg.models.model_config(sizes),
        remat=config.remat,
        unroll=config.unroll,
        quantization=jgg.Fp8() if config.fp8 else None,
        implementation=config.implementation,
        sharding=sharding,
        rngs=rngs,
    )
    # attention adds little to the embedding at first: else all tokens become the same mean and choose the same experts
    model.w_embedding[...] *= config.hidden**0.5
    model.layers.attention.w_o[...] *= (0.1 / config.layers) ** 0.5
    return model


def make_step(graphdef, optimizer, sharding: MoESharding):
    """The jitted step of training: (params, opt_state, text [B, S + 1]) -> (new params, new opt_state, metrics)."""

    def loss_of(params, text):
        losses_of = nnx.capture(nnx.merge(graphdef, params).losses, nnx.Intermediate)
        losses, sown = losses_of(text[:, :-1], text[:, 1:])
        loss = jnp.mean(losses)
        (imbalance,), (group_sizes,) = sown["load_balancing_loss"], sown["group_sizes"]
        load = jnp.max(group_sizes, axis=1) / jnp.mean(group_sizes.astype(jnp.float32), axis=1)
        return loss + 0.02 * jnp.mean(imbalance), {"loss": loss, "load": load}

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, text):
        text = jax.lax.with_sharding_constraint(text, sharding.named(jax.P(sharding.mesh.axis_names)))
        gradients, metrics = jax.grad(loss_of, has_aux=True)(params, text)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, metrics

    return step


def batches(text: np.ndarray, config: Config, devices: int, first_step: int, seed: int):
    """Yields random windows of the text, uint8 [batch, seq + 1]; a step has the same windows in every run."""
    for step in range(first_step, 2**31):
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(0, len(text) - config.seq, (config.batch * devices, 1))
        yield text[starts + np.arange(config.seq + 1)]


def open_checkpoints(folder: Path | None):
    """Opens Orbax's manager of a folder, which keeps the last two checkpoints; None without a folder."""
    if folder is None:
        return None
    import orbax.checkpoint as ocp

    return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))


def restored(manager, state):
    """Returns the last checkpoint, split as `state` is, and its step; without a checkpoint, `state` and 0."""
    if manager is None or manager.latest_step() is None:
        return state, 0
    import orbax.checkpoint as ocp

    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    step = manager.latest_step()
    return manager.restore(step, args=ocp.args.StandardRestore(abstract)), step


def save(manager, step: int, state) -> None:
    """Writes a checkpoint in the background."""
    if manager is not None:
        import orbax.checkpoint as ocp

        manager.save(step, args=ocp.args.StandardSave(state))


def train(config: Config, options: argparse.Namespace) -> float:
    """Trains and prints progress; returns the loss of the last step, in nats per byte."""
    text = np.frombuffer(options.text.read_bytes(), np.uint8)
    if len(text) <= config.seq:
        raise SystemExit(f"--text must have more than {config.seq} bytes, got {len(text)}")
    devices = jax.device_count()
    shape = (devices // options.expert_parallel, options.expert_parallel)
    if math.prod(shape) != devices:
        raise SystemExit(f"--expert-parallel must divide {devices}, the number of devices")
    mesh = jax.make_mesh(shape, ("fsdp", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = MoESharding(mesh, fsdp="fsdp", expert="expert", buffer_factor=options.buffer_factor)
    graphdef, params = nnx.split(make_model(config, sharding, nnx.Rngs(options.seed)))
    decay_end = max(options.steps, options.warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(0, options.learning_rate, options.warmup, decay_end)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))
    everywhere = sharding.named(jax.P())  # counts of steps; all else is split as the parameters are
    opt_state = jax.tree.map(lambda a: a if a.ndim else jax.device_put(a, everywhere), optimizer.init(params))
    manager = open_checkpoints(options.checkpoints)
    (params, opt_state), first_step = restored(manager, (params, opt_state))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    kind = jax.devices()[0].device_kind
    print(f"{count / 1e6:,.1f} million parameters on {devices} x {kind}, mesh {dict(mesh.shape)}", flush=True)
    peak = next((flops for name, flops in PEAK_FLOPS.items() if kind.startswith(name)), None)
    step_of, data = make_step(graphdef, optimizer, sharding), batches(text, config, devices, first_step, options.seed)
    tokens, loss, start, logged = config.batch * devices * config.seq, math.nan, time.perf_counter(), first_step
    for step in range(first_step + 1, options.steps + 1):
        batch = jax.device_put(next(data), sharding.named(jax.P(mesh.axis_names)))
        params, opt_state, metrics = step_of(params, opt_state, batch)
        if step % LOG_EVERY == 0 or step in (first_step + 1, options.steps):
            loss, load = float(metrics["loss"]), np.asarray(metrics["load"])
            seconds, start = time.perf_counter() - start, time.perf_counter()
            speed, logged = tokens * (step - logged) / seconds, step
            mfu = f"{speed * config.flops_per_token / (peak * devices):.1%}" if peak else "unknown"
            fullest = f"fullest expert {load.mean():.1f}, at most {load.max():.1f} x even"
            print(f"step {step}: loss {loss:.3f}, {speed:,.0f} tokens/s, MFU {mfu}, {fullest}", flush=True)
        if step % options.save_every == 0 or step == options.steps:
            save(manager, step, (params, opt_state))
    if manager is not None:
        manager.wait_until_finished()
        manager.close()
    return loss


def parse(arguments: list[str] | None = None) -> tuple[Config, argparse.Namespace]:
    """Parses a command line to the model's config and the options; every size of a preset is an option too."""
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
    parser.add_argument("--remat", choices=("none", "names", "all"), help="as in jgg.models.Decoder")
    parser.add_argument("--implementation", choices=("triton", "xla"), help="as in jgg.grouped_gemm")
    parser.add_argument("--fp8", action="store_true", help="multiply by the experts in FP8")
    sizes = [field.name for field in dataclasses.fields(Config) if field.type is int]
    for name in sizes:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    options = parser.parse_args(arguments)
    given = {name: getattr(options, name) for name in (*sizes, "remat", "implementation", "fp8")}
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(PRESETS[options.preset], **changes), options


if __name__ == "__main__":
    train(*parse())
