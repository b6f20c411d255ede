"""`qk_clip`: scales down queries and keys where attention logits are too large, as MuonClip does."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, check, check_instance
from jgg.core.mixers import AttentionConfig, LatentConfig
from jgg.linear.lora import adapter_names
from jgg.models import Decoder


def qk_clip(model: Decoder, max_logits: Mapping[str, ArrayLike], threshold: float = 100.0) -> None:
    """Scales the parameters of queries and keys, so that no head's largest logit exceeds the threshold.

    If a head's largest logit S exceeds the threshold, all its logits are multiplied by `threshold / S`; other heads do
    not change. The keys and the queries are each multiplied by the square root of this factor. Keys that several heads
    share are multiplied by the smallest of these heads' roots, and each head's queries by the rest of its factor. A
    head whose largest logit is NaN or infinite does not count as above the threshold.

    LoRA adapters of queries and keys are scaled together with their matrices, even if the matrices are frozen. In that
    case, save the model and not only the adapters.

    In latent attention all heads share the rotated keys. These do not change, and the rotated queries are multiplied by
    the whole factor. If a model normalizes queries and keys, the scales of the norms are multiplied; if all heads of a
    layer share these scales, they are multiplied by the layer's smallest root. Norms without scales bound the logits,
    and nothing changes. In a model that clips the values of queries and keys, the largest logit ends up only close to
    the threshold.

    The bound holds for the measured logits. Since each layer's output changes, later layers' logits may exceed the
    threshold when measured again after the call (they were 0.82 to 1.24 times the threshold where all layers were
    clipped).

    Call it after a step of the optimizer, with the logits of that step's batch or of a part of it. In a compiled
    program, the model must be an argument of an `nnx.jit` function.

    Examples:
      >>> optimizer.update(model, gradients)  # doctest: +SKIP
      >>> jgg.optim.qk_clip(model, model.max_logits(tokens))  # doctest: +SKIP

    Args:
      model: the model, which is changed.
      max_logits: float [layers, heads] for each stack's name, from `model.max_logits`.
      threshold: upper bound on each head's largest logit.

    Raises:
      ValueError: a stack is missing or unexpected, a shape is wrong, or the threshold is not positive.
      TypeError: the model is not a Decoder.

    Source: Kimi Team, Kimi K2, 2025, 2.1. https://arxiv.org/abs/2507.20534
    """
    check_instance("model", model, Decoder, "a jgg.models.Decoder")
    check(threshold > 0, f"threshold must be greater than 0, got {threshold}.")
    counts = {plan.name: plan.count for plan in model.config.plan}
    mixers = {
        plan.name: plan.mixer for plan in model.config.plan if isinstance(plan.mixer, AttentionConfig | LatentConfig)
    }
    check(set(max_logits) == set(mixers), f"max_logits must have {sorted(mixers)}, got {sorted(max_logits)}.")
    factors = {}
    for name, own in mixers.items():
        largest = as_array(f"max_logits[{name!r}]", max_logits[name])
        shape = counts[name], own.num_heads
        check(largest.shape == shape, f"max_logits[{name!r}] must be {list(shape)}, got {list(largest.shape)}.")
        largest = largest.astype(jnp.float32)
        factors[name] = jnp.where(jnp.isfinite(largest), threshold / jnp.maximum(largest, threshold), 1.0)
    for name, own in mixers.items():
        mixer = getattr(getattr(model, name), own.kind)
        if isinstance(own, LatentConfig):
            _clip_latent(mixer, own, factors[name])
        elif own.qk_norm is None:
            _clip_matrices(mixer, own, factors[name])
        elif own.qk_norm != "unit":
            _clip_norms(mixer, own, factors[name], model.config.norm_offset)


def _clip_latent(mixer: nnx.Module, own: LatentConfig, factors: jax.Array) -> None:
    """Scales by factors [layers, heads]."""
    roots = jnp.sqrt(factors)
    of_queries = _each(((roots, own.plain_features), (factors, own.rotated_features)))
    of_keys = _each(((roots, own.plain_features), (jnp.ones_like(roots), own.value_features)))
    _scale(mixer, "w_q" if own.q_rank is None else "w_q_b", of_queries)
    _scale(mixer, "w_kv_b", of_keys)


def _clip_matrices(mixer: nnx.Module, own: AttentionConfig, factors: jax.Array) -> None:
    of_queries, of_keys = _of_heads(own, factors)
    gate = ((jnp.ones_like(of_queries), own.head_features),) if own.use_gate else ()
    queries, keys = _each(((of_queries, own.head_features), *gate)), _each(((of_keys, own.head_features),))
    for name, of_name in (("q", queries), ("k", keys)):
        _scale(mixer, f"w_{name}", of_name)
        if own.use_qkv_bias:
            _scale(mixer, f"b_{name}", of_name)


def _clip_norms(mixer: nnx.Module, own: AttentionConfig, factors: jax.Array, offset: float) -> None:
    if own.qk_norm == "head":
        root = jnp.sqrt(jnp.min(factors, axis=1, keepdims=True))
        of_queries = of_keys = root
    else:
        queries, keys = _of_heads(own, factors)
        of_queries, of_keys = (_each(((each, own.head_features),)) for each in (queries, keys))
    _scale(mixer, "q_norm", of_queries, offset)
    _scale(mixer, "k_norm", of_keys, offset)


def _of_heads(own: AttentionConfig, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factors of queries [layers, heads] and of keys [layers, kv heads]."""
    if own.are_keys_values:  # keys stay, as values are the same product
        return factors, jnp.ones((len(factors), own.num_kv_heads), factors.dtype)
    groups = factors.reshape(len(factors), own.num_kv_heads, -1)
    of_keys = jnp.sqrt(jnp.min(groups, axis=2))
    return (groups / of_keys[:, :, None]).reshape(factors.shape), of_keys


def _each(parts: tuple[tuple[jax.Array, int], ...]) -> jax.Array:
    """Factors [layers, features], from the parts of each head: factors [layers, heads] and a number of features."""
    repeated = [jnp.repeat(factors[:, :, None], count, axis=2) for factors, count in parts]
    return jnp.concatenate(repeated, axis=2).reshape(len(parts[0][0]), -1)


def _scale(mixer: nnx.Module, name: str, factors: jax.Array, offset: float = 0.0) -> None:
    """Multiplies a parameter [layers, ..., features] by a factor per feature, and so the b of its adapter, if any.

    Where the model uses the parameter plus `offset`, the factor applies to that sum.
    """
    names = [name, *(own for own in adapter_names(name)[1:] if hasattr(mixer, own))]
    for variable in (getattr(mixer, own) for own in names):
        value = variable.get_value()
        wide = value.astype(jnp.float32)
        by = factors.reshape(len(factors), *[1] * (value.ndim - 2), factors.shape[1])
        variable.set_value(((wide + offset) * by - offset).astype(value.dtype))
