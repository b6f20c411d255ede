"""Times dense products by the kernels and by XLA, as layers of a model run them: weights in a stack, in a scan.

    python -m benchmarks.dense
    python -m benchmarks.dense --rows 1,8 --shapes 2048x4096
    python -m benchmarks.dense --write

For x [rows, K] and each w [K, N] it checks the two against each other and prints the microseconds per layer of each.
With few rows it times the forward pass, as in decoding; with more, the forward and the backward pass, w frozen or
trained, with and without LoRA. `--write` writes which is faster into jgg/launching/dense_products.json, where jgg
looks it up.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgg.cli.arguments import new_file
from jgg.core.gpu_target import current_target
from jgg.core.matrix import Factors, Matrix
from jgg.launching import dense_choice
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.linear.dense import dense_layer, dense_operands
from jgg.linear.differentiable import compute
from jgg.linear.linear import Configs

# attention of Qwen3-30B and gpt-oss-20b, a dense MLP, a shared expert, and Qwen3's head
SHAPES = (
    (2048, 4096),
    (2048, 512),
    (4096, 2048),
    (2880, 4096),
    (2880, 512),
    (4096, 2880),
    (2048, 12288),
    (6144, 2048),
    (2048, 1536),
    (768, 2048),
    (2048, 151936),
)
FEW_ROWS, MANY_ROWS = (1, 8, 32, 64, 128), (1024, 8192)
RANK = 16
_STACK_BYTES = 2**28  # more than a GPU's L2 cache holds
_PASSES = {"forward": (), "frozen": (0,), "trained": (0, 1)}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: x [rows, K], w [K, N], which pass, and whether with LoRA."""

    rows: int
    k: int
    n: int
    passes: str
    has_term: bool = False

    @property
    def layers(self) -> int:
        """How many weights the stack has."""
        return max(1, min(64, _STACK_BYTES // (2 * self.k * self.n)))


def cases(shapes: tuple[tuple[int, int], ...], rows: tuple[int, ...]) -> list[Case]:
    """The cases of these sizes."""
    found = []
    for k, n in shapes:
        for count in rows:
            if count <= max(FEW_ROWS):
                found.append(Case(count, k, n, "forward"))
            elif n < 2**16:
                found += [Case(count, k, n, passes, term) for passes in ("frozen", "trained") for term in (False, True)]
    return found


def program(case: Case, implementation: str, config: KernelConfigForward | None = None) -> Any:
    """The compiled program of a case and its arrays: all layers one after the other."""
    keys = jax.random.split(jax.random.key(0), 4)
    layers, dtype = case.layers, jnp.bfloat16
    normal = functools.partial(jax.random.normal, dtype=dtype)
    x, w = normal(keys[0], (case.rows, case.k)), normal(keys[1], (layers, case.k, case.n)) * case.k**-0.5
    factors = None
    if case.has_term:
        a, b = normal(keys[2], (layers, case.k, RANK)) * case.k**-0.5, normal(keys[3], (layers, RANK, case.n))
        factors = Factors(a, b)

    def one(x: jax.Array, own: Matrix) -> tuple[jax.Array, None]:
        linear = dense_layer(x, own, implementation=implementation)
        linear = dataclasses.replace(linear, configs=Configs(forward=config))
        y = compute(linear, dense_operands(linear, x, own))
        width = min(case.k, case.n)
        return x.at[:, :width].add(0.125 * y[:, :width]), None

    def run(x: jax.Array, w: jax.Array, factors: Factors | None) -> jax.Array:
        return jax.lax.scan(one, x, Matrix(dense=w, factors=factors))[0]

    function: Any = run
    if case.passes != "forward":
        trained = (0, 1) if case.passes == "trained" else (0,)
        trained = (*trained, 2) if case.has_term else trained
        function = jax.grad(lambda *arrays: jnp.sum(run(*arrays).astype(jnp.float32) ** 2), trained)
    return jax.jit(function).lower(x, w, factors).compile(), (x, w, factors)


def microseconds(compiled: Any, arrays: Any, layers: int, seconds: float = 0.06, turns: int = 5) -> float:
    """The median time of a layer."""
    jax.block_until_ready(compiled(*arrays))
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arrays))
    calls = max(1, int(seconds / turns / (time.perf_counter() - start)))
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = compiled(*arrays)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls / layers * 1e6)
    return statistics.median(times)


def variants(case: Case, tries_configs: bool) -> dict[str, tuple[str, KernelConfigForward | None]]:
    """The ways to compute a case by name."""
    found: dict[str, tuple[str, KernelConfigForward | None]] = {"xla": ("xla", None), "kernels": ("triton", None)}
    if tries_configs and case.passes == "forward":
        rows = 16 if case.rows <= 16 else 32 if case.rows <= 32 else 64
        for columns, step, stages, programs in (
            (128, 128, 3, 2),
            (64, 128, 4, 1),
            (64, 128, 6, 2),
            (64, 256, 4, 1),
            (32, 128, 6, 2),
            (32, 128, 4, 4),
            (32, 256, 4, 1),
            (32, 256, 3, 2),
        ):
            name = f"{rows}x{columns}x{step} {stages} stages, {programs} a multiprocessor"
            found[name] = (
                "triton",
                KernelConfigForward(
                    block_m=rows,
                    block_n=columns,
                    block_k=step,
                    num_warps=4,
                    num_stages=stages,
                    programs_per_sm=programs,
                ),
            )
    return found


def measure(case: Case, tries_configs: bool) -> dict[str, float | str]:
    """Microseconds by variant; of one that gives other numbers than XLA, "wrong"."""
    ways = variants(case, tries_configs)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        compiled = {name: pool.submit(program, case, *way) for name, way in ways.items()}
    results: dict[str, float | str] = {}
    expected = None
    for name, future in compiled.items():
        try:
            run, arrays = future.result()
            got = np.asarray(jax.tree.leaves(run(*arrays))[0], np.float32)
        except Exception as error:
            results[name] = str(error).splitlines()[0][:60]
            continue
        expected = got if expected is None else expected
        is_close = np.allclose(got, expected, rtol=0, atol=0.05 * np.abs(expected).max())
        results[name] = microseconds(run, arrays, case.layers) if is_close else "wrong"
    return results


def entries_of(measured: list[dict[str, Any]]) -> list[dense_choice.Measured]:
    """The entries of jgg's table: frozen weights with LoRA, or trained weights; with few rows one entry for both."""
    entries = []
    for case in measured:
        is_forward = case["passes"] == "forward"
        if is_forward or case["has_term"] == (case["passes"] == "frozen"):
            entry = dense_choice.Measured(
                compute_capability=current_target().compute_capability,
                rows=case["rows"],
                k=case["k"],
                n=case["n"],
                has_term=None if is_forward else case["has_term"],
                kernels=round(case["times"]["kernels"], 1),
                xla=round(case["times"]["xla"], 1),
            )
            entries.append(entry)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, FEW_ROWS + MANY_ROWS)), help="numbers of rows")
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in SHAPES), help="KxN of weights")
    parser.add_argument("--configs", action="store_true", help="try more configurations of the kernels with few rows")
    parser.add_argument("--write", action="store_true", help="write the table that jgg chooses from")
    parser.add_argument("--json", type=new_file, help="write all times into this file")
    args = parser.parse_args()
    shapes = tuple(tuple(map(int, shape.split("x"))) for shape in args.shapes.split(","))
    rows = tuple(map(int, args.rows.split(",")))
    measured = []
    for case in cases(shapes, rows):  # type: ignore[arg-type]
        times = measure(case, args.configs)
        measured.append({**dataclasses.asdict(case), "times": times})
        shown = ", ".join(
            f"{name} {each:.1f}" if isinstance(each, float) else f"{name} {each}" for name, each in times.items()
        )
        term = " LoRA" if case.has_term else ""
        print(f"{case.rows:6} x {case.k:5} x {case.n:6} {case.passes}{term}: {shown}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "measured": measured}))
    if args.write:
        dense_choice_file = Path(dense_choice.__file__).with_name("dense_products.json")
        dense_choice_file.write_text(dense_choice.as_text(entries_of(measured)))


if __name__ == "__main__":
    main()
