"""A period of layers whose backward pass changes each layer's parameters as soon as it has their gradients."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint

from jgg.core.arguments import check
from jgg.extend import barrier
from jgg.models.stacks import Sown, Stack, State

type Tree = Any  # a pytree of arrays
type Rule = Callable[[str, jax.Array, State, Tree, Tree], tuple[Tree, Tree]]


class Held:
    """A pytree of arrays that a backward pass, whose rule can return nothing but gradients, replaces.

    Source: "Ref: mutable arrays for data plumbing and memory control" in JAX's documentation.
    """

    def __init__(self, tree: Tree) -> None:
        leaves, self._structure = jax.tree.flatten(tree)
        self._refs = [jax.new_ref(leaf) for leaf in leaves]

    @property
    def value(self) -> Tree:
        """The current arrays."""
        return jax.tree.unflatten(self._structure, [ref[...] for ref in self._refs])

    @value.setter
    def value(self, tree: Tree) -> None:
        for ref, leaf in zip(self._refs, jax.tree.leaves(tree), strict=True):
            ref[...] = leaf


@dataclasses.dataclass(eq=False)
class Updates:
    """How the backward pass of a `Decoder`, whose attribute `updates` this is, changes the layers' parameters.

    Attributes:
      wrt: type of the trained variables.
      stacks: of each stack with such variables, by its name: (the variables, what the rule keeps of them), stacked.
      totals: what the rule adds up over all layers.
      rule: (name of the stack, int32 [] index of the layer in it, gradients, (variables, what is kept of them), totals)
        -> (the fourth and the fifth argument after the update).
      token: float32 [], 0. The model is differentiated in it, so that it has a backward pass if no features that layers
        take have a gradient.
      is_used: whether the model has run. Only one backward pass can change a parameter.
    """

    wrt: type[nnx.Variable[jax.Array]]
    stacks: Mapping[str, Held]
    totals: Held
    rule: Rule
    token: jax.Array
    is_used: bool = False

    def begin(self) -> None:
        """Notes that the model runs.

        Raises: ValueError: it has run before.
        """
        check(not self.is_used, "loss must call the model once where the backward pass updates it, got a second call.")
        self.is_used = True


def run_updating(stacks: Sequence[Stack], x: jax.Array, updates: Updates) -> tuple[jax.Array, Sown]:
    """`stacks.run` without caches, whose backward pass updates parameters and returns the gradient of x alone.

    The forward pass keeps what each layer takes, with `remat="offload"` on the host. The backward pass is a loop whose
    carry has all layers' parameters and what is kept of them, which XLA writes over in place, a layer at a time:
    there is one layer's gradient at once.
    """

    @jax.custom_vjp
    def compute(token: jax.Array, x: jax.Array) -> tuple[jax.Array, list[Sown]]:
        return forward(token, x)[0]

    def forward(token: jax.Array, x: jax.Array) -> tuple[tuple[jax.Array, list[Sown]], list[jax.Array]]:
        x, (sown, kept) = _run(stacks, x)
        return (x, sown), kept

    def backward(kept: list[jax.Array], gradients: tuple[jax.Array, list[Sown]]) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros_like(updates.token), _update(stacks, kept, *gradients, updates)

    compute.defvjp(forward, backward)
    x, of_places = compute(updates.token, x)
    sown: dict[str, list[jax.Array]] = {}
    for own in of_places:
        for name, values in own.items():
            sown.setdefault(name, []).append(values)
    joined = {name: jnp.stack(values, axis=1) for name, values in sown.items()}
    return x, {name: values.reshape(-1, *values.shape[2:]) for name, values in joined.items()}


def _run(stacks: Sequence[Stack], x: jax.Array) -> tuple[jax.Array, tuple[list[Sown], list[jax.Array]]]:
    """x after a period, and by place in the period what its layers sowed and what they took, stacked."""

    def body(carry: tuple[jax.Array, jax.Array], states: dict[str, State]) -> tuple[Tree, Tree]:
        (x, number), sown, kept = carry, [], []
        for stack in stacks:
            kept.append(jax.device_put(x, jax.memory.Space.Host) if stack.options.remat == "offload" else x)
            own = states[stack.plan.name] if stack.stride == 1 else _at(stack.state, _index(stack, number))
            x, values = _layer(stack, number, own, x)
            sown.append(values)
        return (x, number + 1), (sown, kept)

    states = {stack.plan.name: stack.of_period for stack in stacks if stack.stride == 1}
    (x, _), stacked = jax.lax.scan(body, (x, jnp.int32(0)), states, stacks[0].repeats)
    return x, stacked


def _index(stack: Stack, number: jax.Array) -> jax.Array:
    """The index in the stack of the layer that runs in this round of the period."""
    return stack.first + number * stack.stride


def _layer(stack: Stack, number: jax.Array, own: State, x: jax.Array) -> tuple[jax.Array, Sown]:
    """x after a layer with these parameters, and what it sowed."""
    of_round = _at((stack.is_local, stack.topk_indices), number)
    x, _, sown = stack.layer(own, x, None, _index(stack, number), *of_round)
    return x, sown


def _update(
    stacks: Sequence[Stack], kept: list[jax.Array], dx: jax.Array, d_sown: list[Sown], updates: Updates
) -> jax.Array:
    """The gradient of what a period takes, from those of its results; updates the layers' parameters."""
    names, repeats = {stack.plan.name for stack in stacks}, stacks[0].repeats
    held = {name: own for name, own in updates.stacks.items() if name in names}

    def body(done: jax.Array, carry: tuple[jax.Array, Tree, Tree]) -> tuple[jax.Array, Tree, Tree]:
        (dx, owns, totals), number = carry, repeats - 1 - done
        for stack, xs, d_values in reversed(list(zip(stacks, kept, d_sown, strict=True))):
            name, index = stack.plan.name, _index(stack, number)
            # what is computed again waits for the gradient, else XLA may compute it for all layers of a period
            x, dx = barrier((jax.device_put(_at(xs, number), jax.memory.Space.Device), dx))
            own = _at(owns[name], index) if name in owns else (nnx.State({}), None)
            gradients, dx = _gradients(stack, number, updates.wrt, own[0], x, (dx, _at(d_values, number)))
            if name in owns:
                own, totals = updates.rule(name, index, gradients, own, totals)
                owns = owns | {name: _replaced(owns[name], own, index)}
        return dx, owns, totals

    # XLA reads slices in place at places that it can tell from the number of the pass: the only one that is counted
    values = dx, {name: own.value for name, own in held.items()}, updates.totals.value
    carry = jax.lax.while_loop(lambda carry: carry[0] < repeats, lambda c: (c[0] + 1, body(*c)), (jnp.int32(0), values))
    dx, owns, updates.totals.value = carry[1]
    for name, own in held.items():
        own.value = owns[name]
    return dx


def _gradients(
    stack: Stack,
    number: jax.Array,
    wrt: type[nnx.Variable[jax.Array]],
    params: State,
    x: jax.Array,
    gradients: tuple[jax.Array, Sown],
) -> tuple[State, jax.Array]:
    """The gradients of a layer's trained variables and of what it takes, from those of its results."""
    frozen = _at(nnx.split_state(stack.state, wrt, ...)[1], _index(stack, number))
    _, differentiate = jax.vjp(lambda own, x: _layer(stack, number, nnx.merge_state(own, frozen), x), params, x)
    of_params, dx = differentiate(gradients)
    return of_params, dx


def _at(tree: Tree, index: jax.Array) -> Tree:
    """The part of each array at an index of its first axis; gradients of integers are NumPy arrays without values."""

    def taken(array: jax.Array) -> jax.Array | np.ndarray:
        if array.dtype == jax.dtypes.float0:
            return np.zeros(array.shape[1:], jax.dtypes.float0)
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(taken, tree)


def _replaced(tree: Tree, own: Tree, index: jax.Array) -> Tree:
    """A tree with one layer's arrays replaced."""

    def replaced(array: jax.Array, new: jax.Array) -> jax.Array:
        # where Muon transposes matrices, XLA would else keep all layers' transposed in the loop: a second copy
        new = with_layout_constraint(new, Layout(tuple(range(new.ndim))))
        return jax.lax.dynamic_update_index_in_dim(array, new, index, 0, allow_negative_indices=False)

    return jax.tree.map(replaced, tree, own)
