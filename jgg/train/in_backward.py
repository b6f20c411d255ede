"""An optimizer's step inside the backward pass: there are never all gradients, nor a second copy of the weights."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jgg.core.arguments import as_finite, as_flag, check, check_instance
from jgg.core.rounding import mixed, rounded_stochastically
from jgg.extend import barrier
from jgg.models import Decoder
from jgg.models.updating import Held, Updates
from jgg.train.masters import in_float32
from jgg.train.state import State

type Tree = Any  # a pytree of arrays
type Arguments = tuple[State, jax.Array]


class InBackwardState(NamedTuple):
    """The state of `OptimizerInBackward`.

    Attributes:
      step: int32 [], number of updates so far.
      norm: float32 [], the norm of all gradients of the last step, 0 before the first one; None without `max_norm`.
      stacks: the optimizer's state for each stack of layers, by its name, each array with the layers as first axis.
      others: the optimizer's state for the parameters outside the layers.
    """

    step: jax.Array
    norm: jax.Array | None
    stacks: dict[str, optax.OptState]
    others: optax.OptState


@dataclasses.dataclass(frozen=True)
class OptimizerInBackward:
    """Has a `Trainer` of a `jgg.models.Decoder` update each layer as soon as the backward pass has its gradients.

    A step then needs memory for the weights, the optimizer's state, what each layer takes, and the gradients of one
    layer. Without it, the gradients of all layers exist at once. Each layer's weights and state are written over where
    they are. PyTorch has this as "optimizer step in backward", torchtune as `optimizer_in_bwd`.

        optimizer = jgg.train.OptimizerInBackward(optax.adamw(1e-5), max_norm=1.0)
        trainer = jgg.train.Trainer(model, optimizer, loss)

    The optimizer gets gradients and its state in float32, and its updates are added in float32. Each layer has a state
    of its own, counts included. With an optimizer that changes each element or each matrix by itself, such as AdamW or
    Muon, training is the same as without this. What relates layers to each other, such as
    `optax.clip_by_global_norm`, sees one layer at a time.

    The loss must call the model once, outside of `jax.checkpoint`. What else it computes from the layers' parameters,
    such as a penalty on their size, has no gradient.

    Args:
      optimizer: the optax optimizer.
      others: the optimizer of the parameters outside the layers; by default the same, which Muon cannot be.
      max_norm: bound of the norm of all gradients. As this norm is known only after the backward pass, a step divides
        its gradients by max(1, norm / max_norm) with the norm of the step before, and the first step does not.
      stochastic_rounding: whether parameters and states in bfloat16 are rounded up or down at random, so that the mean
        is right: bfloat16 has 8 significant bits, and would lose most small updates if it were rounded to nearest. The
        random numbers depend on the step and the element alone. The optimizer then gets parameters in float32, and its
        state is float32 but for what it keeps in less, such as by `mu_dtype`. False for `float32_masters`.

    Raises:
      TypeError: an optimizer is not optax's.
      ValueError: max_norm is not a finite number above 0.
    """

    optimizer: optax.GradientTransformation
    others: optax.GradientTransformation | None = None
    max_norm: float | None = None
    stochastic_rounding: bool = True

    def __post_init__(self) -> None:
        check_instance("optimizer", self.optimizer, optax.GradientTransformation, "an optimizer of optax")
        if self.others is not None:
            check_instance("others", self.others, optax.GradientTransformation, "an optimizer of optax or None")
        if self.max_norm is not None:
            check(as_finite("max_norm", self.max_norm) > 0, f"max_norm must be greater than 0, got {self.max_norm}.")
        as_flag("stochastic_rounding", self.stochastic_rounding)

    def check(self, model: nnx.Module) -> None:
        """Checks that the backward pass of a model can update it.

        Raises:
          TypeError: the model is not a Decoder.
          ValueError: it does not recompute whole layers, or several devices split it.
        """
        check_instance("model", model, Decoder, "a jgg.models.Decoder with an OptimizerInBackward")
        options = cast(Decoder, model).options
        remat, sharding = options.remat, options.sharding
        needed = "model must have remat='all' or 'offload' with an OptimizerInBackward"
        check(remat in ("all", "offload"), f"{needed}, got {remat!r}.")
        check(sharding is None, "model must be on one device with an OptimizerInBackward, got a sharding.")

    def init(self, params: State) -> InBackwardState:
        """The state before the first step, for the trained variables of a Decoder."""
        stacks, others = _split(params)
        layers = {name: jax.jit(self._init_layers)(nnx.State({name: own})) for name, own in stacks.items()}
        norm = None if self.max_norm is None else jnp.zeros((), jnp.float32)
        own = jax.jit(functools.partial(self._first, self.of_others))(others)
        return InBackwardState(jnp.zeros((), jnp.int32), norm, layers, own)

    @property
    def of_others(self) -> optax.GradientTransformation:
        """The optimizer of the parameters outside the layers."""
        return self.optimizer if self.others is None else self.others

    def _init_layers(self, stack: State) -> optax.OptState:
        """The state of a stack, by a loop: an optimizer may need further memory to make the state of a layer."""
        return jax.lax.map(functools.partial(self._first, self.optimizer), stack)

    def _first(self, optimizer: optax.GradientTransformation, params: Tree) -> optax.OptState:
        return optimizer.init(_wide(params) if self.stochastic_rounding else params)

    def updated(
        self,
        optimizer: optax.GradientTransformation,
        gradients: Tree,
        state: optax.OptState,
        params: Tree,
        factor: jax.Array | float,
        salt: jax.Array,
    ) -> tuple[Tree, optax.OptState]:
        """Parameters and the state of the optimizer after an update.

        Args:
          factor: what gradients are multiplied by.
          salt: uint32 [], which selects how numbers are rounded.
        """
        gradients = jax.tree.map(lambda g: g * factor, _wide(gradients))
        updates, new = optimizer.update(gradients, _wide(state), _wide(params) if self.stochastic_rounding else params)
        moved = jax.tree.map(lambda p, u: p.astype(jnp.promote_types(p.dtype, u.dtype)) + u, params, updates)
        return self._rounded(moved, params, salt), self._rounded(new, state, mixed(salt))

    def _rounded(self, tree: Tree, like: Tree, salt: jax.Array) -> Tree:
        """A tree in the dtypes of another one."""
        new, (old, structure) = jax.tree.leaves(tree), jax.tree.flatten(like)
        is_same = [leaf.shape for leaf in new] == [leaf.shape for leaf in old]
        check(is_same, "optimizer.update must return updates and a state in the shapes that it is given.")
        rounded = []
        for number, (own, leaf) in enumerate(zip(new, old, strict=True)):
            if self.stochastic_rounding and leaf.dtype == jnp.bfloat16 and own.dtype == jnp.float32:
                rounded.append(rounded_stochastically(own, mixed(salt + jnp.uint32(number))))
            else:
                rounded.append(own.astype(leaf.dtype))
        return jax.tree.unflatten(structure, rounded)


def _wide(tree: Tree) -> Tree:
    return jax.tree.map(in_float32, tree)


def _joined(params: Tree, state: optax.OptState) -> tuple[Tree, optax.OptState]:
    """The same, with each parameter computed together with its moments if it has several, as with AdamW.

    XLA would else write each of them into its stack in a loop of its own, and compute all moments in each. With at most
    one moment that takes less memory, and hardly longer.
    """
    leaves, structure = jax.tree.flatten_with_path((params, state))
    values = [leaf for _, leaf in leaves]
    for path, param in jax.tree.leaves_with_path(params):
        of_param = [
            n for n, (own, leaf) in enumerate(leaves) if own[-len(path) :] == path and leaf.shape == param.shape
        ]
        if len(of_param) > 2:
            for number, leaf in zip(of_param, barrier([values[number] for number in of_param]), strict=True):
                values[number] = leaf
    joined: tuple[Tree, optax.OptState] = jax.tree.unflatten(structure, values)
    return joined


class Backward[Model: nnx.Module, Metrics]:
    """A backward pass that updates a model, in a traced function.

    Args:
      optimizer, wrt, loss: those of the Trainer.
      graphdef, params, others: the model's graph, its variables of type `wrt`, and all others.
      state: the optimizer's state.
      batch: what the loss takes.

    Attributes:
      arguments: of `loss`, in which it must be differentiated.
    """

    def __init__(
        self,
        optimizer: OptimizerInBackward,
        wrt: type[nnx.Variable[jax.Array]],
        loss: Callable[..., tuple[jax.Array, Metrics]],
        graphdef: nnx.GraphDef[Model],
        params: State,
        others: tuple[State, ...],
        state: InBackwardState,
        batch: object,
    ) -> None:
        self._optimizer, self._loss, self._wrt, self._batch = optimizer, loss, wrt, batch
        self._graphdef, self._variables, self._state = graphdef, others, state
        self._stacks, ends = _split(params)
        self._held = {name: Held((own, state.stacks[name])) for name, own in self._stacks.items()}
        self._squares = Held(jnp.zeros(()))
        self.arguments: Arguments = ends, jnp.zeros(())
        self._factor: jax.Array | float = 1.0
        if state.norm is not None and optimizer.max_norm is not None:
            self._factor = 1 / jnp.maximum(1, state.norm / optimizer.max_norm)
        self._salt = mixed(state.step.astype(jnp.uint32))

    def loss(self, arguments: Arguments) -> tuple[jax.Array, tuple[Metrics, State]]:
        """The loss, its metrics, and the model's variables after it."""
        ends, token = arguments
        params = nnx.merge_state(ends, nnx.State(self._stacks))
        # variables can only be changed in the trace that they are made in
        model = nnx.merge(self._graphdef, *jax.tree.map(lambda a: a, (params, *self._variables)))
        cast(Decoder, model).updates = Updates(self._wrt, self._held, self._squares, self._rule, token)
        value, metrics = self._loss(model, self._batch)
        return value, (metrics, nnx.state(model))

    def _rule(
        self, name: str, index: jax.Array, gradients: State, own: tuple[State, Tree], squares: jax.Array
    ) -> tuple[tuple[State, Tree], jax.Array]:
        """See `Updates.rule`; a layer's variables stand under the name of their stack, as they do in the model."""
        salt = mixed(self._salt + jnp.uint32(list(self._held).index(name) + 1) + (index.astype(jnp.uint32) << 8))
        params, state = own
        new, state = self._optimizer.updated(
            self._optimizer.optimizer,
            nnx.State({name: gradients}),
            state,
            nnx.State({name: params}),
            self._factor,
            salt,
        )
        new, state = _joined(new, state)
        return (new[name], state), self._added(squares, gradients)

    def _added(self, squares: jax.Array, gradients: Tree) -> jax.Array:
        """The sum of the squares of gradients with those of further ones."""
        if self._state.norm is None:
            return squares
        return sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)), squares)

    def finish(self, gradients: State) -> tuple[State, InBackwardState]:
        """All variables of type `wrt` and the optimizer's state after the step.

        Args:
          gradients: those of the parameters outside the layers, from the backward pass.
        """
        optimizer, (ends, _) = self._optimizer, self.arguments
        new, others = optimizer.updated(
            optimizer.of_others, gradients, self._state.others, ends, self._factor, self._salt
        )
        values = {name: held.value for name, held in self._held.items()}
        params = nnx.merge_state(new, nnx.State({name: own for name, (own, _) in values.items()}))
        norm = None if self._state.norm is None else jnp.sqrt(self._added(self._squares.value, gradients))
        layers = {name: state for name, (_, state) in values.items()}
        return params, InBackwardState(self._state.step + 1, norm, layers, others)


def _split(params: State) -> tuple[dict[str, State], State]:
    """The stacks of layers of a Decoder's variables, by name, and the variables outside the layers."""
    stacks = {str(name): own for name, own in params.items() if isinstance(own, nnx.State)}
    return stacks, nnx.State({name: own for name, own in params.items() if name not in stacks})
