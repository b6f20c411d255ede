"""The training step that `benchmarks.training` measures and `tools.compiled_step` compiles, as options describe it.

It is the step of `jgg.train.Trainer`, with AdamW, for tokens [B, S + 1].
"""

import argparse
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgg
import jgg.models
import jgg.train
from benchmarks.model_configs import CONFIGS
from benchmarks.models import PARAMS, random_model
from jgg.cli.arguments import positive_float, positive_int
from jgg.cli.errors import UsageError
from jgg.core.choices import EXCHANGES, FSDP_SPLITS, REMAT
from jgg.models.placement import place
from jgg.sharding import MoESharding
from jgg.train.steps import step_of

AXES = "data", "fsdp", "expert", "tensor"


class Training(NamedTuple):
    """A step of training without values.

    Attributes:
      step: jitted, ((parameters, state of the optimizer), what is not trained, tokens) -> (the first, (loss, metrics)).
      arguments: of the step, each array with its shape, dtype and place.
    """

    step: Any
    arguments: tuple[Any, ...]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model and of how devices split it."""
    parser.add_argument("--model", choices=CONFIGS, default="qwen3-30b-a3b", help="(%(default)s)")
    parser.add_argument("--params", choices=PARAMS, default="masters", help="as in benchmarks.models (%(default)s)")
    parser.add_argument("--remat", choices=REMAT, default="attention", help="as in Decoder (%(default)s)")
    parser.add_argument("--fsdp-splits", choices=FSDP_SPLITS, default="experts", help="as in MoESharding (%(default)s)")
    parser.add_argument("--exchange", choices=EXCHANGES, default="all_gather", help="of tokens (%(default)s)")
    parser.add_argument("--buffer-factor", type=positive_float, help="as in MoESharding (room for all rows)")
    parser.add_argument("--fp8", action="store_true", help="train with the experts' products in FP8")
    parser.add_argument("--batch-invariant", action="store_true", help="as in Decoder")
    parser.add_argument("--balanced", action="store_true", help="each expert gets as many tokens, whatever routers say")
    parser.add_argument("--unroll", type=positive_int, default=1, help="layers in a pass of the scan (%(default)s)")
    parser.add_argument("--layers", type=positive_int, help="number of layers, if fewer than the model's")
    parser.add_argument("--batch", type=positive_int, default=2, help="sequences of each GPU (%(default)s)")
    parser.add_argument("--sequence", type=positive_int, default=4096, help="tokens of a sequence (%(default)s)")
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=positive_int, default=1, help=f"devices along MoESharding's {axis} axis")


def sharding_of(args, devices: Any) -> MoESharding | None:
    """The sharding that the options name, on the first of the devices; None for one device."""
    sizes = tuple(getattr(args, axis) for axis in AXES)
    count = math.prod(sizes)
    if count > len(devices):
        raise UsageError(f"--data, --fsdp, --expert and --tensor must split the {len(devices)} devices, got {sizes}")
    if count == 1:
        return None
    kinds = (jax.sharding.AxisType.Auto,) * len(AXES)
    mesh = jax.sharding.Mesh(np.asarray(devices[:count]).reshape(sizes), AXES, axis_types=kinds)
    return MoESharding(
        mesh,
        data="data",
        fsdp="fsdp",
        expert="expert" if args.expert > 1 else None,
        tensor="tensor" if args.tensor > 1 else None,
        fsdp_splits=args.fsdp_splits,
        exchange=args.exchange,
        buffer_factor=args.buffer_factor,
    )


def check_experts(args, config: jgg.models.ModelConfig) -> None:
    """Raises UsageError where the devices of the options cannot split a model's experts or their features."""
    experts = config.moe.num_experts
    if args.fsdp_splits == "features":
        if args.fsdp == 1:
            raise UsageError("--fsdp-splits features needs several devices along --fsdp, got 1")
        if experts % args.expert:
            raise UsageError(f"--expert must split {experts} experts, got {args.expert}")
        if config.features % args.fsdp:
            raise UsageError(f"--fsdp must split {config.features} features, got {args.fsdp}")
    elif experts % (args.expert * args.fsdp):
        raise UsageError(f"--expert and --fsdp must split {experts} experts, got {args.expert} and {args.fsdp}")
    hidden = config.moe.hidden_features
    if hidden % args.tensor:
        raise UsageError(f"--tensor must split {hidden} features of experts, got {args.tensor}")
    if args.tensor > 1 and not config.moe.interleaved:
        raise UsageError(f"--tensor must be 1 where a model has gates before ups, as {args.model}, got {args.tensor}")


def balanced_choices(config: jgg.models.ModelConfig, shape: tuple[int, int]) -> jax.Array:
    """Experts int32 [L, B, S, k] of tokens [B, S], each as often as any other, those of a token on all devices."""
    experts, topk = config.moe.num_experts, config.moe.topk
    first = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(*shape, 1)
    choices = (first + jnp.arange(topk, dtype=jnp.int32)[None, None] * (experts // topk)) % experts
    return jnp.broadcast_to(choices, (len(config.is_dense) - sum(config.is_dense), *choices.shape))


def training_of(args, config: jgg.models.ModelConfig, devices: Any) -> Training:
    """The step that the options describe, on devices that need not be there."""
    check_experts(args, config)
    sharding, made = sharding_of(args, devices), []

    def make():
        parts: Any = nnx.split(model_of(args, config, sharding), nnx.Param, ...)
        graphdef, own, frozen = parts
        made.append(graphdef)
        return (own, optimizer_of(args).init(own)), frozen

    def loss_of(model, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        choices = balanced_choices(config, inputs.shape) if args.balanced else None
        loss, sown = nnx.capture(model.loss, nnx.Intermediate)(inputs, targets, topk_indices=choices)
        (sizes,), (overflow,) = sown["group_sizes"], sown["overflow"]
        rows = jnp.sum(sizes.astype(jnp.float32).reshape(len(sizes), args.expert, -1), axis=-1)
        load = jnp.max(jnp.max(rows, axis=-1) / jnp.mean(rows, axis=-1))
        return loss, {"load": load, "overflow": jnp.sum(overflow)}

    states, frozen = placed(jax.eval_shape(make), devices, sharding)
    everywhere = _place(jax.P(), devices, sharding)
    tokens = tokens_of(args, args.sequence + 1, devices, sharding)
    step = jax.jit(
        step_of(made[0], optimizer_of(args), loss_of, accumulate=False),
        donate_argnums=0,
        out_shardings=(places_of(states), everywhere),
        compiler_options=jgg.train.compiler_options(args.fsdp),
    )
    return Training(step, (states, frozen, tokens))


def tokens_of(args, length: int, devices: Any, sharding: MoESharding | None) -> jax.ShapeDtypeStruct:
    """Tokens [B, length] of all devices, on these."""
    batch = args.batch * args.data * args.fsdp * args.expert
    spec = jax.P() if sharding is None else sharding.token_spec
    return jax.ShapeDtypeStruct((batch, length), jnp.int32, sharding=_place(spec, devices, sharding))


def placed(arguments: Any, devices: Any, sharding: MoESharding | None) -> Any:
    """Arrays without values on the devices: parameters and the optimizer's state as a model splits them."""

    def put(path, array):
        where = _place(jax.P(), devices, sharding)
        names = tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        if sharding is not None and names and array.shape:
            stacked = names[0].startswith(("layers", "dense_layers"))
            where = place(names, array.shape, sharding, is_stacked=stacked)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    return jax.tree_util.tree_map_with_path(put, arguments)


def _place(spec: jax.P, devices: Any, sharding: MoESharding | None) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(devices[0]) if sharding is None else sharding.named(spec)


def places_of(arrays: Any) -> Any:
    """The shardings of arrays."""
    return jax.tree.map(lambda array: array.sharding, arrays)


def model_of(args, config: jgg.models.ModelConfig, sharding: MoESharding | None) -> jgg.models.Decoder:
    """The model, with random parameters."""
    dtype = jnp.float32 if args.params == "float32" else jnp.bfloat16
    return random_model(
        config,
        "bfloat16",
        param_dtype=dtype,
        remat=args.remat,
        unroll=args.unroll,
        quantization=jgg.Fp8() if args.fp8 else None,
        batch_invariant=args.batch_invariant,
        sharding=sharding,
    )


def optimizer_of(args) -> optax.GradientTransformation:
    """AdamW, of float32 masters if --params says so."""
    adamw = optax.adamw(1e-4)
    return jgg.train.float32_masters(adamw) if args.params == "masters" else adamw
