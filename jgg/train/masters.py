"""Lets an optimizer train 16-bit parameters: by float32 masters that it keeps, or by rounding at random."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jgg.core.arguments import check, check_instance
from jgg.core.rounding import mixed, rounded, rounded_stochastically


class MastersState(NamedTuple):
    """The state of `float32_masters`.

    Attributes:
      masters: float32 arrays for the 16-bit parameters, `optax.MaskedNode()` for the others.
      inner: the state of the wrapped optimizer.
    """

    masters: optax.Params
    inner: optax.OptState


def float32_masters(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer train float32 masters of bfloat16 and float16 parameters, which become rounded copies of them.

    A bfloat16 number has 8 significant bits: an update of less than 1/512 of a parameter would be lost, and with usual
    learning rates most updates are that small. The masters keep all of it. They and the optimizer's state are float32,
    12 bytes per parameter with AdamW; the model and its gradients stay 16-bit. Parameters of other dtypes, such as
    float32 adapters, train as they would without this function.

    If something else sets a parameter, such as `jgg.optim.qk_clip`, `jgg.nnx.load_params` or an average of weights, the
    masters follow: with the next update, each number that differs from its rounded master becomes the master.

    Examples:
      >>> optimizer = jgg.train.float32_masters(optax.adamw(1e-4))
      >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.ones(3, jnp.bfloat16)}, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> params["w"].dtype, state.masters["w"].dtype
      (dtype(bfloat16), dtype('float32'))

    Args:
      optimizer: the optimizer of optax for the masters. It gets gradients and parameters in float32.

    Returns:
      An optax optimizer, which must be the last of a chain. Anything that modifies or skips an optimizer's updates goes
      inside, as in `float32_masters(optax.apply_if_finite(optimizer, 5))`. So does `optax.MultiSteps`, which then adds
      up gradients in float32. `init` takes the masters' first values from the parameters. `update` needs the
      parameters, and returns updates in float32: `optax.apply_updates` gives each parameter the master's value, rounded
      to nearest. If that value is less than 2**-15 (for float16: 2**-12) of the parameter's previous value, it can be
      off by up to 2**-24 of the previous value, and the master takes the parameter's value with the next update.
    """
    inner = _wrapped(optimizer)

    def init(params: optax.Params) -> MastersState:
        masters = jax.tree.map(lambda p: p.astype(jnp.float32) if _is_short(p) else optax.MaskedNode(), params)
        return MastersState(masters, inner.init(jax.tree.map(in_float32, params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, MastersState]:
        params = _given(params)
        trained = jax.tree.map(_trained, params, state.masters)
        gradients = _of_short(params, updates)
        updates, inner_state = inner.update(gradients, state.inner, trained, **extra)

        def moved(param: jax.Array, own: jax.Array, step: jax.Array) -> optax.Params:
            return own + in_float32(step) if _is_short(param) else optax.MaskedNode()

        masters = jax.tree.map(moved, params, trained, updates)
        updates = jax.tree.map(_step_to, params, masters, updates)
        return updates, MastersState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class RoundingState(NamedTuple):
    """The state of `stochastic_rounding`.

    Attributes:
      step: int32 [], number of updates so far.
      inner: the state of the wrapped optimizer.
    """

    step: jax.Array
    inner: optax.OptState


def stochastic_rounding(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer train bfloat16 parameters without masters: each update rounds them up or down at random.

    In the mean they move by the update, however small it is, but noise of up to the distance of two bfloat16 numbers is
    added to each. It takes 4 bytes per parameter less than `float32_masters`. Parameters of other dtypes are trained as
    without this function.

    Args:
      optimizer: the optimizer of optax. It gets gradients and parameters in float32, and keeps its state so.

    Returns:
      An optax optimizer, which must be the last of a chain, as `float32_masters`. `update` needs the parameters. Noise
      is a hash of the number of updates and of an element's place, so the same run gives the same bits.

    Raises:
      TypeError: the optimizer is none of optax.
      ValueError: in `update`, there are no parameters, or one is float16.

    Source: Gupta et al., Deep Learning with Limited Numerical Precision, 2015, https://arxiv.org/abs/1502.02551.
    """
    inner = _wrapped(optimizer)

    def init(params: optax.Params) -> RoundingState:
        return RoundingState(jnp.zeros((), jnp.int32), inner.init(jax.tree.map(in_float32, params)))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: object
    ) -> tuple[optax.Updates, RoundingState]:
        params = _given(params)
        gradients = _of_short(params, updates)
        updates, own = inner.update(gradients, state.inner, jax.tree.map(in_float32, params), **extra)
        step = jnp.asarray(optax.safe_increment(state.step))
        numbers = itertools.count()

        def step_of(param: jax.Array, update: jax.Array) -> jax.Array:
            number = next(numbers)
            if not _is_short(param):
                return update
            check(param.dtype == jnp.bfloat16, f"params must be bfloat16 to be rounded at random, got {param.dtype}.")
            wide = param.astype(jnp.float32)
            salt = mixed(step.astype(jnp.uint32) ^ mixed(jnp.uint32(number)))
            moved = rounded_stochastically(wide + in_float32(update), salt).astype(jnp.float32)
            return moved - wide

        return jax.tree.map(step_of, params, updates), RoundingState(step, own)

    return optax.GradientTransformationExtraArgs(init, update)


def _wrapped(optimizer: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformationExtraArgs:
    """The optimizer to wrap; raises TypeError if it is none of optax."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    check_instance("optimizer", optimizer, optax.GradientTransformation, "an optimizer of optax")
    return optax.with_extra_args_support(optimizer)


def _given(params: optax.Params | None) -> optax.Params:
    """The argument `params` of an update; raises ValueError if there is none."""
    if params is None:
        raise ValueError("params must be the parameters, as in optimizer.update(updates, state, params), got None.")
    return params


def _of_short(params: optax.Params, gradients: optax.Updates) -> optax.Updates:
    """Gradients, those of 16-bit parameters in float32."""
    return jax.tree.map(lambda p, g: in_float32(g) if _is_short(p) else g, params, gradients)


def _is_short(array: jax.Array) -> bool:
    return array.dtype in (jnp.bfloat16, jnp.float16)


def in_float32(array: jax.Array) -> jax.Array:
    """An array of 16-bit floats in float32, any other unchanged."""
    return array.astype(jnp.float32) if _is_short(array) else array


def _trained(param: jax.Array, master: jax.Array) -> jax.Array:
    """What the wrapped optimizer trains: the master, or the parameter's own number where the two no longer agree."""
    if not _is_short(param):
        return param
    wide = param.astype(jnp.float32)
    # 0 and -0 are equal: an update that rounds to -0 leaves 0
    return jnp.where(rounded(master, param.dtype) == wide, master, wide)


def _step_to(param: jax.Array, master: jax.Array, step: jax.Array) -> jax.Array:
    """What must be added to a parameter to make it its rounded master; `step` for parameters without a master."""
    return rounded(master, param.dtype) - param.astype(jnp.float32) if _is_short(param) else step
