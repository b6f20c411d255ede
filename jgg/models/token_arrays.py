"""Arguments of whole models with a number for each token: tokens, targets, segments, lengths and weights.

Values are checked where they are known. A traced program has no values yet: there, an id that the vocabulary lacks
gives NaN, in `jgg.models.embedding` and in the losses.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, check, check_integers, check_rank, check_reals
from jgg.core.schedule import saturated_int32
from jgg.experts.router.routing import as_given_choices
from jgg.models.placement import on_host

_INT32 = jnp.iinfo(jnp.int32)


def as_integers(name: str, value: ArrayLike, axes: str) -> tuple[jax.Array, np.ndarray | None]:
    """The value as an integer array and, unless it is traced, its numbers as they came.

    Anything but a JAX array becomes int32, clipped to its range, because JAX would wrap larger numbers to valid ones.

    Raises: TypeError: it is no integer array. ValueError: it has not as many axes as `axes` lists, such as "[B, S]".
    """
    array = value if isinstance(value, jax.Array) else _as_numpy(name, value)
    check_integers(name, array)
    check_rank(name, array, axes)
    if isinstance(array, np.ndarray):
        return jnp.asarray(np.clip(array.astype(np.int64), _INT32.min, _INT32.max).astype(np.int32)), array
    return array, None if isinstance(array, Tracer) else on_host(array)


def _as_numpy(name: str, value: ArrayLike) -> np.ndarray | jax.Array:
    """The value as NumPy has it, which takes larger integers than JAX does; a JAX array if it is or holds one."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return as_array(name, value)  # raises, or takes traced numbers
    if array.dtype == object or hasattr(value, "__jax_array__"):
        return as_array(name, value)
    is_empty_list = array.size == 0 and not hasattr(value, "dtype")  # NumPy gives it a float dtype
    return array.astype(np.int32) if is_empty_list else array


def as_tokens(name: str, value: ArrayLike, vocabulary: int) -> jax.Array:
    """Ids of a vocabulary of this many tokens as an int32 array [B, S].

    Raises: TypeError, ValueError: as `as_integers`; or, unless it is traced, a number is no id.
    """
    array, ids = as_integers(name, value, "[B, S]")
    if ids is not None:
        check_ids(name, ids, vocabulary)
    return saturated_int32(array)


def as_segments(name: str, value: ArrayLike) -> jax.Array:
    """The numbers of segments as an integer array [B, S], in which different numbers stay different."""
    array, numbers = as_integers(name, value, "[B, S]")
    if numbers is not None:
        info = jnp.iinfo(array.dtype)
        is_wrong = (numbers < info.min) | (numbers > info.max)
        check(not is_wrong.any(), f"{name} must be within {info.dtype}, got {_first(numbers, is_wrong)}.")
    return array


def as_weights(name: str, value: ArrayLike | None, tokens: jax.Array) -> jax.Array:
    """Weights as float32 with the shape of the tokens; by default those of their mean."""
    if value is None:
        return jnp.full(tokens.shape, 1 / max(1, tokens.size), jnp.float32)
    array = as_array(name, value)
    check_reals(name, array)
    check_shape(name, array, tokens)
    return array.astype(jnp.float32)


def check_ids(name: str, ids: np.ndarray, vocabulary: int, is_read: np.ndarray | bool = True) -> None:
    """Raises ValueError unless all ids [B, S] that are read are from 0 to the vocabulary's last."""
    is_wrong = ((ids < 0) | (ids >= vocabulary)) & is_read
    expected = f"ids from 0 to {vocabulary - 1}, the last of the model's vocabulary"
    check(not is_wrong.any(), f"{name} must be {expected}, got {_first(ids, is_wrong)}.")


def as_choices(value: ArrayLike, shape: tuple[int, ...], num_experts: int, mask: jax.Array | None) -> jax.Array:
    """The experts that tokens are given, integer [L, B, S, k].

    Raises:
      TypeError, ValueError: as `as_given_choices`.
      ValueError: where values are known, a token that counts is given what is no expert, or an expert twice.
    """
    choices = as_given_choices(value, "[L, B, S, k]", shape)
    _, numbers = as_integers("topk_indices", value, "[L, B, S, k]")
    if numbers is None or isinstance(mask, Tracer):
        return choices
    counts = True if mask is None else on_host(mask)[:, :, None]
    is_wrong = ((numbers < -1) | (numbers >= num_experts)) & counts
    expected = f"experts from 0 to {num_experts - 1}, or -1 for a choice of the router"
    check(not is_wrong.any(), f"topk_indices must be {expected}, got {_first(numbers, is_wrong)}.")
    ascending = np.sort(numbers)
    is_twice = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0) & counts
    got = _first(ascending[..., 1:].max(axis=-1, where=is_twice, initial=0), is_twice.any(axis=-1))
    check(not is_twice.any(), f"topk_indices must give a token each expert at most once, got expert {got} twice.")
    return choices


def check_shape(name: str, array: jax.Array, tokens: jax.Array) -> None:
    """Raises ValueError unless an array has the shape of the tokens."""
    shape = list(tokens.shape)
    check(list(array.shape) == shape, f"{name} must be [B, S], {shape}, got {list(array.shape)}.")


def _first(numbers: np.ndarray, where: np.ndarray) -> str:
    """The first number of an array where a mask is True, and its place."""
    place = np.argwhere(where)[0].tolist() if where.any() else []
    return f"{numbers[tuple(place)]} at {place}"


def runs_of(segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each token the number of its run of equal segments, and its position in the run: int32 [B, S]."""
    is_first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    columns = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    first = jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)
    return jnp.cumsum(is_first, axis=1, dtype=jnp.int32), columns - first
