"""Times the experts of a layer for 1 to 4,096 tokens, with weights in each storage format.

    python -m benchmarks.rows
    python -m benchmarks.rows --only mxfp4 --json FILE

jgg chooses kernels by the rows per expert. A wrong choice shows as a cliff: time that grows faster than tokens.
Prints microseconds of a forward pass, routing given, and below them the largest growth of time over growth of tokens
between counts at least a factor of two apart: 1 or less means no cliff. Tokens choose experts at random. Each
count's results are compared with those of the largest count, bit by bit. On a CPU small layers are timed.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file
from jgg.cli.console import print_table
from jgg.core.quantized import QuantizedArray

TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_CALLS, _REPEATS = 20, 5


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a layer and the format of their weights: E, k, features, hidden features."""

    experts: int
    topk: int
    features: int
    hidden: int
    format: str

    def weights(self) -> tuple[Any, Any]:
        """Random weights [E, H, 2 I] and [E, I, H]."""
        make = {"bfloat16": _normal, "fp8": _in_fp8, "mxfp4": _packed}[self.format]
        shapes = (self.experts, self.features, 2 * self.hidden), (self.experts, self.hidden, self.features)
        return tuple(jax.jit(make, static_argnums=1)(jax.random.key(key), shape) for key, shape in enumerate(shapes))


LAYERS = {
    "gpt-oss-20b mxfp4": Experts(32, 4, 2880, 2880, "mxfp4"),
    "qwen3-30b-a3b fp8": Experts(128, 8, 2048, 768, "fp8"),
    "qwen3-30b-a3b bfloat16": Experts(128, 8, 2048, 768, "bfloat16"),
    "gpt-oss-20b bfloat16": Experts(32, 4, 2880, 2880, "bfloat16"),
}
_SMALL: dict[str, Any] = {"features": 256, "hidden": 128}


def _normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(shape[1] ** -0.5, jnp.bfloat16)


def _in_fp8(key: jax.Array, shape: tuple[int, ...]) -> QuantizedArray:
    return jgg.quantize_weights(_normal(key, shape))


def _packed(key: jax.Array, shape: tuple[int, ...]) -> QuantizedArray:
    """MXFP4: two rows of a column in a byte, and a scale of 2**-7 for 32."""
    experts, rows, columns = shape
    pairs = jax.random.bits(key, (experts, rows // 2, columns), jnp.uint8)
    return QuantizedArray(pairs, jnp.full((experts, rows // 32, columns), 120, jnp.uint8))


def measure(layer: Experts, tokens: tuple[int, ...]) -> dict[int, float]:
    """Seconds of a forward pass for each number of tokens.

    Raises: ValueError: a token's bits differ between a count and the largest count.
    """
    w_gate_up, w_down = layer.weights()
    x = jax.random.normal(jax.random.key(2), (max(tokens), layer.features), jnp.bfloat16)
    routing = jgg.route(jax.random.normal(jax.random.key(3), (max(tokens), layer.experts)), layer.topk)

    @jax.jit
    def mlp(x: jax.Array, weights: jax.Array, choices: jax.Array, w_gate_up: Any, w_down: Any) -> jax.Array:
        order = jgg.sort_by_expert(choices, layer.experts)
        return jgg.moe_mlp(x, w_gate_up, w_down, jgg.Routing(weights, choices, *order), w_layout="ekn")

    @jax.jit
    def several(x: jax.Array, *others: Any) -> jax.Array:
        """One forward pass after the other, so that launching them from Python takes no time."""
        return jax.lax.fori_loop(0, _CALLS, lambda _, x: x + mlp(x, *others) * jnp.bfloat16(2**-8), x)

    def operands(count: int) -> tuple[Any, ...]:
        return x[:count], routing.topk_weights[:count], routing.topk_indices[:count], w_gate_up, w_down

    of_most = np.asarray(mlp(*operands(max(tokens))).astype(jnp.float32))
    for count in tokens:
        y = np.asarray(mlp(*operands(count)).astype(jnp.float32))
        if jax.default_backend() == "gpu" and not np.array_equal(y, of_most[:count]):
            raise ValueError(f"{count} tokens must have the bits that they have among {max(tokens)}, got others")
    return {count: _median(functools.partial(several, *operands(count))) / _CALLS for count in tokens}


def _median(call: Callable[[], jax.Array]) -> float:
    jax.block_until_ready(call())
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def largest_growth(seconds: dict[int, float]) -> tuple[float, int, int]:
    """The largest growth of time over growth of tokens, and the two counts that it is between."""
    pairs = [(few, many) for few in seconds for many in seconds if many >= 2 * few]
    return max((seconds[many] / seconds[few] * few / many, few, many) for few, many in pairs)


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="the layers whose names have this text")
    parser.add_argument("--json", type=new_file, help="write the table into this file too")
    parser.set_defaults(parser=parser)
    return parser


def run(args) -> int:
    """Measures and prints a table; returns 1 if a layer has a cliff."""
    names = [name for name in LAYERS if args.only in name]
    if not names:
        args.parser.error(f"--only must be part of one of {', '.join(LAYERS)}, got {args.only}")
    is_small = jax.default_backend() == "cpu"
    tokens = TOKENS[:9] if is_small else TOKENS
    layers = [dataclasses.replace(LAYERS[name], **_SMALL if is_small else {}) for name in names]
    found = {name: measure(layer, tokens) for name, layer in zip(names, layers, strict=True)}
    rows = [(count, *(f"{own[count] * 1e6:,.0f}" for own in found.values())) for count in tokens]
    print_table(("tokens", *(f"{name}, us" for name in names)), rows)
    growths = {name: largest_growth(own) for name, own in found.items()}
    for name, (growth, few, many) in growths.items():
        print(f"{name}: time grows at most {growth:.2f} times as fast as tokens, from {few} to {many}")
    if args.json:
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "seconds": found}, indent=2) + "\n")
    return int(any(growth > 1 for growth, *_ in growths.values()))


def main(argv=None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
