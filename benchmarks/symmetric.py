"""Times symmetric products by the kernels, by XLA and by QuACK, each checked before.

    python -m benchmarks.symmetric
    python -m benchmarks.symmetric --shapes 128x1536x2048 --configs
    python -m benchmarks.symmetric --json FILE

For each GxNxK it prints milliseconds, and the TF/s of the whole product, both halves counted, of

    gram     x @ x^T, x [G, N, K]
    square   2 a - 0.5 a @ a, a [G, N, N]: a term of the polynomial of a Newton-Schulz iteration
    apply    p @ x, p [G, N, N], an ordinary product, of jgg and XLA alone
"""

import argparse
import dataclasses
import functools
import importlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.peers import TorchProduct, to_torch, why_not
from jgg.cli.arguments import new_file
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.linear import symmetric
from jgg.tuning.timing import FAILED, Measurement, Reference, first_line
from jgg.tuning.ways import JaxProduct, Way, check_and_time

SHAPES = ((128, 1536, 2048), (128, 768, 2048))  # Qwen3-30B's experts: gate and up, and down
PRODUCTS = ("gram", "square", "apply")
SCALE, ADD_SCALE = -0.5, 2.0  # of a square
_TILES = ((128, 128, 4, 2), (128, 128, 8, 1), (128, 256, 8, 1), (256, 128, 8, 1))  # rows, columns, warps, programs


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: one of PRODUCTS of G matrices."""

    product: str
    groups: int
    size: int
    features: int
    dtype: str

    @property
    def flops(self) -> int:
        """Of the whole product."""
        columns, reduced = (self.features, self.size) if self.product == "apply" else (self.size, self.reduced)
        return 2 * self.groups * self.size * columns * reduced

    @property
    def reduced(self) -> int:
        """Over how many features a symmetric product adds up."""
        return self.features if self.product == "gram" else self.size

    @property
    def bytes_accessed(self) -> int:
        """What must be read and written, once each."""
        read = self.features + self.size if self.product == "apply" else self.reduced
        written = self.features if self.product == "apply" else self.size
        return self.groups * self.size * (read + written) * jnp.dtype(self.dtype).itemsize

    def arrays(self) -> dict[str, jax.Array]:
        """The operands; group_sizes has no meaning, but `timing.measure` needs it."""
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (self.groups, self.size, self.features)) * self.features**-0.5
        arrays = {"x": x.astype(self.dtype), "group_sizes": jnp.zeros(1, jnp.int32)}
        if self.product == "gram":
            return arrays
        a = jax.random.normal(keys[1], (self.groups, self.size, self.size)) * (4 * self.size) ** -0.5
        a = (a + jnp.swapaxes(a, 1, 2)).astype(self.dtype)
        return {"a": a, "group_sizes": arrays["group_sizes"]} if self.product == "square" else arrays | {"a": a}

    def compute(
        self,
        arrays: dict[str, jax.Array],
        implementation: str | None,
        config: KernelConfigForward | None = None,
        precision: str | None = None,
    ) -> jax.Array:
        """The product by jgg or, in plain JAX, by XLA."""
        options: dict[str, Any] = {"implementation": implementation, "precision": precision}
        if self.product == "apply":
            return symmetric.apply(arrays["a"], arrays["x"], **options)
        options["kernel_config"] = config
        if self.product == "gram":
            return symmetric.symmetric_product(arrays["x"], **options)
        a = arrays["a"]
        return symmetric.symmetric_product(a, scale=SCALE, add=a, add_scale=ADD_SCALE, **options)


def configs(case: Case, tries_more: bool) -> dict[str, KernelConfigForward | None]:
    """The configurations of jgg's kernels that are timed, by their names."""
    found: dict[str, KernelConfigForward | None] = {"kernels": None}
    if case.product == "apply":
        return found
    for rows, columns, warps, programs in _TILES if tries_more else ():
        found[f"{rows}x{columns}, {warps} warps, {programs} an SM"] = KernelConfigForward(
            block_m=rows, block_n=columns, num_warps=warps, num_stages=3, programs_per_sm=programs
        )
    return found


def quack(case: Case, arrays: dict[str, jax.Array]) -> Way:
    """QuACK's symmetric product (CuTe DSL), as it chooses its tiles."""
    torch = importlib.import_module("torch")
    gemm_symmetric = importlib.import_module("quack.gemm_interface").gemm_symmetric
    left = to_torch(arrays["x" if case.product == "gram" else "a"])
    out = torch.empty((case.groups, case.size, case.size), dtype=left.dtype, device=left.device)
    terms = {} if case.product == "gram" else {"C": left, "alpha": SCALE, "beta": ADD_SCALE}

    def call() -> Any:
        gemm_symmetric(left, left.mT, out=out, **terms)
        return out

    return TorchProduct(call, case.bytes_accessed, out)


def ways(case: Case, arrays: dict[str, jax.Array], tries_more: bool) -> Iterator[tuple[str, Way]]:
    """The ways to compute a case, by their names."""
    own = (None, *configs(case, tries_more).items()) if jax.default_backend() == "gpu" else (None,)
    for each in own:
        name, config = ("xla", None) if each is None else each
        compute = functools.partial(case.compute, implementation="xla" if each is None else "triton", config=config)
        yield name, JaxProduct(compute, arrays, case.flops, case.bytes_accessed)
    if case.product != "apply" and why_not("torch", "quack.gemm_interface") is None:
        yield "quack", quack(case, arrays)


def measure(case: Case, tries_more: bool) -> dict[str, Measurement]:
    """Checks and times a case in each way; as much error is right as twice XLA's own."""
    arrays = case.arrays()
    in_float32 = {name: array if name == "group_sizes" else array.astype("float32") for name, array in arrays.items()}
    plain = functools.partial(case.compute, implementation="xla")
    exact = jax.jit(functools.partial(plain, precision="highest"))(in_float32)
    reference = Reference.beside(exact, jax.jit(plain)(arrays), 2)
    measured = {}
    try:
        for name, way in ways(case, arrays, tries_more):
            measured[name] = check_and_time(way, reference)
    except Exception as error:  # whatever another library raises
        measured["quack"] = Measurement(FAILED, reason=first_line(error))
    return measured


def as_text(case: Case, measured: dict[str, Measurement]) -> str:
    """A line for each way."""
    lines = [f"{case.product} {case.groups}x{case.size}x{case.features} {case.dtype}"]
    for name, each in measured.items():
        speed = f"{each.seconds * 1e3:8.3f} ms {case.flops / each.seconds / 1e12:6.0f} TF/s" if each.seconds else each
        lines.append(f"  {name:28} {speed}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join("x".join(map(str, shape)) for shape in SHAPES), help="GxNxK")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--configs", action="store_true", help="try more tiles of the kernel of every GPU")
    parser.add_argument("--json", type=new_file, help="write all measurements into this file")
    args = parser.parse_args(arguments)
    results = []
    for shape in args.shapes.split(","):
        for product in PRODUCTS:
            groups, size, features = map(int, shape.split("x"))
            case = Case(product, groups, size, features, args.dtype)
            measured = measure(case, args.configs)
            print(as_text(case, measured), flush=True)
            results.append(
                {**dataclasses.asdict(case), "measured": {name: each.as_json() for name, each in measured.items()}}
            )
    if args.json:
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "measured": results}))


if __name__ == "__main__":
    main()
