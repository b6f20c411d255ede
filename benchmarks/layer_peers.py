"""Whole MoE layers of other libraries, where installed, for `benchmarks.layers` to compare with jgg's.

A peer in JAX is a layer as a user writes it around a grouped product, with JAX's gradients. A peer in torch is the
library's own layer, called eagerly. A peer may choose experts by rounded logits, so it is checked against a reference
for the experts that it chose.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.layer import (
    FORWARD,
    WEIGHTS,
    LayerProblem,
    LayerReference,
    logits_of,
    run_passes,
)
from benchmarks.layer_roofline import parts_of
from benchmarks.peers import FLOATS, Peer, measure_best, to_jax, to_torch, tokamax_functions, torch_seconds, why_not
from jgg.tuning import timing
from jgg.tuning.timing import Measurement, Timing
from jgg.tuning.ways import JaxProduct, Way

_ROUNDED_LOGITS = 2.0**-7  # of the largest logit: two of them, each rounded to bfloat16
_ROUNDED_ROUTER = 0.02  # of the largest element of a result: what a router in 16 bits may add to its error


@dataclasses.dataclass(frozen=True)
class LayerPeer(Peer):
    """A peer that computes whole layers.

    Attributes:
      rounds_router: its router's logits and weights have 16 bits, so that it may choose other experts of almost equal
        logits, and its results may differ more.
    """

    rounds_router: bool = False


@dataclasses.dataclass
class _OfChoices:
    """A reference for whatever experts a result says that it chose."""

    problem: LayerProblem
    which: str
    arrays: dict[str, jax.Array]
    rounds_router: bool

    def check(self, results: dict[str, jax.Array]) -> Measurement:
        """Judges results, which have topk_indices."""
        reference = LayerReference.of(self.problem, self.which, self.arrays, results["topk_indices"])
        if self.rounds_router:
            parts = {
                name: dataclasses.replace(part, bound=part.bound + _ROUNDED_ROUTER)
                for name, part in reference.parts.items()
            }
            reference = dataclasses.replace(reference, parts=parts, choice_error=_ROUNDED_LOGITS)
        return reference.check(results)


def measure_peer(peer: LayerPeer, problem: LayerProblem, which: str, arrays: dict[str, jax.Array]) -> Measurement:
    """Checks and times a peer's layer in one of PASSES."""
    reference = _OfChoices(problem, which, arrays, peer.rounds_router)
    return measure_best(lambda: peer.prepare(which, problem, arrays), reference)


def _around(functions, which, problem, arrays):
    """Prepares a layer around each grouped product of `functions()`."""
    return [_layer_around(name, function, which, problem, arrays) for name, function in functions().items()]


def _layer_around(variant, function, which, problem, arrays):
    layer = problem.layer

    def forward(floats):
        top_logits, experts = jax.lax.top_k(logits_of(floats["x"], floats["w_router"]), layer.topk)
        topk_weights = jax.nn.softmax(top_logits)
        order = jnp.argsort(experts.ravel(), stable=True)
        group_sizes = jnp.bincount(experts.ravel(), length=layer.experts).astype(jnp.int32)
        rows = jnp.take(floats["x"], order // layer.topk, axis=0)
        gate, up = jnp.split(function(rows, floats["w_gate_up"], group_sizes).astype(jnp.float32), 2, axis=1)
        hidden = (jax.nn.silu(gate) * up).astype(rows.dtype)
        rows = function(hidden, floats["w_down"], group_sizes)
        choices = jnp.take(rows, jnp.argsort(order), axis=0).reshape(layer.tokens, layer.topk, layer.hidden)
        y = jnp.sum(choices.astype(jnp.float32) * topk_weights[:, :, None], axis=1)
        return y.astype(rows.dtype), {"topk_indices": experts}

    swapped = _swapped(problem, "ekn", {name: arrays[name] for name in WEIGHTS})
    finish = functools.partial(_swapped, problem, "ekn")
    run = functools.partial(run_passes, forward, which)
    num_bytes = sum(part.num_bytes for part in parts_of(problem, which))
    return JaxProduct(run, arrays | swapped, problem.flops(which), num_bytes, finish, variant=variant)


def _swapped(problem, w_layout, arrays):
    """Turns the experts' weights, or their gradients, between the problem's layout and this one, if they differ."""
    if problem.w_layout == w_layout:
        return arrays
    return {
        name: jnp.swapaxes(array, 1, 2) if name.endswith(("w_gate_up", "w_down")) else array
        for name, array in arrays.items()
    }


@dataclasses.dataclass(frozen=True)
class TorchLayer(Way):
    """A layer computed by torch, with gradients by its autograd, on the GPU that JAX uses.

    Attributes:
      forward: function of x, w_router [E, H] and the experts' weights as in the layout "enk" -> y.
      choose: function of the same -> the experts that it chose, [T, k].
      problem, which: the layer, and one of PASSES.
      tensors: x, dy and the weights by name.
    """

    forward: Callable[..., Any]
    choose: Callable[..., Any]
    problem: LayerProblem
    which: str
    tensors: dict[str, Any]

    def compute(self) -> dict[str, jax.Array]:
        """The results by name."""
        y, *gradients = self._call()
        results = {"y": y} | dict(zip(("d x", *(f"d {name}" for name in WEIGHTS)), gradients, strict=False))
        if "d w_router" in results:
            results["d w_router"] = results["d w_router"].t()
        arrays = {name: to_jax(tensor.detach()) for name, tensor in results.items()}
        arrays["topk_indices"] = to_jax(self.choose(*self._floats())).astype(jnp.int32)
        return _swapped(self.problem, "enk", arrays)

    def measure(self) -> Timing:
        """Times the layer."""
        num_bytes = sum(part.num_bytes for part in parts_of(self.problem, self.which))
        seconds = torch_seconds(self._call, flushes=timing.stays_in_l2(num_bytes))
        return Timing(seconds, self.compute())

    def _floats(self):
        return [self.tensors[name].detach() for name in ("x", *WEIGHTS)]

    def _call(self):
        """y and, with the backward pass, the gradients of x and of WEIGHTS."""
        torch = importlib.import_module("torch")
        if self.which == FORWARD:
            with torch.no_grad():
                return (self.forward(*self._floats()),)
        floats = [tensor.requires_grad_() for tensor in self._floats()]
        y = self.forward(*floats)
        return y, *torch.autograd.grad(y, floats, self.tensors["dy"])


def _torch_layer(make, which, problem, arrays):
    """Prepares what make(problem, which) gives, the functions forward and choose of TorchLayer."""
    arrays = _swapped(problem, "enk", {name: arrays[name] for name in ("x", "dy", *WEIGHTS)})
    tensors = {name: to_torch(array).contiguous() for name, array in arrays.items()}
    tensors["w_router"] = tensors["w_router"].t().contiguous()
    forward, choose = make(problem, which)
    return [TorchLayer(forward, choose, problem, which, tensors)]


def _liger(problem, which):
    """Liger-Kernel's experts (Triton) after a router as transformers has it."""
    torch = importlib.import_module("torch")
    experts_of = importlib.import_module("liger_kernel.ops").LigerFusedMoEFunction.apply

    def route(x, w_router):
        top_logits, experts = torch.nn.functional.linear(x, w_router).float().topk(problem.layer.topk)
        return torch.softmax(top_logits, -1).to(x.dtype), experts.to(torch.int32)

    def forward(x, w_router, w_gate_up, w_down):
        topk_weights, experts = route(x, w_router)
        return experts_of(x, w_gate_up, w_down, experts, topk_weights)

    return forward, lambda x, w_router, *_: route(x, w_router)[1]


def _sonicmoe(problem, which):
    """SonicMoE's layer (CuTe DSL), router included."""
    torch = importlib.import_module("torch")
    functional = importlib.import_module("sonicmoe.functional")
    topk = problem.layer.topk

    def layer(x, w_router, w_gate_up, w_down):
        return functional.moe_TC_softmax_topk_layer(
            x,
            w_router,
            w_gate_up.permute(1, 2, 0),
            None,
            w_down.permute(1, 2, 0),
            None,
            topk,
            torch.cuda.current_stream().cuda_stream,
            is_inference_mode_enabled=which == FORWARD,
            concat_layout=True,
        )

    def choose(*floats):
        _, logits, _ = layer(*floats)
        return functional.TC_Softmax_Topk_Router_Function.apply(logits, problem.layer.experts, topk, True, False)[1]

    return lambda *floats: layer(*floats)[0], choose


def _torch_peer(make: Callable[..., Any], *modules: str) -> LayerPeer:
    prepare: Callable[..., Iterable[Way]] = functools.partial(_torch_layer, make)
    return LayerPeer(prepare, ("bfloat16",), lambda: why_not("torch", *modules), rounds_router=True)


LAYER_PEERS = {
    "ragged_dot": LayerPeer(functools.partial(_around, lambda: {"": jax.lax.ragged_dot}), FLOATS),
    "tokamax": LayerPeer(functools.partial(_around, tokamax_functions), FLOATS, lambda: why_not("tokamax")),
    "sonicmoe": _torch_peer(_sonicmoe, "sonicmoe.functional"),
    "liger": _torch_peer(_liger, "liger_kernel.ops"),
}
