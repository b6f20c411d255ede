"""Measures LoRA on frozen experts: forward + backward of x and the adapters, compared with no adapters.

    python -m benchmarks.lora --layer qwen3-30b-a3b --rank 16,64

Every result is checked against plain JAX, then timed. Prints a table with the time of each variant, its ratio to the
frozen layer's time, and its percentage of the least possible time (% of roofline, see `benchmarks.layer_roofline`).
Times include routing but not the router's product.
"""

import argparse
import dataclasses
import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.layer import FORWARD, LayerProblem
from benchmarks.layer_roofline import (
    Part,
    Sizes,
    dense_times,
    dw_parts,
    dx_parts,
    forward_parts,
    least_layer_seconds,
)
from jgg.cli import options
from jgg.cli import run as run_command
from jgg.cli.commands import Bench
from jgg.cli.console import number, print_table, progress
from jgg.cli.declarations import add_options
from jgg.experts.moe import moe_mlp
from jgg.experts.router.routing import route
from jgg.linear.fp8 import Fp8, quantize_weights
from jgg.linear.low_rank import LowRank
from jgg.tuning.roofline import copy_bandwidth, percent_of_roofline
from jgg.tuning.timing import FAILED, RIGHT, Measurement, Reference, first_line, jit_reference
from jgg.tuning.ways import JaxProduct, check_and_time
from jgg.tuning.workloads import Layer

_HEADINGS = ("layer", "experts", "ms", "over frozen", "% of roofline", "temporaries, MB")
_FP8_ERROR = 0.1  # of the largest element, in addition to the errors of bfloat16


@dataclasses.dataclass(frozen=True)
class LoraProblem:
    """A layer in bfloat16 with frozen experts, or one that is trained as a whole to compare with.

    Attributes:
      rank: r of the adapters of w_gate_up and w_down; None without adapters.
      is_trained: whether the experts have gradients, and no adapters.
      in_fp8: whether the experts are quantized once, and multiplied in FP8.
    """

    layer: Layer
    rank: int | None = None
    is_trained: bool = False
    in_fp8: bool = False

    def __str__(self) -> str:
        """What is measured, for the table."""
        what = "all trained" if self.is_trained else "frozen" if self.rank is None else f"rank {self.rank}"
        return f"FP8, {what}" if self.in_fp8 else what

    @property
    def base(self) -> LayerProblem:
        """The layer without adapters."""
        return LayerProblem(self.layer, "bfloat16", quantization=Fp8() if self.in_fp8 else None)

    def parts(self) -> list[Part]:
        """The passes over memory of forward + backward, whose least times are added up.

        An adapter adds x aᵀ and its product with b to the product of the frozen weights, which then reads a and b, and
        in forward stores x aᵀ [M, r]. da and db are products of their own that read rows the layer has stored.
        """
        sizes, rows, tokens = Sizes(self.base), self.base.num_rows, self.layer.tokens
        hidden, inner = self.layer.hidden, self.layer.expert_intermediate
        choices = Part("routing", (4 * self.layer.experts + 8 * self.layer.topk) * tokens)
        parts = [choices, *forward_parts(sizes, keeps=True), *dx_parts(sizes, self.is_trained or self.rank is not None)]
        if self.is_trained:
            parts += dw_parts(sizes)
        if self.rank is None:
            return parts
        of_gate_up, of_down = (
            sizes.plain(self.layer.experts * self.rank, features) for features in (hidden + 2 * inner, inner + hidden)
        )
        reduced = sizes.plain(rows, self.rank)
        more = {"up": of_gate_up + reduced, "down": of_down + reduced, "dX of up": of_gate_up, "dX of down": of_down}
        parts = [part._replace(num_bytes=part.num_bytes + more.get(part.name, 0)) for part in parts]
        gradient = sizes.plain(rows, 2 * inner)
        read = sizes.plain(tokens, hidden) + gradient, sizes.multiplied(rows, inner) + sizes.plain(tokens, hidden)
        return [
            *parts,
            Part("da and db of up", read[0] + 2 * reduced + of_gate_up),
            Part("da and db of down", read[1] + 2 * reduced + of_down),
        ]

    def operands(self, seed: int = 0) -> dict[str, Any]:
        """Random arrays: x, dy, the router's logits, weights and factors; b is not zero, so that a has a gradient."""
        plain = LayerProblem(self.layer, "bfloat16")
        arrays: dict[str, Any] = plain.operands(seed)
        del arrays["w_router"]
        experts, columns, hidden = plain.shapes["w_gate_up"]
        inner, tokens = self.layer.expert_intermediate, self.layer.tokens
        shapes = (
            {}
            if self.rank is None
            else {
                "a_gate_up": (experts, self.rank, hidden),
                "b_gate_up": (experts, columns, self.rank),
                "a_down": (experts, self.rank, inner),
                "b_down": (experts, hidden, self.rank),
            }
        )
        keys = jax.random.split(jax.random.key(seed + 1), len(shapes) + 1)
        arrays["logits"] = jax.random.normal(keys[-1], (tokens, experts))
        for key, (name, shape) in zip(keys, shapes.items(), strict=False):
            arrays[name] = jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(shape[-1] ** -0.5)
        if self.in_fp8:
            arrays |= {name: quantize_weights(arrays[name]) for name in ("w_gate_up", "w_down")}
        return arrays


@functools.cache  # so that programs of the same problem share what is compiled
def lora_function(problem: LoraProblem, implementation: str | None = None, precision=None):
    """The function from operands to y and the gradients of what is trained, by name."""
    factors = ("a_gate_up", "b_gate_up", "a_down", "b_down")
    trained = "x", *(("w_gate_up", "w_down") if problem.is_trained else ())
    if problem.rank is not None:
        trained += factors

    def forward(floats, arrays):
        arrays = arrays | floats
        terms: dict[str, Any] = {}
        if problem.rank is not None:
            terms = {f"low_rank_{at}": LowRank(arrays[f"a_{at}"], arrays[f"b_{at}"]) for at in ("gate_up", "down")}
        return moe_mlp(
            arrays["x"],
            arrays["w_gate_up"],
            arrays["w_down"],
            route(arrays["logits"], problem.layer.topk, implementation=implementation),
            quantization=Fp8() if problem.in_fp8 else None,
            implementation=implementation,
            precision=precision,
            **terms,
        )

    def run(arrays):
        y, vjp = jax.vjp(lambda floats: forward(floats, arrays), {name: arrays[name] for name in trained})
        y, dy = jax.lax.optimization_barrier((y, arrays["dy"]))  # as in training, the backward pass comes after y
        return {"y": y} | {f"d {name}": d for name, d in vjp(dy)[0].items()}

    return run


@dataclasses.dataclass(frozen=True)
class LoraReference:
    """The expected results by name, from the xla implementation in float32; see `benchmarks.layer.LayerReference`."""

    parts: dict[str, Reference]

    @classmethod
    def of(cls, problem: LoraProblem, arrays: dict[str, Any]) -> "LoraReference":
        """Computes the reference; the allowed error is three times the xla implementation's error in bfloat16."""
        dense = dataclasses.replace(problem, in_fp8=False)
        if problem.in_fp8:
            arrays = arrays | {name: arrays[name].dequantize(jnp.bfloat16) for name in ("w_gate_up", "w_down")}
        in_float32 = {
            name: array if name in ("logits", "group_sizes") else array.astype(jnp.float32)
            for name, array in arrays.items()
        }
        own = jit_reference(lora_function(dense, "xla"))(arrays)
        exact = jit_reference(lora_function(dense, "xla", jax.lax.Precision.HIGHEST))(in_float32)
        parts = {name: Reference.beside(exact[name], own[name], 3) for name in exact}
        if problem.in_fp8:
            parts = {name: dataclasses.replace(part, bound=part.bound + _FP8_ERROR) for name, part in parts.items()}
        return cls(parts)

    def check(self, results: dict[str, jax.Array]) -> Measurement:
        """Judges results; the measurement has the error of the worst one, compared with the error allowed for it."""
        checked = {name: part.check(results[name]) for name, part in self.parts.items()}
        worst = max(checked, key=lambda name: (checked[name].status != RIGHT, self.parts[name].error(results[name])))
        return dataclasses.replace(checked[worst], variant=worst)


def measure(problem: LoraProblem, implementation: str | None, seed: int) -> tuple[Measurement, float | None]:
    """Checks and times a problem; also returns the megabytes of temporaries that XLA plans."""
    try:
        arrays = problem.operands(seed)
        function, reference = lora_function(problem, implementation), LoraReference.of(problem, arrays)
        stats = jax.jit(function).lower(arrays).compile().memory_analysis()
    except Exception as error:  # such as too little memory
        return Measurement(FAILED, reason=first_line(error)), None
    num_bytes = sum(part.num_bytes for part in problem.parts())
    way = JaxProduct(function, arrays, 2 * problem.base.flops(FORWARD), num_bytes)
    measurement = check_and_time(way, reference)
    return measurement, None if stats is None else stats.temp_size_in_bytes / 1e6


def problems_of(layer: Layer, ranks: tuple[int, ...]) -> list[LoraProblem]:
    """The frozen layer first, then what is compared with it."""
    bfloat16 = [LoraProblem(layer), *(LoraProblem(layer, rank) for rank in ranks), LoraProblem(layer, is_trained=True)]
    fp8 = [LoraProblem(layer, in_fp8=True), *(LoraProblem(layer, rank, in_fp8=True) for rank in ranks)]
    return bfloat16 + fp8


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.lora", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, Bench, "layer", "shapes", "implementation", "seed", "quiet")
    parser.add_argument(
        "--rank",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(16, 64),
        metavar="R,R",
        help="ranks of the adapters (default: 16,64)",
    )
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Measures and prints a table; returns 1 if a result is wrong or failed, else 0."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options.check_implementation(args.implementation)
    layers = options.layers(args)
    if options.are_scaled_down(args):
        layers = tuple(map(options.scaled_down, layers[:1]))
        print(options.SCALED_DOWN)
    cells, wrong = [], []
    missing: list[str] = []
    copy_speed = copy_bandwidth()
    problems = [problems_of(layer, args.rank) for layer in layers]
    with progress(sum(map(len, problems)), args.quiet) as tell:
        for of_layer in problems:
            frozen, dense = None, dense_times_of(of_layer, args.seed, missing)
            for problem in of_layer:
                tell(f"{problem.layer.name} {problem}", 1)
                measurement, temporaries = measure(problem, args.implementation, args.seed)
                if measurement.seconds is None:
                    wrong.append(f"{problem.layer.name} {problem}: {measurement} ({measurement.variant})")
                seconds = measurement.seconds
                frozen = frozen or seconds
                ratio = f"{seconds / frozen:.3f}" if seconds and frozen else "-"
                time = number(seconds * 1e3) if seconds else measurement.status
                least = least_layer_seconds(problem.parts(), copy_speed, dense[problem.in_fp8])
                percent = percent_of_roofline(least, seconds)
                of_roofline = "-" if percent is None else f"{percent:.1f}"
                cells.append((problem.layer.name, str(problem), time, ratio, of_roofline, number(temporaries)))
    print_table(_HEADINGS, cells, _HEADINGS[:2])
    notes = missing + wrong
    print(*notes, sep="\n", end="\n" if notes else "")
    return int(bool(wrong))


def dense_times_of(problems: list[LoraProblem], seed: int, missing: list[str]) -> dict[bool, dict[str, float]]:
    """The times of dense products, by whether the experts are in FP8; adds why some are not there to `missing`."""
    times: dict[bool, dict[str, float]] = {False: {}, True: {}}
    base = problems[0].base
    for in_fp8 in sorted({problem.in_fp8 for problem in problems}):
        try:
            times[in_fp8] = times[False] | dense_times(base, seed, in_fp8)
        except Exception as error:  # such as too little memory
            missing.append(f"{base.layer.name} dense{' in FP8' * in_fp8}: failed: {first_line(error)}")
    return times


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
