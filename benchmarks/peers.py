"""The peers of `benchmarks.gemms`: what `jgg bench` compares with, and grouped GEMMs of other installed libraries."""

import dataclasses
import functools
import importlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgg.core.choices import FP8
from jgg.core.problem import DTYPES
from jgg.tuning import timing, ways
from jgg.tuning.timing import FAILED, RIGHT, WRONG, Measurement, Timing, first_line
from jgg.tuning.ways import Reference, Way, check_and_time

FLOATS = tuple(jnp.dtype(dtype).name for dtype in DTYPES)


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library or function with which jgg is compared.

    Attributes:
      prepare: function (op, problem, arrays) -> the ways in which the peer computes this product. `arrays` are made by
        `workloads.operands`; the function converts them to the layout that the peer needs. For a whole layer, problem
        is a `benchmarks.layer.LayerProblem` with its operands, and op one of `benchmarks.layer.PASSES`.
      dtypes: names of the dtypes for which the peer is measured.
      unavailable: function () -> why the peer cannot run here, in one line, or None if it can.
    """

    prepare: Callable[[str, Any, dict[str, Any]], Iterable[Way]]
    dtypes: tuple[str, ...] = FLOATS
    unavailable: Callable[[], str | None] = lambda: None


@dataclasses.dataclass(frozen=True)
class BestOfWays(Measurement):
    """The measurement of the fastest of several ways; `others` has a line for each other way that was not right."""

    others: tuple[str, ...] = ()


def measure_best(prepare: Callable[[], Iterable[Way]], reference: Reference) -> Measurement:
    """Checks and times each way that `prepare()` gives; returns the fastest right one, else the first wrong one."""
    try:
        found = prepare()
    except Exception as error:  # whatever another library raises
        return Measurement(FAILED, reason=first_line(error))
    measured = [check_and_time(way, reference) for way in found]
    order = (RIGHT, WRONG, FAILED)
    best = min(measured, key=lambda m: (order.index(m.status), m.seconds or 0))
    others = tuple(f"{m.variant}: {m}" for m in measured if m is not best and m.status != RIGHT)
    return BestOfWays(**vars(best), others=others)


@dataclasses.dataclass(frozen=True)
class TorchProduct(Way):
    """A product computed by torch on the GPU that JAX uses.

    Attributes:
      call: starts the product and returns its tensor.
      bytes_accessed: bytes of one call.
      out: the tensor that every call writes; None if each call makes a new one.
    """

    call: Callable[[], Any]
    bytes_accessed: int
    out: Any = None

    def compute(self) -> jax.Array:
        """The product."""
        if self.out is not None:
            self.out.fill_(float("nan"))  # so that an earlier call's result cannot pass for this one's
        return to_jax(self.call())

    def measure(self) -> Timing:
        """Times the product."""
        seconds = torch_seconds(self.call, flushes=timing.stays_in_l2(self.bytes_accessed))
        return Timing(seconds, self.compute())


def _torch_operands(op, problem, arrays):
    """Returns A, B, the first row of each group, and the token of each row or None if rows are in expert order.

    The product is D[i] = A[i] @ B[e]^T for row i of expert e; dW is D[e] = A[:, rows] @ B[:, rows]^T.
    """
    x, w, dy = (to_torch(arrays[name]) for name in ("x", "w", "dy"))
    w_enk = w if problem.w_layout == "enk" else w.transpose(1, 2)
    starts = to_torch(jnp.pad(jnp.cumsum(arrays["group_sizes"], dtype=jnp.int32), (1, 0)))
    if op == "dw":
        a, b = (dy, x) if problem.w_layout == "enk" else (x, dy)
        return a.t(), b.t(), starts, None
    if op == "dx":
        return dy, w_enk.transpose(1, 2), starts, None
    return x, w_enk, starts, to_torch(_tokens(problem, arrays)) if problem.permute_x else None


def _grouped_mm(op, problem, arrays):
    """Prepares torch._grouped_mm (CUTLASS); index_select gathers the rows first if x is in token order."""
    torch = importlib.import_module("torch")
    a, b, starts, tokens = _torch_operands(op, problem, arrays)
    ends = starts[1:].clone()  # a copy is aligned, the view is not

    def call():
        rows = a if tokens is None else a.index_select(0, tokens)
        return torch._grouped_mm(rows, b.transpose(-2, -1), offs=ends)

    return [TorchProduct(call, problem.bytes_accessed(op))]


_QUACK_TILES = ((128, 192, True), (128, 160, True), (128, 256, False), (256, 192, False))  # tile_m, tile_n, pingpong


def _quack(op, problem, arrays):
    """Prepares QuACK's GEMM of variable lengths (CuTe DSL) with several tiles and clusters; its kernel gathers rows."""
    torch = importlib.import_module("torch")
    gemm = importlib.import_module("quack.gemm").gemm
    a, b, starts, tokens = _torch_operands(op, problem, arrays)
    lengths = {"cu_seqlens_k" if op == "dw" else "cu_seqlens_m": starts}
    if tokens is not None:
        lengths["A_idx"] = tokens
    shape = {"forward": problem.y_shape, "dx": problem.x_shape, "dw": problem.w_shape}[op]
    out = torch.empty(shape, dtype=a.dtype, device=a.device)

    def product(tile_m, tile_n, pingpong, cluster_m):
        sizes = {"tile_M": tile_m, "tile_N": tile_n, "cluster_M": cluster_m, "cluster_N": 1}

        def call():
            gemm(a, b, out, None, None, **sizes, pingpong=pingpong, persistent=True, **lengths)
            return out

        variant = f"{tile_m}x{tile_n}{' pingpong' * pingpong}, cluster {cluster_m}x1"
        return TorchProduct(call, problem.bytes_accessed(op), out, variant=variant)

    return [product(*tile, cluster_m) for tile in _QUACK_TILES for cluster_m in (2, 1)]


def _tokens(problem, arrays):
    return arrays["gather_indices"] // problem.topk


def why_not(*modules: str) -> str | None:
    """Why modules cannot be imported, or torch, if it is one of them, cannot run on the GPU that JAX uses."""
    try:
        list(map(importlib.import_module, modules))
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # whatever another library raises
        return first_line(error)
    if "torch" not in modules:
        return None
    if jax.default_backend() != "gpu":
        return "JAX has no GPU"
    return None if importlib.import_module("torch").cuda.is_available() else "torch has no CUDA device"


def to_torch(array: jax.Array) -> Any:
    """The array as a tensor on the GPU, without a copy where DLPack allows."""
    torch = importlib.import_module("torch")
    array = jax.block_until_ready(array)
    try:
        return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError):
        integers = np.array(array).view(f"int{8 * array.dtype.itemsize}")  # NumPy's bfloat16 is not torch's
        return torch.from_numpy(integers).cuda().view(getattr(torch, array.dtype.name))


def to_jax(tensor: Any) -> jax.Array:
    """The tensor as an array, without a copy where DLPack allows."""
    torch = importlib.import_module("torch")
    tensor = tensor.contiguous()
    torch.cuda.synchronize()
    try:
        return jax.dlpack.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):
        integers = tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")).cpu().numpy()
        return jnp.asarray(integers.view(jnp.dtype(str(tensor.dtype).removeprefix("torch."))))


def torch_seconds(call: Callable[[], Any], flushes: bool) -> float:
    """Seconds of a call on the device, measured in the same way as by `timing.measure`."""
    torch = importlib.import_module("torch")
    filler = torch.zeros(timing.LARGER_THAN_L2 // 4 if flushes else 0, dtype=torch.int32, device="cuda")

    def flush_and_call():
        if flushes:
            filler.max()
        call()

    calls = timing.calls_of_repeat(_event_seconds(flush_and_call, 3) / 3)
    seconds = statistics.median(_event_seconds(flush_and_call, calls) for _ in range(timing.REPEATS))
    if flushes:
        seconds -= statistics.median(_event_seconds(filler.max, calls) for _ in range(timing.REPEATS))
    torch.cuda.empty_cache()  # JAX needs the memory
    return max(seconds, 1e-9) / calls


def _event_seconds(call, calls):
    """Seconds that `calls` calls together take on the device."""
    torch = importlib.import_module("torch")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()  # while it runs, the host gets ahead of the device
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def tokamax_functions() -> dict[str, Callable]:
    """tokamax's grouped product, by the implementation that it chooses; on a GPU, also by the one in Triton."""
    function = importlib.import_module("tokamax").ragged_dot
    functions = {"by default": function}
    if jax.default_backend() == "gpu":
        functions["triton"] = functools.partial(function, implementation="triton")
    return functions


def one_way(prepare: Callable[..., Way]) -> Callable[..., list[Way]]:
    """Makes `Peer.prepare` of a function that returns one way."""
    return lambda *arguments: [prepare(*arguments)]


def _tokamax(op, problem, arrays):
    return [ways.ragged_dot(op, problem, arrays, function, name) for name, function in tokamax_functions().items()]


PEERS = {
    "dense": Peer(one_way(ways.dense), (*FLOATS, FP8)),
    "ragged_dot": Peer(one_way(ways.ragged_dot)),
    "bfloat16": Peer(one_way(ways.in_bfloat16), (FP8,)),
    "tokamax": Peer(_tokamax, unavailable=lambda: why_not("tokamax")),
    "torch": Peer(_grouped_mm, ("bfloat16",), lambda: why_not("torch")),
    "quack": Peer(_quack, ("float16", "bfloat16"), lambda: why_not("torch", "quack.gemm")),
}
