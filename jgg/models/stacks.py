"""Stacks of layers that are alike: their parameters have the layers as first axis, and they run in one scan."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.linear.weights import forms_of_forward
from jgg.models.attention import Place
from jgg.models.config import ModelConfig, StackPlan
from jgg.models.layer import Layer, saved_names
from jgg.models.parts import Options
from jgg.models.placement import gathered, remat_policy_of_gathered, split, split_batch
from jgg.nnx import Frozen


def new_stack(plan: StackPlan, config: ModelConfig, options: Options, rngs: nnx.Rngs) -> Layer:
    """Layers with random parameters, stacked in one."""
    keys = jax.random.split(rngs.params(), plan.count)
    create = nnx.vmap(lambda key: Layer(config, options, plan.mixer, plan.is_dense, nnx.Rngs(params=key)))
    if options.sharding is None:
        return create(keys)
    graphdef, _ = nnx.split(nnx.eval_shape(create, keys))
    return nnx.merge(graphdef, jax.jit(lambda keys: split(nnx.state(create(keys)), options.sharding))(keys))


def run_stack(
    layers: Layer,
    plan: StackPlan,
    options: Options,
    x: jax.Array,
    cache: Any,
    place: Callable[..., Place],
    topk_indices: jax.Array | None,
) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """Runs stacked layers on x [B, S, H]; also returns their cache, and what the experts sowed, stacked.

    Args:
      place: makes the `Place` of a layer of its `layer`, `window`, `is_local` and `topk_indices`.
      topk_indices: integer [layers, B, S, k], the experts that each layer is given, or None.
    """
    graphdef, state = nnx.split(layers)
    is_local = None if plan.has_window is None else jnp.asarray(plan.has_window)

    def body(carry: tuple[jax.Array, Any, jax.Array], inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        (own, is_local, given), number = inputs, carry[2]
        layer = nnx.merge(graphdef, gathered(own, options.sharding, options.dtype))
        own_place = place(layer=number, window=plan.window, is_local=is_local, topk_indices=given)
        (x, cache), sown = nnx.capture(layer, nnx.Intermediate)(carry[0], own_place, carry[1])
        values = {name: value[0] for name, value in nnx.to_pure_dict(sown).get("moe", {}).items()}
        return (split_batch(x, options.sharding), cache, number + 1), values

    xs = state, is_local, topk_indices
    unroll = min(options.unroll, plan.count)
    (x, cache, _), sown = jax.lax.scan(_rematerialized(body, options), (x, cache, jnp.int32(0)), xs, unroll=unroll)
    return x, cache, sown


def put_forms(layers: Layer, options: Options) -> None:
    """Puts what forward products read in the place of experts' weights that a recipe multiplies in FP8.

    That is a byte for each weight beside the parameters. Made for each token, it would cost a reading of all experts,
    whichever the token chose. A sharded model makes it for each token.
    """
    recipe = layers.moe.quantization if hasattr(layers, "moe") else None
    if recipe is None or options.sharding is not None:
        return
    how = How(options.implementation, current_target())
    for name in ("w_gate_up", "w_down"):
        weights = getattr(layers.moe, name).get_value()
        forms = functools.partial(forms_of_forward, name, recipe=recipe, dtype=options.dtype, how=how)
        setattr(layers.moe, name, Frozen(jax.lax.map(forms, weights)))


def by_stack(topk_indices: jax.Array, config: ModelConfig) -> dict[str, jax.Array]:
    """The choices [L, B, S, k] of all layers that have experts, cut into those of each stack, by its name."""
    plans = [plan for plan in config.plan if not plan.is_dense]
    ends = itertools.accumulate(plan.count for plan in plans)
    return {plan.name: topk_indices[end - plan.count : end] for plan, end in zip(plans, ends, strict=True)}


def merge_stack(layers: Layer, options: Options) -> None:
    """Merges each LoRA adapter into its matrix, a layer at a time."""
    graphdef, state = nnx.split(layers)
    merged = jax.lax.map(functools.partial(_merged, graphdef), state)
    nnx.update(layers, split(merged, options.sharding))


def _merged(graphdef: nnx.GraphDef[Layer], state: nnx.State[Any, Any]) -> nnx.State[Any, Any]:
    """The state of a layer with its adapters merged."""
    layer = nnx.merge(graphdef, state)
    layer.merge_adapters()
    return nnx.state(layer)


def _rematerialized(body: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """The body of a scan, of which the backward pass computes again what `options.remat` does not keep."""
    if options.remat == "none" and (options.sharding is None or options.sharding.gather_axis is None):
        return body
    names = saved_names(options)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    if options.remat == "none":
        policy = remat_policy_of_gathered
    # only a loop keeps XLA from merging what the backward pass computes again with what the forward pass computed
    return jax.checkpoint(body, policy=policy, prevent_cse=options.unroll > 1)
