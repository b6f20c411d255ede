"""Fine-tunes a model of a Hugging Face folder, by adapters or whole."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

import jgg
import jgg.hf
import jgg.models
from jgg.cli.errors import UsageError, one_line
from jgg.cli.folders import model_folder
from jgg.cli.training import devices, folders, loop, plan
from jgg.cli.training.results import AdapterOutput, write_model
from jgg.experts.sharding import MoESharding
from jgg.hf.quantized import quantization
from jgg.models.loading import EXPERTS_BY_NAME


def run(args, load: Callable[..., jgg.models.Decoder] | None = None) -> int:
    """Trains and saves; what can be wrong is looked at before the model is loaded.

    Args:
      args: the options.
      load: (args, folder, sharding) -> the model, instead of reading it from the folder.
    """
    devices.join(args)
    args.learning_rate = args.learning_rate or (1e-5 if args.full else 2e-4)
    if args.plan:
        return _plan(args)
    return train(args, lambda folder, config: loop.prepare(args, folder, folder, config), load)


def train(
    args, prepare: Callable[..., loop.Run], load: Callable[..., jgg.models.Decoder] | None = None, **more: Any
) -> int:
    """As `run`, with what `prepare` returns, by (folder, config), and further arguments of `jgg.models.load`."""
    with one_line():
        folder, output = model_folder(args.model), AdapterOutput(args.output, args.checkpoints)
        _check(args, output)
        training = prepare(folder, jgg.models.model_config(jgg.hf.read_config(folder)))
        model = (load or functools.partial(_load, **more))(args, folder, training.sharding)
    model, code = loop.fit(training, model, nnx.Param if args.full else nnx.LoRAParam)
    if args.full:
        place = write_model(model, args.output, training.data.end_tokens)
    else:
        place = output.write(model, training.data.end_tokens)
    loop.say(args, f"wrote {place}")
    return code


def _plan(args) -> int:
    """Says what memory a step needs; returns the exit code, see `plan.run`."""
    with one_line():
        folder = model_folder(args.model)
        _check(args, AdapterOutput(args.output, args.checkpoints))
        config = jgg.models.model_config(jgg.hf.read_config(folder))
        plan.settle(args, config)
        is_stored_quantized = quantization(config.hf) is not None

    def describe(args) -> jgg.models.Decoder:
        return _load(args, folder, None, abstract=True)

    experts = () if args.full or args.experts != "bfloat16" else ("as-stored",) * is_stored_quantized + ("fp8", "mxfp4")
    return plan.run(args, describe, nnx.Param if args.full else nnx.LoRAParam, experts)


def _check(args, output: AdapterOutput) -> None:
    """Checks options."""
    if args.optimizer_in_backward and not args.full:
        raise UsageError("--optimizer-in-backward needs --full: the gradients of adapters are small")
    loop.check_in_backward(args)
    if args.full:
        folders.check(args)
        if args.experts != "bfloat16":
            raise UsageError(f"--full needs --experts bfloat16, got {args.experts}: quantized experts are not trained")
    elif args.optimizer == "muon":
        raise UsageError("--optimizer muon needs --full: Muon does not train adapters")
    else:
        folders.check(args, output.check)


def _load(args, folder: Path, sharding: MoESharding | None, **more: Any) -> jgg.models.Decoder:
    """Loads the model, by further arguments of `jgg.models.load`.

    Raises: UsageError: adapters are asked for and the model has none of their matrices.
    """
    adapters = {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha, "lora_targets": tuple(args.targets)}
    model = jgg.models.load(
        folder,
        experts=EXPERTS_BY_NAME[args.experts],
        remat=args.remat,
        sharding=sharding,
        rngs=nnx.Rngs(args.seed),
        show_progress=not args.quiet and loop.is_first(),
        **{"dtype": jnp.bfloat16, **({} if args.full else adapters), **more},
    )
    if not args.full and not nnx.state(model, nnx.LoRAParam):
        raise UsageError(f"--targets must name a matrix that the model has, got {', '.join(args.targets)}")
    return model
