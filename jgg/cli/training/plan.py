"""Says what memory a training step needs of one device before it runs, and where it does not fit, what would."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from jgg.cli.console import held_back, print_table
from jgg.cli.errors import UsageError
from jgg.cli.training import devices, loop
from jgg.core.choices import REMAT
from jgg.data.batching import DTYPES
from jgg.models import Decoder, ModelConfig
from jgg.train.planning import Plan, plan

type Describe = Callable[[Any], Decoder]  # of the options, the model without its arrays
type Change = dict[str, Any]  # options by name

_SHORTEST = 128  # tokens of a sequence that are still tried
_PARTS = {
    "experts": "weights of the experts",
    "others": "other weights",
    "adapters": "adapters",
    "optimizer": "state of the optimizer",
    "kept": "kept for the backward pass",
    "rest": "gradients and what else the step computes",
}


def settle(args, config: ModelConfig) -> None:
    """Settles the batch's size.

    Raises: UsageError: options of devices do not fit together, or there are several devices.
    """
    if devices.sharding_of(args, config.moe.num_experts) is not None:
        raise UsageError(
            f"--plan needs one device, got {jax.device_count()}: let it see one, such as by CUDA_VISIBLE_DEVICES"
        )


def run(args, describe: Describe, wrt: type[nnx.Variable[jax.Array]], experts: Sequence[str] = ()) -> int:
    """Prints what the step of these options needs and, if the device has less, the first change of them that fits.

    If no change alone fits, all of them are tried together, and then with shorter and shorter sequences.

    Args:
      args: the options, settled.
      describe: args -> the model without values.
      wrt: type of the trained variables.
      experts: values of --experts that need less memory.

    Returns: the exit code: 0 if the step fits or the device has no limit, else 1.
    """
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    own = _plan_of(args, describe, wrt)
    rows = [(name, _gib(getattr(own, part))) for part, name in _PARTS.items() if getattr(own, part)]
    rows.append(("total", _gib(own.total)))
    if limit is not None:
        rows.append((f"{device.device_kind} has, for JAX", _gib(limit)))
    if own.on_host:
        rows.append(("in the host's memory", _gib(own.on_host)))
    print_table(("memory of a step", "GiB"), rows, texts=("memory of a step",))
    if limit is None:
        print(f"this is what XLA plans for {device.device_kind}, whose memory has no limit that JAX knows")
        return 0
    fits, trains_all = own.total <= limit, wrt is nnx.Param
    print("it fits" if fits else "it does not fit", flush=True)
    if fits:
        return 0

    def tried(change: Change) -> Plan:
        return _tried(args, change, describe, wrt, limit)

    together: Change = {}
    needed, last = own, None
    for change in _changes(args, experts):
        try:
            needed, last = tried(change), change
            if needed.total <= limit:
                return 1
            together |= change
        except ValueError as error:  # such as sizes that MXFP4 cannot have
            print(f"with {_in_words(change)}: {error}", flush=True)
    if together and together != last:
        needed = tried(together)
    least = needed.lasting
    while needed.total > limit >= least and together.get("sequence_length", 0) >= 2 * _SHORTEST:
        together["sequence_length"] //= 2
        before, needed = needed.total, tried(together)
        least = 2 * needed.total - before  # all further halves together save no more than this one
    if needed.total > limit and trains_all and args.accumulate == 1 and not args.optimizer_in_backward:
        needed = tried({"remat": "all", "optimizer_states": "8bit", "optimizer_in_backward": True})
    if needed.lasting > limit:
        less = ": take fewer --targets or a smaller --lora-rank" if wrt is nnx.LoRAParam else ""
        print(f"parameters and the state of the optimizer alone take {_gib(needed.lasting)} GiB{less}")
    return 1


def _changes(args, experts: Sequence[str]) -> Iterator[Change]:
    """Options that need less memory than those given."""
    for remat in ("all", "offload"):
        if REMAT.index(remat) > REMAT.index(args.remat):
            yield {"remat": remat}
    for name in experts:
        yield {"experts": name}
    if args.optimizer_states == "float32":
        yield {"optimizer_states": "8bit"}
    if args.batch_size > 1:
        parts = args.accumulate * args.batch_size
        yield {"batch_size": 1} if args.optimizer_in_backward else {"batch_size": 1, "accumulate": parts}
    if args.sequence_length > 1:
        yield {"sequence_length": args.sequence_length // 2}


def _tried(args, change: Change, describe: Describe, wrt: type[nnx.Variable[jax.Array]], limit: int) -> Plan:
    """What the step needs with other options; prints whether it fits."""
    needed = _plan_of(dataclasses.replace(args, **change), describe, wrt)
    host = f", and {_gib(needed.on_host)} GiB in the host's memory" if needed.on_host else ""
    verb = "it fits" if needed.total <= limit else "it does not fit"
    print(f"with {_in_words(change)}: {_gib(needed.total)} GiB{host}: {verb}", flush=True)
    return needed


def _in_words(change: Change) -> str:
    """Options as a command line has them."""
    options = ((f"--{name.replace('_', '-')}", value) for name, value in change.items())
    return " ".join(name if value is True else f"{name} {value}" for name, value in options)


def _plan_of(args, describe: Describe, wrt: type[nnx.Variable[jax.Array]]) -> Plan:
    model = describe(args)
    optimizer = loop.optimizer_for(args, loop.schedule_of(args, args.steps or 1), wrt)
    shape = args.accumulate, args.batch_size, args.sequence_length
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in DTYPES.items()}
    with held_back() as notes:  # XLA also writes how far a step exceeds the memory
        needed = plan(model, optimizer, loop.loss_of(args, model.config), batch, wrt=wrt)
        notes.truncate(0)
    return needed


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f}"
