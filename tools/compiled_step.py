"""Compiles a step of a whole model for an H100 on a machine without a GPU, and prints what the program does.

    pip install --no-deps --target FOLDER jax-cuda12-pjrt==VERSION_OF_JAXLIB
    export JGG_PJRT=FOLDER
    python -m tools.compiled_step --run lora --experts fp8
    python -m tools.compiled_step --run train --layers 2 --hlo step.txt
    python -m tools.compiled_step --run generate --batch 1
    python -m tools.compiled_step --run train --layers 2 --batch-invariant
    python -m tools.compiled_step --run lora --layers 2 --fsdp 4
    python -m tools.compiled_step --run in-backward --batch 1
    python -m tools.compiled_step --run train --expert 8 --buffer-factor 1.25 --balanced

The models and steps are those of `benchmarks.models`, and with --run train those of `benchmarks.training`, without
values. XLA's GPU compiler, from jax-cuda12-pjrt, runs on the CPU. It prints the memory, and for each loop its kernels
and its largest copies, slices, zero fills, transposes and converts; for several GPUs also the collectives, what each
sends, and which kernels overlap them. It prints no times. Without a GPU, XLA cannot measure which of its kernels is
fastest, so it may choose other kernels for products than on a GPU.
"""

import argparse
import contextlib
import importlib.metadata
import math
import os
import sys
import time
from pathlib import Path
from unittest import mock

import jax
from flax import nnx

import jgg
import jgg.models
from benchmarks.model_configs import config_of
from benchmarks.models import (
    EXPERTS,
    RUNS,
    add_optimizer,
    make_step,
    make_step_in_backward,
    options_of,
    random_model,
    remat_of,
)
from benchmarks.training_step import AXES, add_model_options, check_experts, placed, sharding_of, tokens_of, training_of
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file, positive_int
from tools import collectives
from tools.hlo import report

_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"  # it asks for the version of a library and for a GPU
_TARGET = Path(__file__).with_name("h100.txtpb")


def topology(folder: str | None, count: int):
    """The devices of a machine with H100s that is not there; `folder` has jax-cuda12-pjrt."""
    if not folder or not (Path(folder) / "jax_plugins").is_dir():
        version = importlib.metadata.version("jaxlib")
        raise SystemExit(
            f"--pjrt or JGG_PJRT must be a folder with jax-cuda12-pjrt, got {folder}. To make one:\n"
            f"  pip install --no-deps --target FOLDER jax-cuda12-pjrt=={version}"
        )
    import jax_plugins
    from jax.experimental.topologies import get_topology_desc

    sys.path.append(folder)
    jax_plugins.__path__.append(f"{folder}/jax_plugins")
    topology = f"1x1x{count}"  # partitions, hosts in each, devices of each
    return get_topology_desc("h100", "cuda", target_config=_TARGET.read_text(), topology=topology).devices


@contextlib.contextmanager
def as_on_gpu():
    """Inside, programs are traced as on an H100."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jgg.target(90))
        for name, value in (
            ("jax.default_backend", "gpu"),
            (f"{_CUDNN}.check_cudnn_version", 91000),
            (f"{_CUDNN}.check_compute_capability", True),
            (f"{_CUDNN}.is_cuda_compute_capability_equal", False),  # it is asked about other GPUs
        ):
            stack.enter_context(mock.patch(name, lambda *_, value=value: value))
        yield


def program(args, devices):
    """A jitted step or generation, and its arguments without values."""
    config = config_of(args.model, args.layers, is_small=False)
    if args.run == "train":
        return training_of(args, config, devices)
    check_experts(args, config)
    sharding = sharding_of(args, devices)
    options = options_of(args, args.run) | {
        "remat": remat_of(args, args.run),
        "unroll": args.unroll,
        "sharding": sharding,
    }
    made = []  # what is no array, and so cannot be returned by the function that is only traced

    def make():
        model = random_model(config, args.experts, **options)
        if args.run == "generate":
            graphdef, state = nnx.split(model)
            made.append(graphdef)
            return (state,)
        if args.run == "in-backward":
            step, *state = make_step_in_backward(model, args.optimizer)
        else:
            step, *state = make_step(model, nnx.LoRAParam)
        made.append(step)
        return state

    states = placed(jax.eval_shape(make), devices, sharding)
    if args.run != "generate":
        return made[0], (*states, tokens_of(args, args.sequence + 1, devices, sharding))
    generate = jax.jit(lambda state, prompt: jgg.models.generate(nnx.merge(made[0], state), prompt, args.new_tokens))
    return generate, (*states, tokens_of(args, args.prompt, devices, sharding))


def compiled(args):
    """The program, compiled."""
    devices = topology(args.pjrt, math.prod(getattr(args, axis) for axis in AXES))
    with as_on_gpu():
        function, arguments = program(args, devices)
        lowered = function.lower(*arguments)
        return lowered.compile(compiler_options=dict(args.option))


def option(text: str) -> tuple[str, object]:
    """An option of XLA, whose bools must be Python's."""
    name, _, value = text.partition("=")
    return name, {"true": True, "false": False}.get(value, value)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tools.compiled_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pjrt", default=os.environ.get("JGG_PJRT"), help="folder with jax-cuda12-pjrt ($JGG_PJRT)")
    add_model_options(parser)
    parser.add_argument("--run", choices=RUNS, default="lora", help="(%(default)s)")
    parser.add_argument("--experts", choices=EXPERTS, default="bfloat16", help="(%(default)s)")
    for name, default, what in (
        ("rank", 16, "rank of the adapters"),
        ("prompt", 128, "tokens of a prompt of --run generate"),
        ("new-tokens", 64, "tokens generated after a prompt"),
        ("top", 6, "how many kernels of each kind are printed"),
    ):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{what} (%(default)s)")
    add_optimizer(parser)
    parser.add_argument(
        "--option",
        type=option,
        action="append",
        default=[("xla_gpu_enable_triton_gemm", False)],
        metavar="NAME=VALUE",
        help="an option of XLA; cuBLAS computes XLA's products unless xla_gpu_enable_triton_gemm=true",
    )
    parser.add_argument("--hlo", type=new_file, metavar="FILE", help="write the optimized program")
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Compiles and prints a report."""
    begin = time.perf_counter()
    result = compiled(args)
    print(f"compiled in {time.perf_counter() - begin:.0f} s")
    if args.hlo:
        args.hlo.write_text(result.as_text())
    print(report(result, args.top))
    if any(getattr(args, axis) > 1 for axis in AXES):
        print(collectives.report(result.as_text()))
    return 0


def main(argv=None) -> int:
    """Runs the command and returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
