"""Fine-tunes a model of a Hugging Face folder, by adapters or whole."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import jgg
import jgg.hf
import jgg.models
from jgg.cli.errors import UsageError, one_line
from jgg.cli.folders import model_folder
from jgg.cli.training import devices, folders, loop
from jgg.cli.training.results import AdapterOutput, write_model
from jgg.experts.sharding import MoESharding
from jgg.models.loading import EXPERTS_BY_NAME


def run(args, load: Callable[..., jgg.models.Decoder] | None = None) -> int:
    """Trains and saves; what can be wrong is looked at before the model is loaded.

    Args:
      args: the options.
      load: (args, folder, sharding) -> the model, instead of reading it from the folder.
    """
    devices.join(args)
    with one_line():
        folder, output = model_folder(args.model), AdapterOutput(args.output, args.checkpoints)
        _check(args, output)
        config = jgg.models.model_config(jgg.hf.read_config(folder))
        training = loop.prepare(args, folder, folder, config)
        model = (load or _load)(args, folder, training.sharding)
    model, code = loop.fit(training, model, nnx.Param if args.full else nnx.LoRAParam)
    if args.full:
        place = write_model(model, args.output, training.data.end_tokens)
    else:
        place = output.write(model, training.data.end_tokens)
    loop.say(args, f"wrote {place}")
    return code


def _check(args, output: AdapterOutput) -> None:
    """Checks and settles options."""
    if args.full:
        folders.check(args)
        if args.experts != "bfloat16":
            raise UsageError(f"--full needs --experts bfloat16, got {args.experts}: quantized experts are not trained")
    elif args.optimizer == "muon":
        raise UsageError("--optimizer muon needs --full: Muon does not train adapters")
    else:
        folders.check(args, output.check)
    args.learning_rate = args.learning_rate or (1e-5 if args.full else 2e-4)


def _load(args, folder: Path, sharding: MoESharding | None) -> jgg.models.Decoder:
    """Loads the model; raises UsageError if adapters are asked for and it has none of their matrices."""
    adapters = {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha, "lora_targets": tuple(args.targets)}
    model = jgg.models.load(
        folder,
        dtype=jnp.bfloat16,
        experts=EXPERTS_BY_NAME[args.experts],
        remat=args.remat,
        sharding=sharding,
        rngs=nnx.Rngs(args.seed),
        show_progress=not args.quiet and loop.is_first(),
        **{} if args.full else adapters,
    )
    if not args.full and not nnx.state(model, nnx.LoRAParam):
        raise UsageError(f"--targets must name a matrix that the model has, got {', '.join(args.targets)}")
    return model
