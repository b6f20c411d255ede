"""Stacks of layers that are alike: their parameters have the layers as first axis, and scans run them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jgg.core.gpu_target import current_target
from jgg.core.mixers import RotaryConfig
from jgg.extend import How
from jgg.models.attention import Place
from jgg.models.config import ModelConfig
from jgg.models.forms import kept_forms
from jgg.models.layer import Layer, saved_names
from jgg.models.parts import Options
from jgg.models.placement import gathered, gathers, split, split_batch
from jgg.models.plan import Period, StackPlan
from jgg.models.rotary import Rotation, rotations
from jgg.models.sandwich import SandwichLayer
from jgg.nnx import Frozen

LAYOUTS: dict[str, type[Layer]] = {"plain": Layer, "sandwich": SandwichLayer}


def new_stack(plan: StackPlan, config: ModelConfig, options: Options, rngs: nnx.Rngs) -> Layer:
    """A stack of layers with random parameters."""
    keys = jax.random.split(rngs.params(), plan.count)
    layer = LAYOUTS[config.layout]
    create = nnx.vmap(lambda key: layer(config, options, plan.mixer, plan.is_dense, nnx.Rngs(params=key)))
    if options.sharding is None:
        return create(keys)
    graphdef, _ = nnx.split(nnx.eval_shape(create, keys))
    return nnx.merge(graphdef, jax.jit(lambda keys: split(nnx.state(create(keys)), options.sharding))(keys))


type Rotations = Mapping[RotaryConfig | None, Rotation]


def rotations_of(config: ModelConfig, positions: jax.Array) -> Rotations:
    """The cosines and sines for positions [B, S] of each rotary embedding of the model; those of None have no pairs."""
    found = dict.fromkeys(rotary for plan in config.plan for rotary in plan.rotaries)
    return {rotary: rotations(rotary or RotaryConfig(()), positions) for rotary in found}


def run_layers(
    stacks: Mapping[str, Layer],
    config: ModelConfig,
    options: Options,
    x: jax.Array,
    caches: Mapping[str, Any] | None,
    rotations: Rotations,
    place: Callable[..., Place],
    topk_indices: jax.Array | None,
) -> tuple[jax.Array, dict[str, Any] | None, dict[str, jax.Array]]:
    """Runs all layers on x [B, S, H]; also returns their caches, and what the experts of all layers sowed, stacked.

    Args:
      stacks: the stacked layers of each of `config.plan`, by its name.
      caches: of each of them, by the same names.
      rotations: of each rotary embedding of the model, from `rotations_of`.
      place: makes the `Place` of a layer of its `layer`, `window`, `is_local`, `rotation` and `topk_indices`.
      topk_indices: integer [L, B, S, k], the experts that each layer with experts is given, or None.
    """
    plans, firsts = {plan.name: plan for plan in config.plan}, dict.fromkeys(stacks, 0)
    caches = None if caches is None else dict(caches)
    sown: dict[str, list[jax.Array]] = {}
    for period in config.schedule:
        steps = _steps_of(period, plans, firsts)
        given = None
        if topk_indices is not None:
            count = period.repeats * sum(not step.plan.is_dense for step in steps)
            given, topk_indices = topk_indices[:count], topk_indices[count:]
        make = [functools.partial(step.place, rotations, place) for step in steps]
        x, after, own = _run_period(steps, make, stacks, options, x, caches, given)
        if caches is not None:
            caches |= after
        for name, values in own.items():
            sown.setdefault(name, []).append(values)
    joined = {name: each[0] if len(each) == 1 else jnp.concatenate(each) for name, each in sown.items()}
    return x, caches, joined


class _Step(NamedTuple):
    """A layer of a period, which is another one of its stack each time that the period runs.

    Attributes:
      plan: the stack.
      first: the layer's place in the stack when the period runs for the first time.
      offset, stride: its place among the stack's layers in the period, and how many these are.
      repeats: how many times the period runs.
    """

    plan: StackPlan
    first: int
    offset: int
    stride: int
    repeats: int

    @property
    def have_window(self) -> tuple[bool, ...]:
        """Whether the layer has the window, each time that the period runs."""
        end = self.first + self.repeats * self.stride
        return tuple(mixer.window is not None for mixer in self.plan.mixers[self.first : end : self.stride])

    @property
    def is_local(self) -> jax.Array | None:
        """The same as an array; None if the layer always or never has the window."""
        return None if len(set(self.have_window)) == 1 else jnp.asarray(self.have_window)

    def place(
        self, rotations: Rotations, place: Callable[..., Place], is_local: jax.Array | None, **others: Any
    ) -> Place:
        """The layer's `Place`; is_local is the step's of this time, or None."""
        of_window, of_all = (rotations[rotary] for rotary in self.plan.rotaries)
        window, rotation = self.plan.window, of_window
        if is_local is not None and of_window is not of_all:
            rotation = jax.tree.map(functools.partial(jnp.where, is_local), of_window, of_all)
        elif not any(self.have_window):
            window, rotation = None, of_all
        return place(window=window, is_local=is_local, rotation=rotation, **others)


def _steps_of(period: Period, plans: Mapping[str, StackPlan], firsts: dict[str, int]) -> list[_Step]:
    """The steps of a period; `firsts`, how many of each stack's layers precede it, then count its own."""
    counts, seen, steps = collections.Counter(period.names), collections.Counter[str](), []
    for name in period.names:
        steps.append(_Step(plans[name], firsts[name] + seen[name], seen[name], counts[name], period.repeats))
        seen[name] += 1
    for name, count in counts.items():
        firsts[name] += count * period.repeats
    return steps


def _run_period(
    steps: Sequence[_Step],
    places: Sequence[Callable[..., Place]],
    stacks: Mapping[str, Layer],
    options: Options,
    x: jax.Array,
    caches: Mapping[str, Any] | None,
    given: jax.Array | None,
) -> tuple[jax.Array, dict[str, Any], dict[str, jax.Array]]:
    """What `run_layers` returns, of one period, with the caches of its stacks alone.

    Args:
      steps: the period's layers.
      places: makes the `Place` of each.
      given: integer [layers with experts in all repeats, B, S, k], or None.
    """
    split_stacks = {step.plan.name: nnx.split(stacks[step.plan.name]) for step in steps}
    states = {step.plan.name: _by_repeat(split_stacks[step.plan.name][1], step) for step in steps if not step.offset}
    layers = [
        _rematerialized(
            functools.partial(_run_layer, *split_stacks[step.plan.name], options, place, step),
            options,
            is_sliced=step.stride > 1,
            has_float8=_has_float8(states[step.plan.name]),
            is_loop=options.unroll == 1 and (len(steps) == 1 or step.repeats > 1),
        )
        for step, place in zip(steps, places, strict=True)
    ]
    are_local = [step.is_local for step in steps]
    repeats, choices = steps[0].repeats, _by_step(given, steps)

    def body(carry: tuple[jax.Array, dict[str, Any], jax.Array], inputs: Any) -> tuple[Any, dict[str, jax.Array]]:
        (x, caches, number), (states, are_local, choices) = carry, inputs
        sown: dict[str, list[jax.Array]] = {}
        for step, layer, is_local, given in zip(steps, layers, are_local, choices, strict=True):
            name, index = step.plan.name, step.first + number * step.stride
            x, cache, values = layer(x, caches.get(name), states[name], index, is_local, given)
            caches = {**caches, name: cache} if name in caches else caches
            for of_experts, value in values.items():
                sown.setdefault(of_experts, []).append(value)
        return (x, caches, number + 1), {name: jnp.stack(values) for name, values in sown.items()}

    own_caches = {} if caches is None else {name: caches[name] for name in states}
    unroll = max(1, min(options.unroll // len(steps), repeats))
    carry, inputs = (x, own_caches, jnp.int32(0)), (states, are_local, choices)
    (x, own_caches, _), sown = jax.lax.scan(body, carry, inputs, repeats, unroll=unroll)
    of_layers = {name: values.reshape(math.prod(values.shape[:2]), *values.shape[2:]) for name, values in sown.items()}
    return x, own_caches, of_layers


def _run_layer(
    graphdef: nnx.GraphDef[Layer],
    whole: Any,
    options: Options,
    place: Callable[..., Place],
    step: _Step,
    x: jax.Array,
    cache: Any,
    own: Any,
    index: jax.Array,
    is_local: jax.Array | None,
    given: jax.Array | None,
) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """x and the cache after a layer, and what its experts sowed.

    Args:
      whole: the parameters of all layers of the stack.
      own: those of the stack's layers in the period. If there are several, the layer takes its own here, so that the
        backward pass takes them again, rather than a copy that the forward pass would keep.
      index: int32 [], the layer's place in the stack.
    """
    if step.stride > 1:
        own = jax.tree.map(functools.partial(_taken, step.offset, index), own, whole)
    layer = nnx.merge(graphdef, gathered(own, options.sharding, options.dtype))
    own_place = place(is_local, layer=index, topk_indices=given)
    (x, cache), sown = nnx.capture(layer, nnx.Intermediate)(x, own_place, cache)
    captured = nnx.to_pure_dict(sown)
    values = {name: value[0] for name, value in captured.get("moe", {}).items()}
    for name, value in captured.get(step.plan.mixer.kind, {}).items():
        values[f"{step.plan.name}_{name}"] = value[0]  # stacks may differ in their number of heads
    return split_batch(x, options.sharding), cache, values


def _taken(offset: int, index: jax.Array, own: jax.Array, whole: jax.Array) -> jax.Array:
    """A layer's parameter, which is read as whole[index] and differentiated as own[offset]: both are the same.

    XLA reads the first in place, but would copy `own`, the parameters of all layers of a period, to take the second.
    """
    if not jnp.issubdtype(own.dtype, jnp.inexact):
        return jax.lax.dynamic_index_in_dim(whole, index, keepdims=False)
    return _taken_of_floats(offset, own, jax.lax.stop_gradient(whole), index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _taken_of_floats(offset: int, own: jax.Array, whole: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(whole, index, keepdims=False)


@_taken_of_floats.defjvp
def _taken_jvp(offset: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    _, whole, index = primals
    return jax.lax.dynamic_index_in_dim(whole, index, keepdims=False), tangents[0][offset]


def _by_step(given: jax.Array | None, steps: Sequence[_Step]) -> list[jax.Array | None]:
    """Each step's part [repeats, B, S, k] of the choices of all layers with experts; None for dense layers."""
    stride, seen = sum(not step.plan.is_dense for step in steps), 0
    found: list[jax.Array | None] = []
    for step in steps:
        found.append(None if given is None or step.plan.is_dense else given[seen::stride])
        seen += not step.plan.is_dense
    return found


def _by_repeat(state: Any, first: _Step) -> Any:
    """The stack's parameters of a period, [repeats, layers of the stack in the period, ...], without an axis of 1."""
    count, stride = first.repeats * first.stride, first.stride

    def cut(array: jax.Array) -> jax.Array:
        own = array if count == len(array) else array[first.first : first.first + count]
        return own if stride == 1 else own.reshape(first.repeats, stride, *array.shape[1:])

    return jax.tree.map(cut, state)


def put_forms(layers: Layer, options: Options) -> None:
    """Puts what forward products read in place of experts' weights that a recipe multiplies in FP8.

    That is a byte for each weight beside the parameters, kept as long as these: see `kept_forms`. Made for each token,
    it would cost a reading of all experts, whichever the token chose. A sharded model makes it for each token.
    """
    recipe = layers.moe.quantization if hasattr(layers, "moe") else None
    if recipe is None or options.sharding is not None:
        return
    how = How(options.implementation, current_target())
    for name in ("w_gate_up", "w_down"):
        weights = getattr(layers.moe, name).get_value()
        setattr(layers.moe, name, Frozen(kept_forms(name, weights, recipe, options.dtype, how)))


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


def _rematerialized(
    layer: Callable[..., Any], options: Options, *, is_sliced: bool, has_float8: bool, is_loop: bool
) -> Callable[..., Any]:
    """A layer of which the backward pass computes again what `options.remat` does not keep.

    Args:
      is_sliced: whether the layer takes its parameters out of those of several layers.
      has_float8: whether some of these are in 8-bit floats, which no policy can keep: JAX passes kept floats through
        `reduce_precision`, which turns those of 256 and more into infinity. So "none" then keeps what "attention" does.
      is_loop: whether forward and backward pass are loops: only these keep XLA from merging what the backward pass
        computes again with what the forward pass computed.
    """
    if options.remat == "none" and is_sliced and has_float8:
        options = dataclasses.replace(options, remat="attention")
    policy = jax.checkpoint_policies.save_only_these_names(*saved_names(options))
    if options.remat == "none":
        is_gathered = gathers(options.sharding)
        if not is_sliced and not is_gathered:
            return layer
        again = ("custom_jvp_call", "dynamic_slice", "squeeze") * is_sliced
        again += ("sharding_constraint", "pvary", "pcast") * is_gathered
        policy = functools.partial(_is_kept, again)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not is_loop)


def _has_float8(state: Any) -> bool:
    """Whether arrays of a state are in 8-bit floats."""
    floats = (array.dtype for array in jax.tree.leaves(state) if jnp.issubdtype(array.dtype, jnp.floating))
    return any(dtype.itemsize == 1 for dtype in floats)


def _is_kept(again: Sequence[str], primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps all but the results of some primitives."""
    return str(primitive) not in again
