"""Interprets the options that commands share."""

import dataclasses
from collections.abc import Iterable

import jax

from jgg import extend
from jgg.cli.errors import UsageError
from jgg.core.choices import FP8
from jgg.core.gpu_target import device_target
from jgg.tuning.workloads import Layer, load_layers

SCALED_DOWN = "scaled down: no GPU; layers have at most 256 tokens, 1/16 of their features and 16 experts"
# option for a size of a single product: its name in `workloads.gemm`
_SIZES = {"m": "num_rows", "k": "in_features", "n": "out_features", "experts": "num_experts"}


def default_dtype() -> str:
    """The dtype without --dtype: bfloat16 on a GPU, float32 elsewhere."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def check_implementation(name: str | None) -> None:
    """Raises UsageError for an --implementation that cannot run on this machine."""
    if name == "triton" and device_target() is None:
        raise UsageError("--implementation triton needs a GPU that JAX can use: see jgg info")
    try:
        extend.check_implementation(name)
    except (ImportError, ValueError) as error:
        raise UsageError(str(error)) from error


def check_layout(args) -> None:
    """Raises UsageError for FP8 with --w-layout ekn: jgg quantizes weights in the layout enk only."""
    if args.dtype == FP8 and args.w_layout == "ekn":
        raise UsageError(
            f"--w-layout must be enk with --dtype {FP8}, got ekn: jgg quantizes weights in that layout only"
        )


def names(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Returns the names in a comma list, each once; raises UsageError for one that is not known."""
    found = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in found:
        if name not in known:
            raise UsageError(f"{option} must be of {', '.join(known)}; got {name!r}")
    return found


def layers(args) -> tuple[Layer, ...]:
    """Returns the layers that --layer names, by default all, from the file --shapes, by default jgg's own file.

    The name "all" stands for all.
    """
    try:
        known = load_layers(args.shapes)
    except (OSError, ValueError) as error:
        raise UsageError(f"--shapes must name a file of layers: {error}") from error
    if not known:
        raise UsageError(f"--shapes must name a file of layers, got none in {args.shapes}")
    if not args.layer or "all" in args.layer:
        return tuple(known.values())
    return tuple(known[name] for name in names("--layer", ",".join(args.layer), known))


def are_scaled_down(args) -> bool:
    """Whether layers are made smaller: there is no GPU, and no option names layers."""
    return jax.default_backend() != "gpu" and not (args.layer or args.shapes)


def scaled_down(layer: Layer) -> Layer:
    """Returns a smaller layer, reduced as the text SCALED_DOWN says."""
    return dataclasses.replace(
        layer,
        tokens=min(256, layer.tokens),
        hidden=max(1, layer.hidden // 16),
        expert_intermediate=max(1, layer.expert_intermediate // 16),
        experts=min(16, layer.experts),
        topk=min(16, layer.topk),
    )


def sizes(args) -> dict[str, int] | None:
    """Returns the sizes of a single product, by their names in `workloads.gemm`; None if no option gives any."""
    given = [name for name in (*_SIZES, "topk") if getattr(args, name) is not None]
    if not given:
        return None
    for other in ("layer", "shapes"):
        if getattr(args, other):
            raise UsageError(f"--{given[0]} must be given without --{other}, got both")
    missing = [f"--{name}" for name in _SIZES if name not in given]
    if missing:
        together = "--m, --k, --n and --experts must be given together"
        raise UsageError(f"{together}, got --{given[0]} and no {', '.join(missing)}")
    topk = args.topk or 1
    if args.m % topk:
        raise UsageError(f"--m must be a multiple of --topk {topk}, got {args.m}")
    if topk > args.experts:
        raise UsageError(f"--topk must be at most --experts {args.experts}, got {topk}")
    return {field: getattr(args, name) for name, field in _SIZES.items()} | {"topk": topk}
