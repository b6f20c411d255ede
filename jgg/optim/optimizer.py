"""`muon`: the optax optimizer of this name, for stacks of matrices on one or several devices."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from optax.contrib import MuonDimensionNumbers

from jgg.core.arguments import as_dtype, as_flag, check
from jgg.core.problem import DTYPES
from jgg.extend import barrier, check_implementation
from jgg.optim.coefficients import Coefficients, CoefficientsLike, coefficients_of
from jgg.optim.newton_schulz import checked_method, iterate, scaled
from jgg.optim.parameters import matrices, matrix_axes, of_leaves, shape_factor
from jgg.optim.split import map_stacks, placed

type Tree = object  # a pytree with a value of each parameter, a function that makes one of the parameters, or None


class MuonState(NamedTuple):
    """The state of `muon` for matrices.

    Attributes:
      step: int32 [], number of updates so far.
      mu: the momentum of each matrix, the exponential moving average of its gradients, in the parameter's shape.
    """

    step: jax.Array
    mu: optax.Updates


def muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: CoefficientsLike = "standard",
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: float = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Tree = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Tree = None,
    consistent_rms: float | None = None,
    shardings: Tree = None,
    ns_dtype: DTypeLike = "float16",
    ns_method: str | None = None,
    implementation: str | None = None,
) -> optax.GradientTransformation:
    """Muon for matrices and stacks of matrices, such as experts, and AdamW for all other parameters.

    A matrix's update is its orthogonalized momentum: all singular values become about 1. See `orthogonalize`. Arguments
    that `optax.contrib.muon` also has mean the same, and with ns_dtype "float32" the updates are the same up to
    rounding; `preconditioning` is always "frobenius" here. The differences: experts and layers are stacks of matrices
    by default; only half of each symmetric product is computed; the iterations run on one stack at a time, in 16 bits,
    so they add no float32 array of the parameters' size; and the devices of a mesh exchange parts of stacks instead of
    gathering them. Under `optax.inject_hyperparams` ns_steps must be static: `static_args="ns_steps"`.

    Examples:
      >>> import jgg, jgg.optim, optax
      >>> layer = {"w_down": jnp.ones((4, 8, 16)), "w_router": jnp.ones((8, 4))}
      >>> optimizer = jgg.optim.muon(0.02, weight_decay=0.1, consistent_rms=0.2)
      >>> state = optimizer.init(layer)
      >>> updates, state = optimizer.update(layer, state, layer)
      >>> layer = optax.apply_updates(layer, updates)

    Args:
      learning_rate: the learning rate, a number or a schedule.
      ns_coeffs, ns_steps, ns_dtype, ns_method, implementation: as in `orthogonalize`.
      beta: the decay rate of the momentum.
      eps: added to the norm of each matrix; also the eps of AdamW.
      weight_decay, weight_decay_mask: the weight decay of matrices, as in `optax.adamw`.
      mu_dtype: dtype of the momentum, also of AdamW's first moment; by default the parameters' dtype.
      nesterov: whether to use Nesterov momentum, in AdamW too.
      adaptive: whether a matrix's update is multiplied by its inner product with the momentum. Each matrix of a stack
        has its own factor; `optax.contrib.muon` has one for the whole parameter.
      adam_b1, adam_b2, adam_eps_root, adam_weight_decay, adam_learning_rate: arguments of AdamW, which trains the other
        parameters. By default its learning rate is `learning_rate`.
      muon_weight_dimension_numbers: which parameters are matrices: a pytree of `optax.contrib.MuonDimensionNumbers`
        and None, or a function that makes such a pytree from the parameters. The default is `matrices`.
      consistent_rms: the root mean square of the update of a matrix of full rank; 0.2 is about AdamW's. By default
        updates are multiplied by `sqrt(max(1, columns / rows))`.
      shardings: how devices split the parameters, such as `jax.tree.map(lambda p: p.sharding, params)`. None for one
        device, and for a mesh of Explicit axes, where the arrays' types say it. With None and Auto axes, XLA decides
        what devices exchange.

    Returns:
      An optax optimizer; updates have the dtypes of the gradients.

    Raises:
      ValueError: an argument is wrong; in `init`, no parameter is a matrix, or numbers do not fit a parameter.
      TypeError: a dtype is wrong.
    """
    dtype, method = checked_method(ns_dtype, ns_method)
    check_implementation(implementation)
    numbers = matrices if muon_weight_dimension_numbers is None else muon_weight_dimension_numbers
    options = _Options(
        coefficients_of(ns_coeffs, ns_steps),
        beta,
        eps,
        None if mu_dtype is None else as_dtype("mu_dtype", mu_dtype, DTYPES),
        as_flag("nesterov", nesterov),
        as_flag("adaptive", adaptive),
        consistent_rms,
        dtype,
        functools.partial(iterate, method=method, implementation=implementation),
    )
    of_matrices = optax.chain(
        _orthogonal_momentum(options, numbers, shardings),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    of_others = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        mu_dtype=mu_dtype,
        weight_decay=adam_weight_decay,
        nesterov=nesterov,
    )
    labels = functools.partial(_labels, numbers)
    return optax.partition({"muon": of_matrices, "adam": of_others}, labels)


class _Options(NamedTuple):
    """The options of `muon` for matrices, checked."""

    coefficients: Coefficients
    beta: ArrayLike
    eps: float
    mu_dtype: jnp.dtype | None
    nesterov: bool
    adaptive: bool
    consistent_rms: float | None
    dtype: jnp.dtype
    iterate: Callable[..., jax.Array]


def _labels(numbers: Tree, params: optax.Params) -> optax.Params:
    """Which of the two optimizers trains each parameter; raises if Muon trains none."""
    found = of_leaves(numbers, params)
    check(
        any(own is not None for own in found),
        "muon_weight_dimension_numbers must choose a parameter, got none. By default these are arrays of two or more "
        "axes whose names begin with w_, except embeddings, heads, routers, LoRA's factors and vectors [..., N, 1].",
    )
    treedef = jax.tree.structure(params)
    return jax.tree.unflatten(treedef, ["adam" if own is None else "muon" for own in found])


def _orthogonal_momentum(options: _Options, numbers: Tree, shardings: Tree) -> optax.GradientTransformation:
    """Updates: the momentum of each matrix, orthogonalized and scaled by its shape."""

    def init(params: optax.Params) -> MuonState:
        for param, own in zip(jax.tree.leaves(params), of_leaves(numbers, params), strict=True):
            matrix_axes(param.shape, own)
        mu = jax.tree.map(lambda p: jnp.zeros_like(p, options.mu_dtype), params)
        return MuonState(jnp.zeros((), jnp.int32), mu)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MuonState]:
        count = jnp.asarray(optax.safe_increment(state.step))
        gradients, treedef = jax.tree.flatten(updates)
        own = zip(
            gradients,
            jax.tree.leaves(state.mu),
            of_leaves(numbers, updates),
            of_leaves(shardings, updates),
            strict=True,
        )
        results = [_updated(options, count, *each) for each in own]
        updates, mu = (jax.tree.unflatten(treedef, each) for each in zip(*results, strict=True))
        return updates, MuonState(count, mu)

    return optax.GradientTransformation(init, update)


def _updated(
    options: _Options,
    count: jax.Array,
    gradient: jax.Array,
    mu: jax.Array,
    numbers: MuonDimensionNumbers,
    sharding: jax.sharding.Sharding | None,
) -> tuple[jax.Array, jax.Array]:
    """The update of a parameter and its new momentum.

    This computes only one other array of the parameter's size. It holds the matrices in 16 bits, first scaled, then
    orthogonalized.
    """
    axes = matrix_axes(gradient.shape, numbers)
    beta, g = jnp.asarray(options.beta, jnp.float32), gradient.astype(jnp.float32)
    mu = placed((beta * mu.astype(jnp.float32) + (1 - beta) * g).astype(mu.dtype), sharding)
    mu = barrier(mu)  # else a kernel that transposes matrices computes it too, and cannot write over the former one
    mean, steps = mu.astype(jnp.float32), count.astype(jnp.float32)
    if options.nesterov:
        mean = beta * mean / (1 - beta ** (steps + 1)) + (1 - beta) * g / (1 - beta**steps)
    else:
        mean = mean / (1 - beta**steps)
    iterate = functools.partial(options.iterate, coefficients=options.coefficients)
    orthogonal = map_stacks(iterate, scaled(mean, options.eps, options.dtype, axes), axes, sharding)
    update = orthogonal.astype(jnp.float32) * shape_factor(gradient.shape, numbers, options.consistent_rms)
    if options.adaptive:
        update *= jnp.sum(mean * orthogonal.astype(jnp.float32), axis=(*axes[0], *axes[1]), keepdims=True)
    return update.astype(gradient.dtype), mu
