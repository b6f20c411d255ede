"""A whole MoE layer with its router: what is timed, what it must compute, and the memory that it may take."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jgg.measuring.timing import jit_reference, relative_error
from jgg.measuring.workloads import Layer
from jgg.moe import moe_mlp
from jgg.routing import Routing, route, sort_by_expert

FORWARD, FORWARD_BACKWARD, ROUTE = "forward", "forward + backward", "route + sort"
PASSES = (FORWARD, FORWARD_BACKWARD)
WEIGHTS = ("w_router", "w_gate_up", "w_down")
_FLOPS = {FORWARD: 6, FORWARD_BACKWARD: 18}  # times M * H * I
_SCHEDULE_TILES = 64  # rows of the smallest tile that a schedule of many rows has


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """A layer to measure: a softmax router without bias, which chooses and normalizes, and SwiGLU experts.

    Attributes:
      layer: its sizes.
      dtype: of x and all weights.
      w_layout: of the experts' weights, as in `jgg.moe_mlp`.
      implementation: as in `jgg.moe_mlp`.
    """

    layer: Layer
    dtype: str
    w_layout: str = "enk"
    implementation: str | None = None

    @property
    def num_rows(self) -> int:
        """M, the routed rows."""
        return self.layer.tokens * self.layer.topk

    def flops(self, which: str) -> int:
        """Floating-point operations of the experts' products in one of PASSES."""
        return _FLOPS[which] * self.num_rows * self.layer.hidden * self.layer.expert_intermediate

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of x, y's cotangent and the weights."""
        layer = self.layer
        tokens, inner = (layer.tokens, layer.hidden), layer.expert_intermediate
        up, down = (2 * inner, layer.hidden), (layer.hidden, inner)
        if self.w_layout == "ekn":
            up, down = up[::-1], down[::-1]
        return {
            "x": tokens,
            "dy": tokens,
            "w_router": (layer.hidden, layer.experts),
            "w_gate_up": (layer.experts, *up),
            "w_down": (layer.experts, *down),
        }

    def operands(self, seed: int = 0) -> dict[str, jax.Array]:
        """Random arrays of `shapes`, and group_sizes [1], by which `timing.measure` ties one call to the next."""
        normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        fan_in = {"x": 1, "dy": 1, "w_down": self.layer.expert_intermediate}
        arrays = {
            name: normal(key, shape, self.dtype) * jnp.asarray(fan_in.get(name, self.layer.hidden) ** -0.5, self.dtype)
            for key, (name, shape) in zip(keys, self.shapes.items(), strict=True)
        }
        return arrays | {"group_sizes": jnp.zeros(1, jnp.int32)}

    @property
    def bytes_accessed(self) -> int:
        """Bytes of x, y, the weights and the pre-activation, each counted once."""
        return self._bytes("x", "dy", *WEIGHTS) + self._pre_activation_bytes

    @property
    def memory_limit(self) -> float:
        """Bytes that forward + backward should stay below.

        The sum of x, y, the weights, the gradients of all of them, and 1.5 times what may be kept for the backward
        pass: x, the pre-activation, 32 bytes a row and the tile schedule.
        """
        tiles = self.num_rows // _SCHEDULE_TILES + self.layer.experts
        kept = self._bytes("x") + self._pre_activation_bytes + 32 * self.num_rows + 12 * tiles
        return 2 * self._bytes("x", "dy", *WEIGHTS) + 1.5 * kept

    @property
    def _pre_activation_bytes(self):
        return self.num_rows * 2 * self.layer.expert_intermediate * jnp.dtype(self.dtype).itemsize

    def _bytes(self, *names):
        return sum(math.prod(self.shapes[name]) for name in names) * jnp.dtype(self.dtype).itemsize


def logits_of(x: jax.Array, w_router: jax.Array) -> jax.Array:
    """The router's logits, float32 [T, E]; not by TF32, whose rounding would change choices."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, w_router, precision=precision, preferred_element_type=jnp.float32)


@functools.cache  # so that programs of the same layer share what is compiled
def layer_function(problem: LayerProblem, which: str) -> Callable:
    """The function from operands to a dict of results, for one of PASSES.

    The results are y, the experts chosen, and with the backward pass the gradients of x and the weights by name.
    """

    def forward(floats):
        logits = logits_of(floats["x"], floats["w_router"])
        routing = route(logits, problem.layer.topk, implementation=problem.implementation)
        y = moe_mlp(
            floats["x"], floats["w_gate_up"], floats["w_down"], routing,
            w_layout=problem.w_layout, implementation=problem.implementation,
        )  # fmt: skip
        return y, routing.topk_indices

    return functools.partial(_run, forward, which)


def _run(forward, which, arrays):
    floats = {name: arrays[name] for name in ("x", *WEIGHTS)}
    if which == FORWARD:
        y, topk_indices = forward(floats)
        return {"y": y, "topk_indices": topk_indices}
    y, vjp, topk_indices = jax.vjp(forward, floats, has_aux=True)
    y, dy = jax.lax.optimization_barrier((y, arrays["dy"]))  # as in training, the backward pass comes after y
    (gradients,) = vjp(dy)
    return {"y": y, "topk_indices": topk_indices} | {f"d {name}": d for name, d in gradients.items()}


@functools.cache
def route_function(problem: LayerProblem) -> Callable:
    """The function from {"logits": ...} to the Routing, all fields of it."""

    def run(arrays):
        return route(arrays["logits"], problem.layer.topk, implementation=problem.implementation)

    return run


@dataclasses.dataclass(frozen=True)
class LayerReference:
    """What a layer's results must be, given the experts that it chose.

    Attributes:
      exact: y and, with the backward pass, the gradients by name; computed in float32 by the xla implementation.
      bounds: largest error of each, relative to the largest element: three times the xla implementation's own error in
        the problem's dtype. (Both are the largest of a few sums of rounded numbers, and differ by a factor of 2 at
        times.)
      logits: float32, by which the choices are judged.
    """

    exact: dict[str, jax.Array]
    bounds: dict[str, float]
    logits: jax.Array

    @classmethod
    def of(cls, problem: LayerProblem, which: str, arrays: dict, topk_indices: jax.Array):
        """Computes it for the experts chosen, topk_indices int32 [T, k].

        A choice depends on the last bit of the logits where two of them are all but equal, so it is judged apart, by
        `choice_error`.
        """
        own = _expected(problem, which, None)(arrays, topk_indices)
        in_float32 = {name: array.astype(jnp.float32) for name, array in arrays.items() if name in problem.shapes}
        exact = _expected(problem, which, jax.lax.Precision.HIGHEST)(in_float32, topk_indices)
        bounds = {name: 3 * float(relative_error(own[name], exact[name])) + 1e-5 for name in exact}
        logits = logits_of(in_float32["x"], in_float32["w_router"])
        return cls(exact, bounds, logits)

    def errors(self, results: dict) -> dict[str, float]:
        """The largest error of each result relative to its largest element; NaN or Inf where it has some."""
        return {name: float(relative_error(results[name], exact)) for name, exact in self.exact.items()}

    def choice_error(self, topk_indices: jax.Array) -> float:
        """By how much an expert left out beats one chosen, relative to the largest logit; infinite for a wrong index.

        It is negative where every choice is right, and about the logits' rounding where they are equal but for that.
        """
        return float(_choice_error(self.logits, topk_indices))


@functools.cache
def _expected(problem, which, precision):
    """The compiled function (arrays, topk_indices) -> results but for the choices."""

    def run(arrays, topk_indices):
        def forward(floats):
            logits = logits_of(floats["x"], floats["w_router"])
            weights = jax.nn.softmax(jnp.take_along_axis(logits, topk_indices, axis=1))
            routing = Routing(weights, topk_indices, *sort_by_expert(topk_indices, problem.layer.experts, "xla"))
            y = moe_mlp(
                floats["x"], floats["w_gate_up"], floats["w_down"], routing,
                w_layout=problem.w_layout, precision=precision, implementation="xla",
            )  # fmt: skip
            return y, topk_indices

        results = _run(forward, which, arrays)
        del results["topk_indices"]
        return results

    return jit_reference(run)


@jax.jit
def _choice_error(logits, topk_indices):
    num_tokens, num_experts = logits.shape
    in_range = jnp.all((topk_indices >= 0) & (topk_indices < num_experts))
    tokens = jnp.arange(num_tokens)[:, None]
    chosen = jnp.zeros(logits.shape, jnp.int32).at[tokens, topk_indices].add(1, mode="drop")
    worst_chosen = jnp.min(jnp.where(chosen > 0, logits, jnp.inf), axis=1)
    best_left_out = jnp.max(jnp.where(chosen > 0, -jnp.inf, logits), axis=1)
    error = jnp.max(best_left_out - worst_chosen, initial=-jnp.inf) / jnp.max(jnp.abs(logits), initial=1e-30)
    return jnp.where(in_range & jnp.all(chosen <= 1), error, jnp.inf)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a compiled forward + backward takes on its device.

    Attributes:
      arguments, results, temporaries: as the compiler allots them.
      peak_in_use: the most that the device had in use, where this run raised that; what else was held then counts too.
    """

    arguments: int
    results: int
    temporaries: int
    peak_in_use: int | None = None

    @property
    def total(self) -> int:
        """Bytes that must be there at once."""
        return self.arguments + self.results + self.temporaries


def measure_memory(problem: LayerProblem, arrays: dict[str, jax.Array]) -> Memory:
    """Compiles forward + backward and runs it once."""
    compiled = jax.jit(layer_function(problem, FORWARD_BACKWARD)).lower(arrays).compile()
    before = _peak_bytes_in_use()
    jax.block_until_ready(compiled(arrays))
    after = _peak_bytes_in_use()
    stats = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError("XLA must say what memory the program takes, got nothing.")
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        peak_in_use=after if after is not None and after > before else None,
    )


def _peak_bytes_in_use():
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
