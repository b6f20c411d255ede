"""Stacks of layers that are alike: their parameters have the layers as first axis, and scans run them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jgg.core.mixers import RotaryConfig
from jgg.models.attention import Place
from jgg.models.config import ModelConfig
from jgg.models.layer import Layer, saved_names
from jgg.models.modules import Options
from jgg.models.placement import gathered, gathers, split, split_batch
from jgg.models.rotary import Rotation, rotations
from jgg.models.sandwich import SandwichLayer
from jgg.models.stack_plan import StackPlan

_INPUT = "jgg_layer_input"  # the name of what a layer takes, for the policy that keeps it on the host

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
type State = nnx.State[Hashable, object]
type Sown = dict[str, jax.Array]  # what experts sowed, stacked
type Cache = Any  # as a mixer has it
type Caches = dict[str, Cache]  # by the stacks' names
type Carry = tuple[jax.Array, Caches, jax.Array]
type Inputs = tuple[dict[str, State], list[jax.Array | None], list[jax.Array | None]]


def rotations_of(config: ModelConfig, positions: jax.Array) -> Rotations:
    """The cosines and sines for positions [B, S] of each rotary embedding of the model; those of None have no pairs."""
    found = dict.fromkeys(rotary for plan in config.plan for rotary in plan.rotaries)
    return {rotary: rotations(rotary or RotaryConfig(()), positions) for rotary in found}


@dataclasses.dataclass(frozen=True, eq=False)
class Stack:
    """Stacked layers at one place of a period: each time the period runs, the next one of them runs.

    Attributes:
      plan: what is said of all layers of the stack.
      graphdef, state: of all these layers, from `nnx.split`.
      options: those of the decoder.
      first: the index in the stack of the layer that runs in the first round of the period.
      offset, stride: its place among the stack's layers in the period, and how many these are.
      repeats: how many times the period runs.
      rotations: of each rotary embedding of the model, from `rotations_of`.
      place: makes the `Place` of a layer of its `layer`, `window`, `is_local`, `rotation` and `topk_indices`.
      topk_indices: integer [repeats, B, S, k], the experts that the layers are given; None if the router chooses.
    """

    plan: StackPlan
    graphdef: nnx.GraphDef[Layer]
    state: State
    options: Options
    first: int
    offset: int
    stride: int
    repeats: int
    rotations: Rotations
    place: Callable[..., Place]
    topk_indices: jax.Array | None

    def __call__(
        self,
        x: jax.Array,
        cache: Cache,
        own: State,
        index: jax.Array,
        is_local: jax.Array | None,
        topk_indices: jax.Array | None,
    ) -> tuple[jax.Array, Cache, Sown]:
        """x and the cache after a layer, and what its experts sowed.

        Args:
          cache: of all layers of the stack; if it has a multiple of them, a layer takes the first of its parts.
          own: the parameters of the stack's layers in the period. If there are several, the layer takes its own here,
            so that the backward pass takes them again, rather than a copy that the forward pass would keep.
          index: int32 [], the layer's place in the stack.
          is_local, topk_indices: the layer's own.
        """
        if self.options.remat == "offload":
            x = checkpoint_name(x, _INPUT)
        if self.stride > 1:
            own = jax.tree.map(functools.partial(_taken, self.offset, index), own, self.state)
        return self.layer(own, x, cache, index, is_local, topk_indices)

    def layer(
        self,
        own: State,
        x: jax.Array,
        cache: Cache,
        index: jax.Array,
        is_local: jax.Array | None,
        topk_indices: jax.Array | None,
    ) -> tuple[jax.Array, Cache, Sown]:
        """As a call, with the layer's own parameters."""
        layer = nnx.merge(self.graphdef, gathered(own, self.options.sharding, self.options.dtype))
        parts = 1 if cache is None else max(1, len(jax.tree.leaves(cache)[0]) // self.plan.count)
        place = self._place(index * parts, is_local, topk_indices)
        (x, cache), sown = nnx.capture(layer, nnx.Intermediate)(x, place, cache)
        captured, name = nnx.to_pure_dict(sown), self.plan.name
        values = {key: value[0] for key, value in captured.get("moe", {}).items()}
        for key, value in captured.get(self.plan.mixer.kind, {}).items():
            values[f"{name}_{key}"] = value[0]  # stacks may differ in their number of heads
        return split_batch(x, self.options.sharding), cache, values

    @property
    def is_local(self) -> jax.Array | None:
        """Whether the layer has the window, each time that the period runs; None if it always or never has it."""
        return None if len(set(self._have_window)) == 1 else jnp.asarray(self._have_window)

    @property
    def _have_window(self) -> tuple[bool, ...]:
        end = self.first + self.repeats * self.stride
        return tuple(mixer.window is not None for mixer in self.plan.mixers[self.first : end : self.stride])

    def _place(self, index: jax.Array, is_local: jax.Array | None, topk_indices: jax.Array | None) -> Place:
        of_window, of_all = (self.rotations[rotary] for rotary in self.plan.rotaries)
        window, rotation = self.plan.window, of_window
        if is_local is not None and of_window is not of_all:
            rotation = jax.tree.map(functools.partial(jnp.where, is_local), of_window, of_all)
        elif not any(self._have_window):
            window, rotation = None, of_all
        return self.place(window=window, is_local=is_local, rotation=rotation, layer=index, topk_indices=topk_indices)

    @property
    def of_period(self) -> State:
        """The parameters of the stack's layers in the period, [repeats, stride, ...], without an axis of 1.

        They are the same at each of the stack's places in the period.
        """
        count, first = self.repeats * self.stride, self.first - self.offset

        def cut(array: jax.Array) -> jax.Array:
            own = array if count == len(array) else array[first : first + count]
            return own if self.stride == 1 else own.reshape(self.repeats, self.stride, *array.shape[1:])

        state: State = jax.tree.map(cut, self.state)
        return state


def periods_of(
    layers: Mapping[str, Layer],
    config: ModelConfig,
    options: Options,
    rotations: Rotations,
    place: Callable[..., Place],
    topk_indices: jax.Array | None,
) -> Iterator[list[Stack]]:
    """The stacks of each period, in the order their layers run.

    Args:
      layers: the stacked layers of each of `config.plan`, by its name.
      topk_indices: integer [L, B, S, k], the experts that each layer with experts is given, or None.
      config, options, rotations, place: as in `Stack`.
    """
    plans, firsts = {plan.name: plan for plan in config.plan}, dict.fromkeys(layers, 0)
    for period in config.schedule:
        counts, seen = collections.Counter(period.names), collections.Counter[str]()
        split_layers = {name: nnx.split(layers[name]) for name in counts}
        with_experts = sum(not plans[name].is_dense for name in period.names)
        given, count = topk_indices, 0
        if topk_indices is not None:
            end = period.repeats * with_experts
            given, topk_indices = topk_indices[:end], topk_indices[end:]
        stacks = []
        for name in period.names:
            plan, first = plans[name], firsts[name] + seen[name]
            own = None if given is None or plan.is_dense else given[count::with_experts]
            sizes = first, seen[name], counts[name], period.repeats
            stacks.append(Stack(plan, *split_layers[name], options, *sizes, rotations, place, own))
            seen[name] += 1
            count += not plan.is_dense
        yield stacks
        for name in counts:
            firsts[name] += counts[name] * period.repeats


def run(stacks: Sequence[Stack], x: jax.Array, caches: Caches | None) -> tuple[jax.Array, Caches | None, Sown]:
    """Runs a period of layers on x [B, S, H]; also returns all caches, and what the experts of its layers sowed.

    Args:
      caches: of each stack of the model, by its name.
    """
    options, repeats = stacks[0].options, stacks[0].repeats
    is_loop = options.unroll == 1 and (len(stacks) == 1 or repeats > 1)
    states = {stack.plan.name: stack.of_period for stack in stacks if not stack.offset}
    # XLA may compute all layers of a period again before it takes the gradients of one, and so needs memory for all
    waits = not is_loop or (len(stacks) > 1 and options.remat in ("all", "offload"))
    layers = [_rematerialized(stack, states[stack.plan.name], waits) for stack in stacks]

    def body(carry: Carry, inputs: Inputs) -> tuple[Carry, Sown]:
        (x, caches, number), (states, are_local, choices) = carry, inputs
        sown: dict[str, list[jax.Array]] = {}
        for stack, layer, is_local, topk_indices in zip(stacks, layers, are_local, choices, strict=True):
            name, index = stack.plan.name, stack.first + number * stack.stride
            x, cache, values = layer(x, caches.get(name), states[name], index, is_local, topk_indices)
            caches = {**caches, name: cache} if name in caches else caches
            for key, value in values.items():
                sown.setdefault(key, []).append(value)
        return (x, caches, number + 1), {name: jnp.stack(values) for name, values in sown.items()}

    own_caches = {} if caches is None else {name: caches[name] for name in states}
    unroll = max(1, min(options.unroll // len(stacks), repeats))
    inputs = states, [stack.is_local for stack in stacks], [stack.topk_indices for stack in stacks]
    (x, own_caches, _), sown = jax.lax.scan(body, (x, own_caches, jnp.int32(0)), inputs, repeats, unroll=unroll)
    of_layers = {name: values.reshape(math.prod(values.shape[:2]), *values.shape[2:]) for name, values in sown.items()}
    return x, None if caches is None else {**caches, **own_caches}, of_layers


def joined(sown: Sequence[Sown]) -> Sown:
    """What the experts of several periods sowed, together."""
    found: dict[str, list[jax.Array]] = {}
    for own in sown:
        for name, values in own.items():
            found.setdefault(name, []).append(values)
    return {name: each[0] if len(each) == 1 else jnp.concatenate(each) for name, each in found.items()}


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
def _taken_jvp(
    offset: int, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    _, whole, index = primals
    return jax.lax.dynamic_index_in_dim(whole, index, keepdims=False), tangents[0][offset]


def merge_stack(layers: Layer, options: Options) -> None:
    """Merges each LoRA adapter into its matrix."""
    nnx.update(layers, split(merged_stack(layers), options.sharding))


def merged_stack(layers: Layer) -> State:
    """The state of layers with their adapters merged, a layer at a time."""
    graphdef, state = nnx.split(layers)
    merged: State = jax.lax.map(functools.partial(_merged, graphdef), state)
    return merged


def _merged(graphdef: nnx.GraphDef[Layer], state: State) -> State:
    """The state of a layer with its adapters merged."""
    layer = nnx.merge(graphdef, state)
    layer.merge_adapters()
    return nnx.state(layer)


def _rematerialized(stack: Stack, own: State, waits: bool) -> Callable[..., tuple[jax.Array, Cache, Sown]]:
    """A layer whose backward pass computes again what `options.remat` does not keep.

    No policy can keep 8-bit floats: JAX passes what it keeps through `reduce_precision`, which turns those of 256 and
    more into infinity. So where the layer takes such parameters out of those of several layers, "none" keeps what
    "attention" does.

    Args:
      own: the parameters of the stack's layers in the period.
      waits: whether what the backward pass computes again waits for the gradient of the layer's result. Where forward
        and backward pass are not loops, it must, or XLA merges it with what the forward pass computed.
    """
    options, is_sliced = stack.options, stack.stride > 1
    if options.remat == "none" and is_sliced and _has_float8(own):
        options = dataclasses.replace(options, remat="attention")
    policy = jax.checkpoint_policies.save_only_these_names(*saved_names(options))
    if options.remat == "offload":
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=(),
            names_which_can_be_offloaded=(_INPUT,),
            offload_src="device",
            offload_dst="pinned_host",
        )
    if options.remat == "none":
        is_gathered = gathers(options.sharding)
        if not is_sliced and not is_gathered:
            return stack
        again = ("custom_jvp_call", "dynamic_slice", "squeeze") * is_sliced
        again += ("sharding_constraint", "pvary", "pcast") * is_gathered
        policy = functools.partial(_is_kept, again)
    return jax.checkpoint(stack.__call__, policy=policy, prevent_cse=waits)


def _has_float8(state: State) -> bool:
    """Whether arrays of a state are in 8-bit floats."""
    floats = (array.dtype for array in jax.tree.leaves(state) if jnp.issubdtype(array.dtype, jnp.floating))
    return any(dtype.itemsize == 1 for dtype in floats)


def _is_kept(again: Sequence[str], primitive: object, *_: object, **__: object) -> bool:
    """A policy of `jax.checkpoint` that keeps all but the results of some primitives."""
    return str(primitive) not in again
