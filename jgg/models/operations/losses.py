"""The loss of each row's target, the negative logarithm of its probability by the row's logits: one pass over them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.manual_axes import alike
from jgg.extend import Launch, Launcher, Operation, array_type, power_of_2, tiles_of

type _Pair = tuple[jax.Array, jax.Array]


class Scored(NamedTuple):
    """Logits and the targets that they are for.

    Attributes:
      logits: float32 [T, V], before they are scaled and capped.
      targets: int32 [T]; the loss of one that is not from 0 to V - 1 is NaN.
    """

    logits: jax.Array
    targets: jax.Array


class Losses(NamedTuple):
    """The results of LOSSES, or arrays of them in other shapes.

    Attributes:
      losses: float32 [T], the log sum less the logit of the target.
      log_sums: float32 [T], the logarithm of the sum of exp(final logits).
    """

    losses: jax.Array
    log_sums: jax.Array


def final_logits(logits: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Logits times a factor, then, with a softcap, between -softcap and softcap by tanh."""
    logits = logits * scale
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def _types(operands: Scored, **_: object) -> Losses:
    of_rows = array_type(operands.targets.shape, jnp.float32)
    return Losses(of_rows, of_rows)


def _plain(operands: Scored, scale: float, softcap: float | None = None) -> Losses:
    logits, targets = final_logits(operands.logits, scale, softcap), operands.targets
    log_sums = _log_sums(logits)
    targets = jnp.where(targets < 0, logits.shape[-1], targets)  # else JAX would count from the last logit
    of_targets = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")[..., 0]
    return Losses(log_sums - of_targets, log_sums)


@jax.custom_jvp  # JAX has no rule for this reduction
def _log_sums(logits: jax.Array) -> jax.Array:
    """The logarithms of the sums of exp(logits) along the last axis, in one pass: it adds pairs of a maximum and a sum.

    Source: the online softmax, https://arxiv.org/abs/1805.02867.
    """

    def add(one: _Pair, other: _Pair) -> _Pair:
        greatest = jnp.maximum(one[0], other[0])
        return greatest, one[1] * jnp.exp(one[0] - greatest) + other[1] * jnp.exp(other[0] - greatest)

    pairs = alike((logits, jnp.ones_like(logits)))
    none = jnp.float32(jnp.finfo(jnp.float32).min), jnp.float32(0)  # -inf less -inf would be NaN
    greatest, sums = jax.lax.reduce(pairs, none, add, (logits.ndim - 1,))
    return greatest + jnp.log(sums)


@_log_sums.defjvp
def _differentiate_log_sums(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (logits,), (tangent,) = primals, tangents
    log_sums = _log_sums(logits)
    return log_sums, jnp.sum(jnp.exp(logits - log_sums[..., None]) * tangent, axis=-1)


def _launch(launcher: Launcher, operands: Scored, scale: float, softcap: float | None = None) -> Losses:
    from jgg.kernels.losses import losses_kernel

    num_rows, columns = operands.logits.shape
    tiles = tiles_of("losses_kernel", launcher.target)
    block = min(tiles["columns"], power_of_2(columns))
    launch = Launch(
        operands=operands._asdict(),
        outputs=_types(operands)._asdict(),
        constants={"COLUMNS": columns, "SCALE": scale, "SOFTCAP": softcap, "BLOCK_COLUMNS": block},
        grid=(num_rows,),
        num_warps=max(1, block // tiles["columns_of_warp"]),
        flops=5 * operands.logits.size,
        bytes_accessed=4 * operands.logits.size,
    )
    return Losses(**launcher.run(losses_kernel, launch))


LOSSES: Operation[Losses] = Operation(
    "losses",
    Scored,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    vmap="rows",
    mesh="rows",
)
"""Losses of targets; the parameters are the same as for `final_logits`, and `softcap` is optional.

A kernel gives a row the same bits whatever the other rows are, and whether logits are scaled before or here.
"""
