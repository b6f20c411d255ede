"""Trains a new model, as a config.json describes it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

import jgg
import jgg.hf
import jgg.models
from jgg.cli import options
from jgg.cli.errors import UsageError, one_line
from jgg.cli.training import devices, folders, loop, plan
from jgg.cli.training.results import write_model
from jgg.experts.sharding import MoESharding
from jgg.models.left_out import LeftOut


def run(args) -> int:
    """Trains and saves; what can be wrong is looked at before the model is made."""
    devices.join(args)
    with one_line():
        folder = _check(args)
        config = jgg.models.model_config(jgg.hf.read_config(folder))
        if args.plan:
            plan.settle(args, config)
            return plan.run(args, lambda args: nnx.eval_shape(lambda: make(args, config, None)), nnx.Param)
        training = loop.prepare(args, args.tokenizer, folder, config)
        model = make(args, config, training.sharding)
    model, code = loop.fit(training, model, nnx.Param)
    place = write_model(model, args.output, training.data.end_tokens)
    loop.say(args, f"wrote {place}")
    return code


def _check(args) -> Path:
    """Checks and settles options; returns the folder of config.json."""
    folder = Path(args.model)
    if folder.name == "config.json" and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"CONFIG must be a folder with config.json, or that file, got {args.model}")
    args.tokenizer = args.tokenizer or folder
    if not (args.tokenizer / "tokenizer.json").is_file():
        raise UsageError(f"--tokenizer must be a folder with tokenizer.json, got {args.tokenizer}")
    args.learning_rate = args.learning_rate or 1e-3
    args.dtype = args.dtype or options.default_dtype()
    loop.check_in_backward(args)
    folders.check(args)
    return folder


def make(args, config: jgg.models.ModelConfig, sharding: MoESharding | None, **more: Any) -> jgg.models.Decoder:
    """The model that options describe, with further arguments of `Decoder`."""
    # what is saved alongside the model
    config = dataclasses.replace(config, left_out=LeftOut.of(args.tokenizer, ()))
    return jgg.models.Decoder(
        config,
        dtype=jnp.dtype(args.dtype),
        remat=args.remat,
        quantization=jgg.Fp8() if args.fp8 else None,
        sharding=sharding,
        rngs=nnx.Rngs(args.seed),
        **more,
    )
