"""A whole MoE layer with its router: what is timed, what it must compute, and the memory that it may take."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.memory import peak_bytes
from jgg.core.choices import OPS
from jgg.core.problem import GroupedGemmProblem
from jgg.core.program_memory import Memory, planned_memory
from jgg.experts.moe import moe_mlp
from jgg.experts.router.logits import router_logits
from jgg.experts.router.routing import Routing, route, sort_by_expert
from jgg.linear.fp8 import Fp8
from jgg.tuning.timing import WRONG, Measurement, Reference, jit_reference
from jgg.tuning.workloads import Layer

FORWARD, FORWARD_BACKWARD = "forward", "forward + backward"
PASSES = {FORWARD: ("forward",), FORWARD_BACKWARD: OPS}  # and which ops of the experts' products are in each
WEIGHTS = ("w_router", "w_gate_up", "w_down")
CHOICE_ERROR = 1e-5  # relative to the largest logit: float32 sums of products of 16-bit numbers, in another order
_SCHEDULE_TILES = 64  # rows of the smallest tile that a schedule of many rows has


@dataclasses.dataclass(frozen=True)
class LayerProblem:
    """A layer to measure: a softmax router without bias, which chooses and normalizes, and SwiGLU experts.

    Attributes:
      layer: the layer's sizes.
      dtype: dtype of x and of all weights.
      w_layout: layout of the experts' weights, as in `jgg.moe_mlp`.
      implementation, quantization: as in `jgg.moe_mlp`.
      param_dtype: with one, the layer is a `jgg.nnx.MoE` whose weights have this dtype and the layout "ekn"; with None
        it is `jgg.route` and `jgg.moe_mlp`.
    """

    layer: Layer
    dtype: str
    w_layout: str = "enk"
    implementation: str | None = None
    quantization: Fp8 | None = None
    param_dtype: str | None = None

    def in_flax(self, param_dtype: str = "float32") -> "LayerProblem":
        """The same layer as a `jgg.nnx.MoE` with parameters of this dtype."""
        return dataclasses.replace(self, param_dtype=param_dtype, w_layout="ekn")

    @property
    def num_rows(self) -> int:
        """M, the routed rows."""
        return self.layer.tokens * self.layer.topk

    def flops(self, which: str) -> int:
        """Floating-point operations of the experts' products in one of PASSES."""
        return len(PASSES[which]) * sum(gemm.flops for gemm in self.gemms)

    @property
    def gemms(self) -> list[GroupedGemmProblem]:
        """The experts' products, up and down."""
        return list(self.layer.gemms(dtype=self.dtype, w_layout=self.w_layout).values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of x, y's cotangent and the weights."""
        tokens, (up, down) = (self.layer.tokens, self.layer.hidden), self.gemms
        router = self.layer.hidden, self.layer.experts
        return {"x": tokens, "dy": tokens, "w_router": router, "w_gate_up": up.w_shape, "w_down": down.w_shape}

    def operands(self, seed: int = 0) -> dict[str, jax.Array]:
        """Random arrays of `shapes`, and group_sizes [1], which lets `timing.measure` tie one call to the next."""
        normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
        keys = jax.random.split(jax.random.key(seed), len(self.shapes))
        fan_in = {"x": 1, "dy": 1, "w_down": self.layer.expert_intermediate}
        arrays = {}
        for key, (name, shape) in zip(keys, self.shapes.items(), strict=True):
            dtype = self.dtype_of(name)
            arrays[name] = normal(key, shape, dtype) * jnp.asarray(fan_in.get(name, self.layer.hidden) ** -0.5, dtype)
        return arrays | {"group_sizes": jnp.zeros(1, jnp.int32)}

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
        return sum(math.prod(self.shapes[name]) * jnp.dtype(self.dtype_of(name)).itemsize for name in names)

    def dtype_of(self, name: str) -> str:
        """The dtype of one of the arrays of `shapes`."""
        return self.param_dtype if self.param_dtype and name in WEIGHTS else self.dtype


def logits_of(x: jax.Array, w_router: jax.Array) -> jax.Array:
    """The router's logits, float32 [T, E], computed without TF32, because its rounding would change choices."""
    return router_logits(x, w_router, precision="highest" if x.dtype == jnp.float32 else None)


@functools.cache  # so that programs of the same layer share what is compiled
def layer_function(problem: LayerProblem, which: str) -> Callable:
    """The function from operands to a dict of results, for one of PASSES.

    The results are y, the experts chosen unless the layer is Flax's, and with the backward pass the gradients of x and
    the weights by name.
    """
    if problem.param_dtype is not None:
        return functools.partial(_run_flax, problem, which)
    choose = functools.partial(route, topk=problem.layer.topk, implementation=problem.implementation)
    return functools.partial(_run, problem, which, choose, problem.implementation, None, problem.quantization)


def _run(problem, which, choose, implementation, precision, quantization, arrays):
    """The results of a layer whose routing is choose(logits)."""

    def forward(floats):
        routing = choose(logits_of(floats["x"], floats["w_router"]))
        y = moe_mlp(
            floats["x"],
            floats["w_gate_up"],
            floats["w_down"],
            routing,
            w_layout=problem.w_layout,
            precision=precision,
            quantization=quantization,
            implementation=implementation,
        )
        return y, {"topk_indices": routing.topk_indices}

    return run_passes(forward, which, arrays)


def _run_flax(problem, which, arrays):
    """The results of a layer as a `jgg.nnx.MoE`, which does not tell its choices."""
    from flax import nnx

    from jgg.nnx import MoE

    layer, options = problem.layer, {"quantization": problem.quantization, "implementation": problem.implementation}
    sizes = {"num_experts": layer.experts, "topk": layer.topk}

    def make():
        rngs = nnx.Rngs(0)
        return MoE(layer.hidden, layer.expert_intermediate, **sizes, dtype=problem.dtype, **options, rngs=rngs)

    abstract = nnx.eval_shape(make)

    def forward(floats):
        module = nnx.clone(abstract)
        nnx.update(module, {name: floats[name] for name in WEIGHTS})
        return module(floats["x"]), {}

    return run_passes(forward, which, arrays)


def run_passes(forward: Callable, which: str, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """y, the gradients if the backward pass is wanted, and what else `forward(floats)` returns."""
    floats = {name: arrays[name] for name in ("x", *WEIGHTS)}
    if which == FORWARD:
        y, others = forward(floats)
        return {"y": y, **others}
    y, vjp, others = jax.vjp(forward, floats, has_aux=True)
    y, dy = jax.lax.optimization_barrier((y, arrays["dy"]))  # as in training, the backward pass comes after y
    (gradients,) = vjp(dy)
    return {"y": y, **others} | {f"d {name}": d for name, d in gradients.items()}


@functools.partial(jax.jit, static_argnums=0)
def choices_of(problem: LayerProblem, arrays: dict[str, jax.Array]) -> jax.Array:
    """The experts that the router chooses, int32 [T, k]."""
    logits = logits_of(arrays["x"], arrays["w_router"])
    return route(logits, problem.layer.topk, implementation=problem.implementation).topk_indices


@dataclasses.dataclass(frozen=True)
class LayerReference:
    """The expected results of a layer, given the experts that it chose.

    Attributes:
      parts: references for y and, with the backward pass, for the gradients, by name. The xla implementation computes
        them in float32. The allowed error is three times the error that it has in the problem's dtype. (The two are
        the largest of a few sums of rounded numbers, and sometimes differ by a factor of 2.) With quantization, the
        allowed error is larger by a tenth of the largest element.
      logits: float32 logits, with which the choices are checked.
      topk_indices: the router's choices, for a layer that does not tell its own.
      choice_error: how far an expert left out may beat one chosen, at most, relative to the largest logit.
    """

    parts: dict[str, Reference]
    logits: jax.Array
    topk_indices: jax.Array
    choice_error: float = CHOICE_ERROR

    @classmethod
    def of(cls, problem: LayerProblem, which: str, arrays: dict, topk_indices: jax.Array):
        """Computes the reference for the experts that were chosen, topk_indices int32 [T, k].

        Where two logits are almost equal, a choice depends on their last bit, so `check` judges choices separately.
        """
        own = _expected(problem, which, None)(arrays, topk_indices)
        in_float32 = {name: array.astype(jnp.float32) for name, array in arrays.items() if name in problem.shapes}
        exact = _expected(problem, which, jax.lax.Precision.HIGHEST)(in_float32, topk_indices)
        parts = {name: Reference.beside(exact[name], own[name], 3) for name in exact}
        if problem.quantization is not None:
            parts = {name: dataclasses.replace(part, bound=part.bound + 0.1) for name, part in parts.items()}
        return cls(parts, logits_of(in_float32["x"], in_float32["w_router"]), topk_indices)

    def check(self, results: dict) -> Measurement:
        """Judges results; the measurement has the error of the worst one, compared with the error allowed for it."""
        choice_error = float(_choice_error(self.logits, results.get("topk_indices", self.topk_indices)))
        if not choice_error <= self.choice_error:
            reason = f"an expert left out beats one chosen by {choice_error:.3g} of the largest logit"
            return Measurement(WRONG, reason=reason)
        checked = {name: part.check(results[name]) for name, part in self.parts.items()}
        worst = min(checked, key=lambda name: _margin(checked[name]))
        return dataclasses.replace(checked[worst], variant=worst)


def _margin(checked):
    """How far an error is below its bound; -inf if the error is NaN or inf."""
    return checked.allowed_error - checked.error if checked.error < jnp.inf else -jnp.inf


@functools.cache
def _expected(problem, which, precision):
    """Returns the jitted function (arrays, topk_indices) -> results without the choices."""

    def run(arrays, topk_indices):
        def choose(logits):
            weights = jax.nn.softmax(jnp.take_along_axis(logits, topk_indices, axis=1))
            return Routing(weights, topk_indices, *sort_by_expert(topk_indices, problem.layer.experts, "xla"))

        results = _run(problem, which, choose, "xla", precision, None, arrays)
        del results["topk_indices"]
        return results

    return jit_reference(run)


@jax.jit
def _choice_error(logits, topk_indices):
    """How far an expert left out beats one chosen, at most, relative to the largest logit; inf for a wrong index.

    It is negative if every choice is right, and no larger than the rounding of the logits if only rounding changed one.
    """
    num_tokens, num_experts = logits.shape
    in_range = jnp.all((topk_indices >= 0) & (topk_indices < num_experts))
    tokens = jnp.arange(num_tokens)[:, None]
    chosen = jnp.zeros(logits.shape, jnp.int32).at[tokens, topk_indices].add(1, mode="drop")
    worst_chosen = jnp.min(jnp.where(chosen > 0, logits, jnp.inf), axis=1)
    best_left_out = jnp.max(jnp.where(chosen > 0, -jnp.inf, logits), axis=1)
    error = jnp.max(best_left_out - worst_chosen, initial=-jnp.inf) / jnp.max(jnp.abs(logits), initial=1e-30)
    return jnp.where(in_range & jnp.all(chosen <= 1), error, jnp.inf)


def measure_memory(problem: LayerProblem, arrays: dict[str, jax.Array]) -> Memory:
    """Compiles forward + backward and runs it once."""
    compiled = jax.jit(layer_function(problem, FORWARD_BACKWARD)).lower(arrays).compile()
    before = peak_bytes()
    jax.block_until_ready(compiled(arrays))
    after = peak_bytes()
    peak_in_use = after if before is not None and after is not None and after > before else None
    return dataclasses.replace(planned_memory(compiled), peak_in_use=peak_in_use)
