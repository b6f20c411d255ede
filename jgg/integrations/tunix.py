"""The experts of tunix's Qwen3-MoE models, computed by jgg. Tested with google-tunix 0.1.7.

Call `install` before a model is trained. `add_lora` gives experts LoRA adapters, which tunix's own LoRA does not.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.interpreters import pxla

from jgg.core.arguments import check
from jgg.core.choices import OF_EXPERTS
from jgg.experts.moe import moe_mlp
from jgg.experts.router.routing import route
from jgg.experts.sharding import MoESharding, interleave, sharded_moe_mlp
from jgg.integrations.plugs import Framework, log_experts
from jgg.linear.lora import Lora, adapter_init, adapter_names, target_of
from jgg.linear.low_rank import LowRank

_TUNIX = Framework("tunix", "google-tunix", tested=("0.1.7",))
_MODEL = "tunix.models.qwen3.model"


def install() -> None:
    """Makes tunix compute the experts of Qwen3-MoE models with jgg. Call it once, before a model is traced.

    It also corrects the gradient of Qwen3's embeddings if devices cannot share sequences evenly: see `encode`.

    A log line at INFO says which kernels run for each size.

    Raises: ImportError: tunix cannot be imported, or this version of it lacks what jgg replaces.
    """
    _TUNIX.replace(_MODEL, "MoELayer.__call__", moe_layer)
    _TUNIX.replace(_MODEL, "Embedder.encode", encode)


def moe_layer(self: object, x: jax.Array, use_megablox: bool = True) -> jax.Array:
    """Computes `tunix.models.qwen3.model.MoELayer`, without copies of tokens for their experts.

    In a mesh, experts and their features are split as `ShardingConfig.exp_weight_edf` says, on CPUs too. Tokens that
    devices cannot share evenly are computed on each of them.

    Args:
      x: [batch, sequence, H], or other axes before H.
      use_megablox: has no effect.

    Returns: y in the shape and dtype of x.
    """
    sharding = _sharding(self)
    if sharding is None or math.prod(x.shape[:-1]) % sharding.size(*sharding.token_axes) == 0:
        return _experts(self, x, sharding)
    whole = functools.partial(jax.lax.with_sharding_constraint, shardings=sharding.named(jax.P()))
    return whole(_experts(self, whole(x), None))


@jax.named_scope("embedder_encode")
def encode(self: Any, x: jax.Array) -> jax.Array:
    """Computes `tunix.models.qwen3.model.Embedder.encode`, the embeddings of tokens, with a correct gradient.

    If devices cannot share sequences evenly, every device gets all embeddings before tunix splits them. Otherwise
    XLA would pad the embeddings, and add the padding's values to row 0 of the table's gradient, which is a scatter.

    Args:
      x: integer [batch, sequence].
    """
    embeddings, mesh = self.input_embedding[(x,)], pxla.thread_resources.env.physical_mesh
    axes = self.shd_config.act_btd
    if any(size % mesh.shape.get(axis, 1) for size, axis in zip(x.shape, axes, strict=False)):
        embeddings = jax.lax.with_sharding_constraint(embeddings, jax.NamedSharding(mesh, jax.P()))
    module, name = _TUNIX.find(_MODEL, "shard")
    return getattr(module, name)(embeddings.astype(self.dtype), axes)


def _experts(self: Any, x: jax.Array, sharding: MoESharding | None) -> jax.Array:
    """The experts' y of x, split over devices as the sharding says; None for plain jit."""
    rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
    routing = route(self.router(rows), self.experts_per_tok, normalize=True)
    w_gate_up = jnp.concatenate([self.gate_proj[...], self.up_proj[...]], axis=-1)
    terms = adapters_of(self)
    log_experts("tunix", rows, w_gate_up, self.dtype, self.experts_per_tok, sharding)
    if sharding is None:
        y = moe_mlp(rows, w_gate_up, self.down_proj[...], routing, w_layout="ekn", **_options_of(terms))
        return y.reshape(x.shape).astype(x.dtype)
    if sharding.tensor is not None:  # so that a gate is on the same device as its up
        w_gate_up = interleave(w_gate_up)
        if term := terms.get("w_gate_up"):
            terms["w_gate_up"] = LowRank(term.a, interleave(term.b), term.scale)
    y, _ = sharded_moe_mlp(
        rows,
        w_gate_up,
        self.down_proj[...],
        routing.topk_weights,
        routing.topk_indices,
        sharding=sharding,
        interleaved=sharding.tensor is not None,
        w_layout="ekn",
        **_options_of(terms),
    )
    return y.reshape(x.shape).astype(x.dtype)


def add_lora(
    model: nnx.Module, rank: int, alpha: float | None = None, *, targets: Sequence[str] = OF_EXPERTS, rngs: nnx.Rngs
) -> None:
    """Adds LoRA adapters to the experts of a tunix model that computes them with jgg, see `install`.

    They are `nnx.LoRAParam`s, so tunix trains and checkpoints them, along with adapters in other modules. Make
    those first, with `qwix.apply_lora_to_model`. Call this function inside the mesh of the model.

    Args:
      model: such as `tunix.models.qwen3.model.Qwen3`.
      rank: of each expert's adapters.
      alpha: the adapters are scaled by alpha / rank; None for rank.
      targets: one or both of "w_gate_up" and "w_down". Gate and up, side by side, have one adapter.
      rngs: its stream `params` makes the adapters' a; b is zero.

    Raises: ValueError: the model has no experts, or a number or target is wrong.
    """
    lora = Lora(rank, alpha, targets).checked()  # type: ignore[arg-type]
    owner, _ = _TUNIX.find(_MODEL, "MoELayer.__call__")
    layers: list[Any] = [module for _, module in nnx.iter_modules(model) if isinstance(module, owner)]
    check(len(layers) > 0, "model must have layers of tunix.models.qwen3.model.MoELayer, got none.")
    for layer in layers:
        sharding = _sharding(layer)
        experts, features, hidden = layer.gate_proj.shape
        shapes = lora.shapes({"w_gate_up": (experts, features, 2 * hidden), "w_down": (experts, hidden, features)})
        weights = {"w_gate_up": layer.gate_proj, "w_down": layer.down_proj}
        for name, shape in shapes.items():
            init = adapter_init(name, weights[target_of(name)])
            init = init if sharding is None else sharding.split_init(init, name)
            setattr(layer, name, nnx.LoRAParam(init(rngs.params(), shape, layer.gate_proj.dtype)))
        layer.jgg_lora = lora


def adapters_of(layer: object) -> dict[str, LowRank]:
    """The LoRA adapters of a layer's experts, keyed by the matrices they adapt, as `jgg.hf.Adapter` takes them."""
    lora = getattr(layer, "jgg_lora", None)
    if lora is None:
        return {}
    return lora.terms({name: getattr(layer, name)[...] for target in lora.targets for name in adapter_names(target)})


def _options_of(terms: Mapping[str, LowRank]) -> dict[str, Any]:
    """The options of `jgg.moe_mlp` for terms, which are keyed by the matrices they adapt."""
    return {name.replace("w_", "low_rank_", 1): term for name, term in terms.items()}


def _sharding(layer: Any) -> MoESharding | None:
    """How the mesh that tunix trains in splits a layer's experts and their features; None if it splits neither."""
    mesh = pxla.thread_resources.env.physical_mesh  # which tunix asks too
    expert, _, tensor = (name if mesh.shape.get(name, 1) > 1 else None for name in layer.shd_config.exp_weight_edf)
    return MoESharding(mesh, expert=expert, tensor=tensor) if expert or tensor else None
