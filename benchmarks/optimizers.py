"""Measures Muon: its iterations compared with other libraries', its share of a training step, and what models learn.

    python -m benchmarks.optimizers --run orthogonalize --peers optax,quack
    python -m benchmarks.optimizers --run step --layers 8 --batch 16
    python -m benchmarks.optimizers --run loss --steps 600
    python -m benchmarks.optimizers --run states --steps 1000

orthogonalize: five iterations on stacks of experts of Qwen3-30B-A3B, with the largest error of a singular value against
the same iterations in float32. step: a step of a model of its sizes with random weights in bfloat16, under SGD without
momentum, AdamW and Muon. loss: the held-out bits per byte of the demo's model under AdamW and under optax's Muon and
jgg's with the same rates. states: the training losses of the same model with states in float32 and in 8 bits. On a CPU
small sizes are measured.

QuACK's is the plain iteration by `gemm_symmetric` and torch.baddbmm; `pip install quack-kernels==0.6.5`, torch.
"""

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx

import jgg.optim
from benchmarks.model_configs import config_of
from benchmarks.models import make_step, random_model
from benchmarks.peers import to_jax, to_torch, why_not
from benchmarks.small_model import Settings, held_out_bits, held_out_windows, load_corpus, make_model, make_trainer
from jgg.cli import options
from jgg.cli import run as run_command
from jgg.cli.arguments import new_file, positive_int
from jgg.cli.console import number, print_table
from jgg.cli.demo.model import HEAD_DIM
from jgg.cli.errors import UsageError
from jgg.core.quantized import count_numbers
from jgg.optim.coefficients import coefficients_of
from jgg.train.planning import num_bytes
from jgg.tuning.timing import first_line, median_seconds

RUNS = "orthogonalize", "step", "loss", "states"
LAST = 50  # steps whose losses are averaged
PEERS = "optax", "quack"
SIZES = (128, 1536, 2048), (128, 768, 2048)
SMALL_SIZES = ((4, 48, 64),)
_CALLS = 4
_NUMBERS = optax.contrib.MuonDimensionNumbers(-2, -1)
_QUACK_TILES = (128, 256, False), (128, 192, True), (128, 128, True)  # tile_M, tile_N, pingpong


def ways(peers: tuple[str, ...]) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Names, functions of x in bfloat16, and whether JAX compiles them."""
    for dtype, method in (("float16", "gram"), ("float16", "standard"), ("bfloat16", "standard")):
        for name, implementation in (("jgg", None), ("XLA", "xla")):
            run = functools.partial(
                jgg.optim.orthogonalize, ns_dtype=dtype, ns_method=method, implementation=implementation
            )
            yield f"{name}, {method}, {dtype}", run, True
    if "optax" in peers:
        yield "optax, bfloat16", _optax, True
    if "quack" in peers:
        why = why_not("torch", "quack.gemm_symmetric")
        if why is None:
            yield from ((f"QuACK, {tile}, bfloat16", functools.partial(_quack, tile), False) for tile in _QUACK_TILES)
        else:
            print(f"QuACK is left out: {why}")


def _optax(x: jax.Array) -> Any:
    """The update of optax without momentum."""
    optimizer = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=_NUMBERS)
    with jax.numpy_dtype_promotion("standard"):
        return optimizer.update(x, optimizer.init(x))[0]


def _quack(tile: tuple[int, int, bool], x: Any) -> Any:
    """The plain iterations of a tensor [G, N, K] of torch."""
    torch = importlib.import_module("torch")
    symmetric = importlib.import_module("quack.gemm_symmetric").gemm_symmetric
    tile_m, tile_n, pingpong = tile
    multiply = functools.partial(
        symmetric, tile_count_semaphore=None, tile_M=tile_m, tile_N=tile_n, cluster_M=1, cluster_N=1, pingpong=pingpong
    )
    x = x / x.float().norm(dim=(1, 2), keepdim=True).to(x.dtype)
    gram, p = (torch.empty(len(x), x.shape[1], x.shape[1], dtype=x.dtype, device=x.device) for _ in range(2))
    for a, b, c in coefficients_of("standard", 5):
        multiply(x, x, gram, None)
        multiply(gram, gram, p, gram, alpha=c, beta=b)
        x = torch.baddbmm(x, p, x, beta=a)
    return x


def measure_iterations(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each size and way: ms, TFLOP/s of the plain iterations without symmetry, and the error."""
    rows: list[tuple[str, ...]] = []
    for shape in SMALL_SIZES if jax.default_backend() == "cpu" else SIZES:
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        exact = jax.jit(functools.partial(jgg.optim.orthogonalize, ns_dtype="float32", ns_method="standard"))
        wanted = exact(x[:2].astype(jnp.float32))
        flops = 5 * shape[0] * (4 * shape[1] ** 2 * shape[2] + 2 * shape[1] ** 3)
        for name, run, is_jax in ways(args.peers):
            try:
                seconds, y = _timed(jax.jit(run), x) if is_jax else _timed_torch(run, x)
            except Exception as error:  # whatever another library raises
                print(f"{name} is left out: {first_line(error)}")
                continue
            difference = np.asarray(y[:2].astype(jnp.float32) - wanted, np.float64)
            largest = np.linalg.norm(difference, ord=2, axis=(1, 2)).max()
            rows.append(
                (str(list(shape)), name, number(seconds * 1e3), number(flops / seconds / 1e12), f"{largest:.1e}")
            )
    return rows


def _timed(run: Callable[..., Any], x: jax.Array) -> tuple[float, jax.Array]:
    seconds, y = median_seconds(functools.partial(_repeated, run, x, jax.block_until_ready), 10)
    return seconds / _CALLS, y


def _timed_torch(run: Callable[..., Any], x: jax.Array) -> tuple[float, jax.Array]:
    torch, tensor = importlib.import_module("torch"), to_torch(x)
    seconds, y = median_seconds(functools.partial(_repeated, run, tensor, lambda _: torch.cuda.synchronize()), 10)
    return seconds / _CALLS, to_jax(y)


def _repeated(run: Callable[..., Any], x: Any, wait: Callable[[Any], Any]) -> Any:
    """A few calls one after the other, as a step of training has them: the GPU does not wait for Python in between."""
    y = run(x)
    for _ in range(_CALLS - 1):
        y = run(x)
    wait(y)
    return y


def measure_steps(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each optimizer: ms of a step, and what of it is more than SGD's, in ms and percent."""
    is_small = jax.default_backend() == "cpu"
    config, length = config_of("qwen3-30b-a3b", args.layers, is_small), 64 if is_small else args.sequence
    optimizers = {
        "SGD": optax.sgd(1e-4),
        "AdamW": optax.adamw(1e-4),
        "Muon": jgg.optim.muon(1e-4, consistent_rms=0.2, weight_decay=0.1, mu_dtype="bfloat16"),
        "Muon by XLA": jgg.optim.muon(
            1e-4, consistent_rms=0.2, weight_decay=0.1, mu_dtype="bfloat16", ns_dtype="bfloat16", implementation="xla"
        ),
    }
    tokens = jax.random.randint(jax.random.key(1), (args.batch, length + 1), 0, config.vocabulary, jnp.int32)
    rows: list[tuple[str, ...]] = []
    least = None
    for name, optimizer in optimizers.items():
        try:
            seconds = _seconds_of_step(config, optimizer, tokens, args.repeats)
        except jax.errors.JaxRuntimeError as error:
            print(f"{name} is left out: {first_line(error)}")
            continue
        least = seconds if least is None else least
        more = seconds - least
        rows.append((name, number(seconds * 1e3), number(more * 1e3), f"{more / seconds:.0%}"))
        print(*rows[-1], flush=True)
    return rows


def _seconds_of_step(config: Any, optimizer: optax.GradientTransformation, tokens: jax.Array, repeats: int) -> float:
    model = random_model(config, "bfloat16", remat="attention")
    step, state, frozen = make_step(model, nnx.Param, optimizer=optimizer)
    del model
    held = [state]  # each step takes the state of the one before
    del state

    def call() -> jax.Array:
        held[0], loss = step(held[0], frozen, tokens)
        return loss

    jax.block_until_ready(call())
    seconds, loss = median_seconds(call, repeats)
    if not jnp.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss}")
    return seconds


def measure_losses(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each optimizer and seed: the held-out bits per byte of the demo's model."""
    rows: list[tuple[str, ...]] = []
    for seed in range(args.seeds):
        for name, make in _optimizers(args.steps).items():
            _, _, held_out = _learned(args, make, seed)
            rows.append((name, str(seed), f"{held_out:.4f}"))
            print(*rows[-1], flush=True)
    return rows


def measure_states(args: argparse.Namespace) -> list[tuple[str, ...]]:
    """A row for each optimizer, seed and kind of state.

    It has bytes of state per parameter, bits per byte in the mean of the last steps and held out, and the largest
    difference from float32 states of means of 50 steps.
    """
    rows: list[tuple[str, ...]] = []
    optimizers = _optimizers(args.steps)
    kinds: dict[str, Callable[..., Any]] = {
        "float32": lambda optimizer: optimizer,
        "8 bits": jgg.optim.states_in_8_bits,
    }
    for seed in range(args.seeds):
        for name in ("AdamW", "AdamW, b2 0.999", "jgg's Muon"):
            wanted = None
            for kind, wrap in kinds.items():
                make = lambda numbers, wrap=wrap, name=name: wrap(optimizers[name](numbers))  # noqa: E731
                losses, size, held_out = _learned(args, make, seed)
                last = min(LAST, len(losses))
                means = np.convolve(losses, np.full(last, 1 / last), "valid")
                wanted = means if wanted is None else wanted
                row = f"{size:.2f}", f"{means[-1]:.4f}", f"{held_out:.4f}", f"{np.abs(means - wanted).max():.4f}"
                rows.append((name, str(seed), kind, *row))
                print(*rows[-1], flush=True)
    return rows


def _learned(
    args: argparse.Namespace, make: Callable[[Any], optax.GradientTransformation], seed: int
) -> tuple[np.ndarray, float, float]:
    """Trains the demo's model: the bits per byte of each step, bytes of state per parameter, held-out bits per byte."""
    settings = Settings(
        args.steps, args.demo_batch, args.demo_sequence, args.hidden, args.demo_layers, experts=8, topk=2,
        seed=seed, implementation=None, dtype="float32", fp8=False,
    )  # fmt: skip
    corpus = load_corpus()
    model_key, data_key = jax.random.split(jax.random.key(seed))
    model = make_model(settings, nnx.Rngs(model_key))
    params = nnx.state(model, nnx.Param)
    optimizer = make(jgg.optim.matrices(params))
    size = num_bytes(jax.eval_shape(optimizer.init, params)) / count_numbers(params)
    trainer, batch_of = make_trainer(model, optimizer, settings, corpus.train, data_key)
    losses = [record.metrics["bits_per_byte"] for record in trainer.fit(batch_of, args.steps, every=(args.steps,))]
    windows = held_out_windows(corpus.held_out, settings.seq, settings.batch)
    return np.concatenate(losses), size, held_out_bits(trainer.model, *windows).item()


def _optimizers(steps: int) -> dict[str, Callable[[Any], optax.GradientTransformation]]:
    """Functions of the dimension numbers of the matrices; all optimizers have the demo's schedule of AdamW."""
    warmup = max(steps // 10, 1)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup, max(steps, warmup + 1), end_value=1.5e-4)
    options: dict[str, Any] = {"consistent_rms": 0.2, "weight_decay": 0.1, "adam_b2": 0.95, "adam_weight_decay": 0.1}

    def clipped(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optimizer)

    def by_optax(numbers: Any) -> optax.GradientTransformation:
        return clipped(optax.contrib.muon(rate, muon_weight_dimension_numbers=numbers, **options))

    return {
        "AdamW": lambda numbers: clipped(optax.adamw(rate, b2=0.95, weight_decay=0.1)),
        "AdamW, b2 0.999": lambda numbers: clipped(optax.adamw(rate, weight_decay=0.1)),
        "optax's Muon": by_optax,
        "jgg's Muon": lambda numbers: clipped(jgg.optim.muon(rate, **options)),
        "jgg's Muon, Polar Express": lambda _: clipped(jgg.optim.muon(rate, "polar_express", **options)),
    }


_RUNS: dict[str, tuple[Callable[[argparse.Namespace], list[tuple[str, ...]]], tuple[str, ...]]] = {
    "orthogonalize": (measure_iterations, ("stack", "by", "ms", "TFLOP/s", "error")),
    "step": (measure_steps, ("optimizer", "ms", "more than SGD", "share")),
    "loss": (measure_losses, ("optimizer", "seed", "bits/byte")),
    "states": (measure_states, ("optimizer", "seed", "state", "bytes", "bits/byte", "held out", "difference")),
}


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.optimizers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", choices=RUNS, default=RUNS[0], help="what is measured (default: %(default)s)")
    parser.add_argument("--peers", help=f"some of {','.join(PEERS)}")
    for name, default, what in (
        ("layers", 8, "layers of --run step"),
        ("batch", 16, "sequences of --run step"),
        ("sequence", 4096, "tokens of a sequence of --run step"),
        ("repeats", 5, "timed steps of --run step"),
        ("steps", 600, "steps of --run loss and states"),
        ("seeds", 1, "seeds of --run loss and states"),
        ("hidden", 128, "features of the demo's model"),
        ("demo-layers", 3, "layers of the demo's model"),
        ("demo-batch", 8, "windows of a step of the demo"),
        ("demo-sequence", 128, "bytes of a window of the demo"),
    ):
        parser.add_argument(f"--{name}", type=positive_int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--json", type=new_file, help="write the table into this file too")
    parser.set_defaults(parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table."""
    args.peers = options.names("--peers", args.peers, PEERS) if args.peers else ()
    if args.hidden % HEAD_DIM:
        raise UsageError(f"--hidden must be a multiple of {HEAD_DIM}, got {args.hidden}")
    measure, headings = _RUNS[args.run]
    rows = measure(args)
    print_table(headings, rows, headings[: {"step": 1, "states": 3}.get(args.run, 2)])
    if args.json:
        cells = [dict(zip(headings, row, strict=True)) for row in rows]
        args.json.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": cells}, indent=2))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_command(make_parser().parse_args(argv), run)


if __name__ == "__main__":
    sys.exit(main())
