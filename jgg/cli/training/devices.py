"""Joins the processes of a run, and splits a model over their devices as options say."""

import math

import jax

from jgg.cli.errors import UsageError
from jgg.experts.sharding import MoESharding


def join(args) -> None:
    """Connects this process with the others that --coordinator names; must come before anything asks for devices.

    Raises: UsageError: options of processes do not fit together.
    """
    own = {"--processes": args.processes, "--process": args.process}
    given = [name for name, value in own.items() if value is not None]
    if args.coordinator in (None, "auto"):
        if given:
            raise UsageError(f"{given[0]} needs --coordinator HOST:PORT, got {args.coordinator or 'none'}")
    elif len(given) < len(own):
        raise UsageError("--coordinator HOST:PORT needs --processes and --process")
    elif args.process >= args.processes:
        raise UsageError(f"--process must be less than --processes {args.processes}, got {args.process}")
    if args.coordinator is None or jax.distributed.is_initialized():
        return
    try:
        if args.coordinator == "auto":
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(args.coordinator, args.processes, args.process)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--coordinator {args.coordinator} does not connect the processes: {reason}") from error


def sharding_of(args, num_experts: int) -> MoESharding | None:
    """`split_of` for training: if args.batch_size is missing, it sets the default."""
    devices = jax.device_count()
    args.batch_size = args.batch_size or math.ceil(4 / devices) * devices
    return split_of(args, num_experts)


def split_of(args, num_experts: int) -> MoESharding | None:
    """How the devices split the model, with its experts, and its sequences; None for one device. Sets args.fsdp.

    Raises: UsageError: the devices are not as many as the options say, or cannot split a batch or the experts evenly.
    """
    devices = jax.device_count()
    args.fsdp = args.fsdp or max(1, devices // args.expert)
    splits_features = args.fsdp_splits == "features"
    if args.fsdp * args.expert != devices:
        got = f"{args.fsdp} times {args.expert}"
        raise UsageError(f"--fsdp times --expert must be {devices}, the number of devices, got {got}")
    if splits_features and args.fsdp == 1:
        raise UsageError("--fsdp-splits features needs several devices along --fsdp, got 1")
    if args.batch_size is not None and args.batch_size % devices:
        raise UsageError(f"--batch-size must be a multiple of {devices}, the number of devices, got {args.batch_size}")
    if splits_features and num_experts % args.expert:
        raise UsageError(f"the model's {num_experts} experts must be a multiple of --expert, got {args.expert}")
    if not splits_features and num_experts % devices:
        raise UsageError(
            f"the model's {num_experts} experts must be a multiple of the number of devices, got {devices}: let it see "
            "fewer, such as by CUDA_VISIBLE_DEVICES, or take --fsdp-splits features"
        )
    if devices == 1:
        return None
    shape = args.fsdp, args.expert
    mesh = jax.make_mesh(shape, ("fsdp", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return MoESharding(
        mesh,
        fsdp="fsdp",
        expert="expert",
        fsdp_splits=args.fsdp_splits,
        exchange=args.exchange,
        buffer_factor=args.buffer_factor,
    )


def in_words(args, sharding: MoESharding | None) -> str:
    """The devices of the run."""
    count, kind = 1 if sharding is None else jax.device_count(), jax.devices()[0].device_kind
    split = f", split {args.fsdp} (fsdp) x {args.expert} (expert)" if count > 1 else ""
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{count} x {kind}{processes}{split}"
