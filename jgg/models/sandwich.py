"""`SandwichLayer`: a layer with norms around each of its parts and a dense MLP alongside the experts, as in Gemma 4."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jgg.core.mixers import MixerConfig
from jgg.extend import barrier
from jgg.models.attention import Place
from jgg.models.config import ModelConfig
from jgg.models.layer import EXPERTS, Layer, Mixer
from jgg.models.modules import Mlp, Options
from jgg.models.norms import add_and_norm, norm, norm_beside, residual, sum_and_norm
from jgg.models.shard_map import map_method
from jgg.nnx import Frozen


class _Branches(NamedTuple):
    """What a layer has before its experts run, each [B, S, H].

    Attributes:
      total: x with what the mixer adds.
      of_mlp: the normalized result of the dense MLP.
      of_experts: the norm of total that the experts take.
      of_router: the norm of total that the router takes.
    """

    total: jax.Array
    of_mlp: jax.Array
    of_experts: jax.Array
    of_router: jax.Array


class SandwichLayer(Layer):
    """A mixer, then experts and a dense MLP in parallel; each one's output is normalized too before it is added.

    With N for an RMS norm, each of its own weight,

        x = x + N(mixer(N(x)))
        x = (x + N(N(mlp(N(x))) + N(experts(N(x), routed by N(x))))) * scale

    The router's norm has its own weight too, `router_norm`, divided by the square root of the features. `scale` [1] is
    not a parameter: it is stored, but not trained.
    """

    norms: ClassVar[tuple[str, ...]] = (
        "attention_norm",
        "mixed_norm",
        "mlp_norm",
        "mlp_result_norm",
        "router_norm",
        "moe_norm",
        "moe_result_norm",
        "result_norm",
    )

    mixed_norm: nnx.Param[jax.Array]
    mlp_result_norm: nnx.Param[jax.Array]
    router_norm: nnx.Param[jax.Array]
    moe_norm: nnx.Param[jax.Array]
    moe_result_norm: nnx.Param[jax.Array]
    result_norm: nnx.Param[jax.Array]

    def __init__(
        self, config: ModelConfig, options: Options, mixer: MixerConfig, is_dense: bool, rngs: nnx.Rngs
    ) -> None:
        super().__init__(config, options, mixer, is_dense, rngs)
        self.mlp = Mlp(config, options, rngs)
        self.scale = Frozen(jnp.ones(1, options.param_dtype))

    def __call__[Cache](self, x: jax.Array, place: Place, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """Maps x [B, S, H] to the same shape; returns the mixer's cache with what the layer adds to it, or None."""
        generates, mapped = cache is not None, self.options.mapped
        branches, cache = map_method(SandwichLayer._branches, mapped, besides="moe")(self, x, place, cache)
        y = self._experts(branches.of_experts, branches.of_router, place, generates)
        y = checkpoint_name(y, EXPERTS)
        return map_method(SandwichLayer._joined, mapped, besides="moe")(self, branches, y, None)[0], cache

    def _branches[Cache](self, x: jax.Array, place: Place, cache: Cache | None) -> tuple[_Branches, Cache | None]:
        """All before the experts, and the mixer's cache."""
        mixer: Mixer[MixerConfig, Cache] = getattr(self, self.mixer)
        norms = self.config.norm_epsilon, self.options.dense_implementation
        x, normalized = norm_beside(x, self.attention_norm[...], *norms)
        mixed, cache = mixer(normalized, place, cache)
        add = sum_and_norm if self.options.remat == "attention" else add_and_norm
        mixed = norm(mixed, self.mixed_norm[...], *norms)
        x, normalized = add(x, mixed, self.config.residual_scale, self.mlp_norm[...], *norms)
        of_mlp = norm(self.mlp(normalized, place.adapters), self.mlp_result_norm[...], *norms)
        of_router = self.router_norm[...].astype(jnp.float32) * self.config.features**-0.5
        return _Branches(x, of_mlp, norm(x, self.moe_norm[...], *norms), norm(x, of_router, *norms)), cache

    def _joined(self, branches: _Branches, y: jax.Array, cache: None) -> tuple[jax.Array, None]:
        """The layer's result, by what the experts give."""
        norms = self.config.norm_epsilon, self.options.dense_implementation
        y = norm(y, self.moe_result_norm[...], *norms)
        y = norm(branches.of_mlp + y, self.result_norm[...], *norms)
        total = residual(branches.total, y, self.config.residual_scale)
        if self.options.batch_invariant:
            total = barrier(total)  # else XLA may multiply without rounding the sum
        return total * self.scale[...].astype(total.dtype).reshape(1, 1, 1), cache
