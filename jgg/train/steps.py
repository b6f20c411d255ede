"""The training step: a function of a model's state, the optimizer's state and a batch."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jgg.core.arguments import check
from jgg.train.in_backward import Backward, OptimizerInBackward
from jgg.train.state import Path, State, name_of

type Batch = object  # a pytree of arrays
type Loss[Metrics] = Callable[..., tuple[jax.Array, Metrics]]
type Optimizer = optax.GradientTransformation | OptimizerInBackward
type Own = tuple[State, optax.OptState]  # what a step replaces
type Step[Metrics] = Callable[[Own, State, Batch], tuple[Own, tuple[jax.Array, Metrics]]]
type Measured[Metrics] = tuple[tuple[jax.Array, Metrics], State, State]  # with what the loss changes, and gradients


def step_of[Model: nnx.Module, Metrics](
    graphdef: nnx.GraphDef[Model],
    optimizer: Optimizer,
    loss: Loss[Metrics],
    accumulate: bool,
    wrt: type[nnx.Variable[jax.Array]] = nnx.Param,
    changed: Collection[Path] = (),
) -> Step[Metrics]:
    """The step: ((state, opt_state), frozen, batch) -> ((state, opt_state) after it, (loss, metrics)).

    The state has the variables of type `wrt` and the variables that the loss changes, with the paths `changed`. The
    loss is NaN if a parameter is not finite after the step.
    """
    if isinstance(optimizer, OptimizerInBackward):
        return _step_in_backward(graphdef, optimizer, loss, accumulate, wrt, changed)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def gradients_of(
        params: State, others: tuple[State, State], part: Batch
    ) -> tuple[jax.Array, tuple[Metrics, State]]:
        # variables can only be changed in the trace that they are made in
        model = nnx.merge(graphdef, *jax.tree.map(lambda a: a, (params, *others)))
        value, metrics = loss(model, part)
        return value, (metrics, changed_in(nnx.state(model)))

    def gradients_at(state: State, frozen: State, part: Batch) -> Measured[Metrics]:
        params, rest = nnx.split_state(state, wrt, ...)
        (value, (metrics, after)), gradients = gradients_of(params, (rest, frozen), part)
        return (value, metrics), after, gradients

    def mean_of(state: State, frozen: State, parts: Batch) -> Measured[Metrics]:
        def add(carry: tuple[State, State], part: Batch) -> tuple[tuple[State, State], tuple[jax.Array, Metrics]]:
            sums, after = carry
            measured, after, gradients = gradients_at(nnx.merge_state(state, after), frozen, part)
            return (jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, gradients), after), measured

        params = nnx.filter_state(state, wrt)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), params)
        (sums, after), measured = jax.lax.scan(add, (zeros, changed_in(state)), parts)
        count = len(measured[0])
        means = jax.tree.map(lambda p, total: (total / count).astype(p.dtype), params, sums)
        return jax.tree.map(lambda a: jnp.mean(a, axis=0), measured), after, means

    def changed_in(state: State) -> State:
        return nnx.filter_state(state, lambda path, _: path in changed)

    def step(own: Own, frozen: State, batch: Batch) -> tuple[Own, tuple[jax.Array, Metrics]]:
        state, opt_state = own
        (value, metrics), after, gradients = (mean_of if accumulate else gradients_at)(state, frozen, batch)
        params, rest = nnx.split_state(nnx.merge_state(state, after), wrt, ...)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        new: Any = optax.apply_updates(params, updates)
        return (nnx.merge_state(new, rest), opt_state), (_if_finite(value, new), metrics)

    return step


def _step_in_backward[Model: nnx.Module, Metrics](
    graphdef: nnx.GraphDef[Model],
    optimizer: OptimizerInBackward,
    loss: Loss[Metrics],
    accumulate: bool,
    wrt: type[nnx.Variable[jax.Array]],
    changed: Collection[Path],
) -> Step[Metrics]:
    """The step of an optimizer that updates layers in the backward pass."""

    def step(own: Own, frozen: State, batch: Batch) -> tuple[Own, tuple[jax.Array, Metrics]]:
        state, opt_state = cast(tuple[State, Any], own)
        params, rest = nnx.split_state(state, wrt, ...)
        part = only_part(batch) if accumulate else batch
        backward = Backward(optimizer, wrt, loss, graphdef, params, (rest, frozen), opt_state, part)
        differentiated = jax.value_and_grad(backward.loss, has_aux=True)(backward.arguments)
        (value, (metrics, after)), (gradients, _) = differentiated
        updated: Any = backward.finish(gradients)
        new, opt_state = updated
        rest = nnx.filter_state(after, lambda path, _: path in changed)
        if accumulate:  # means have the dtypes of those over several parts
            metrics = jax.tree.map(lambda a: jnp.mean(a[None], axis=0), metrics)
        return (nnx.merge_state(new, rest), opt_state), (_if_finite(value, new), metrics)

    return step


def _if_finite(value: jax.Array, params: State) -> jax.Array:
    """A loss, or NaN if a parameter is not finite."""
    is_finite = jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]).all()
    return jnp.where(is_finite, value, jnp.nan)


def only_part(batch: Batch) -> Batch:
    """The one part of a batch.

    Raises: ValueError: it has several.
    """
    (count,) = {len(leaf) for leaf in jax.tree.leaves(batch)}
    check(
        count == 1, f"batch must have one part with an OptimizerInBackward, as no sum of gradients exists, got {count}."
    )
    return jax.tree.map(lambda a: a[0], batch)


def lowered[Metrics](
    step: Step[Metrics],
    own: Own,
    frozen: State,
    batch: Batch,
    options: Mapping[str, object],
    everywhere: jax.sharding.Sharding | None = None,
) -> jax.stages.Lowered:
    """Lowers a step, which writes what it replaces over `own`; all arguments may be shapes with shardings.

    Args:
      options: of XLA.
      everywhere: where the loss and the metrics are; by default on the one device.
    """
    shardings = jax.tree.map(lambda a: a.sharding, own)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere), compiler_options=dict(options))
    return jitted.lower(own, frozen, batch)


def changed_by[Model: nnx.Module, Metrics](
    loss: Loss[Metrics],
    graphdef: nnx.GraphDef[Model],
    state: State,
    frozen: State,
    batch: Batch,
    accumulate: bool,
) -> frozenset[Path]:
    """The paths of the variables that a loss changes, such as the counts of dropout; computes nothing.

    Raises: ValueError: the loss changes a shape or dtype, or adds a variable other than an `nnx.Intermediate`.
    """
    paths: set[Path] = set()

    def look(state: State, frozen: State, batch: Batch) -> None:
        model = nnx.merge(graphdef, state, frozen)
        before = _leaves_of(model)
        loss(model, jax.tree.map(lambda a: a[0], batch) if accumulate else batch)
        for path, leaves in _leaves_of(model).items():
            if path not in before:
                raise ValueError(f"loss must add no variable to the model of a Trainer, got a new {name_of(path)}.")
            if any(new is not old for new, old in zip(leaves, before[path], strict=False)):
                types = [[f"{leaf.dtype} {list(leaf.shape)}" for leaf in each] for each in (before[path], leaves)]
                if types[0] != types[1]:
                    was, now = (", ".join(each) for each in types)
                    raise ValueError(f"loss must leave the shape and dtype of {name_of(path)}, {was}, got {now}.")
                paths.add(path)

    jax.eval_shape(look, state, frozen, batch)
    return frozenset(paths)


def _leaves_of(model: nnx.Module) -> dict[Path, list[jax.Array]]:
    """The arrays of each variable that is not an intermediate result."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Intermediate)))
    return {path: jax.tree.leaves(leaf) for path, leaf in flat}
