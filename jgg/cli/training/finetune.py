"""Fine-tunes a model of a Hugging Face folder, by adapters or whole."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import jgg
import jgg.hf
import jgg.models
from jgg.cli.errors import one_line, writes
from jgg.cli.folders import model_folder
from jgg.cli.options import UsageError
from jgg.cli.training import devices, folders, loop
from jgg.cli.training.data import note_ends
from jgg.models.loading import EXPERTS_BY_NAME
from jgg.sharding import MoESharding


def run(args, load: Callable[..., jgg.models.Decoder] | None = None) -> int:
    """Trains and saves; what can be wrong is looked at before the model is loaded.

    Args:
      args: the options.
      load: (args, folder, sharding) -> the model, instead of reading it from the folder.
    """
    devices.join(args)
    with one_line():
        folder = model_folder(args.model)
        _check(args, folder)
        config = jgg.models.model_config(jgg.hf.read_config(folder))
        training = loop.prepare(args, folder, folder, config)
        model = (load or _load)(args, folder, training.sharding)
    model = loop.fit(training, model, nnx.Param if args.full else nnx.LoRAParam)
    with writes(args.output):
        if args.full:
            jgg.models.save(model, args.output)
        else:
            jgg.models.save_adapter(model, args.output)
        if loop.is_first():
            note_ends(args.output, training.data.end_tokens)
    loop.say(args, f"wrote {args.output}")
    return 0


def _check(args, folder: Path) -> None:
    """Checks and settles options."""
    folders.check_writable("--output", args.output, [folder])
    if args.checkpoints is not None:
        folders.check_writable("--checkpoints", args.checkpoints, [folder, args.output])
    if args.full:
        folders.check_new("--output", args.output)
        if args.experts != "bfloat16":
            raise UsageError(f"--full needs --experts bfloat16, got {args.experts}: quantized experts are not trained")
    elif args.optimizer == "muon":
        raise UsageError("--optimizer muon needs --full: Muon does not train adapters")
    else:
        folders.check_adapter_output(args)
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
