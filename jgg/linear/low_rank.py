"""LoRA: low-rank terms added to the weights of experts; `jgg.LowRank`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jgg.core.arguments import as_array, as_finite, check_floats, check_instance, check_one_of, check_rank
from jgg.core.choices import W_LAYOUTS
from jgg.core.matrix import Factors, Matrix
from jgg.core.quantized import QuantizedArray, type_of

__all__ = ["LowRank"]

# the left and the right factor of delta in each layout, and their axes
_AXES = {"enk": {"b": "[E, N, r]", "a": "[E, r, K]"}, "ekn": {"a": "[E, K, r]", "b": "[E, r, N]"}}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """A LoRA term of rank r for each expert's weights, as a pytree of a and b.

    Computes `delta[e] = scale * b[e] @ a[e]` in w_layout "enk", and `delta[e] = scale * a[e] @ b[e]` in "ekn". Arrays
    are checked when they are used. A term for w_gate_up has gate and up side by side or interleaved, like w_gate_up.

    Attributes:
      a: float [E, r, K] for w [E, N, K]; float [E, K, r] for w [E, K, N].
      b: float [E, N, r] or [E, r, N].
      scale: a number, static and not trained: changing it makes JAX compile again.
    """

    a: jax.Array | np.ndarray
    b: jax.Array | np.ndarray
    scale: float = 1.0

    def __repr__(self) -> str:
        """The dtypes and shapes, without the numbers."""
        return f"LowRank(a={type_of(self.a)}, b={type_of(self.b)}, scale={self.scale!r})"

    def delta(self, w_layout: str = "enk") -> jax.Array:
        """Returns the term that is added to w, float32 [E, N, K] for "enk" or [E, K, N] for "ekn".

        Raises: as `merge`.
        """
        return _compute_delta(as_low_rank("LowRank", self, w_layout), w_layout)

    def merge(self, w: ArrayLike, w_layout: str = "enk") -> jax.Array:
        """Returns w + delta, computed in float32, in the dtype of w.

        Args:
          w: float [E, N, K] or [E, K, N]; not a QuantizedArray, because merging would have to round it again. Merge
            into what its `dequantize` returns.
          w_layout: "enk" or "ekn", the layout of w, a and b.

        Raises:
          ValueError: shapes disagree, scale is not finite or w_layout is unknown.
          TypeError: w, a or b is not a float array.
        """
        return self._added(w, w_layout, 1)

    def unmerge(self, w: ArrayLike, w_layout: str = "enk") -> jax.Array:
        """Returns w - delta. It undoes `merge`, up to rounding to the dtype of w.

        Args: as `merge`.

        Raises: as `merge`.
        """
        return self._added(w, w_layout, -1)

    def _added(self, w: object, w_layout: str, sign: int) -> jax.Array:
        if isinstance(w, QuantizedArray):
            raise TypeError("w must be a float array, such as QuantizedArray.dequantize returns, got a QuantizedArray.")
        w = as_array("w", w)
        check_floats("w", w)
        check_rank("w", w, "[E, N, K] or [E, K, N]")
        delta = _compute_delta(as_low_rank("LowRank", self, w_layout, w.shape), w_layout)
        return (w.astype(jnp.float32) + sign * delta).astype(w.dtype)


def _compute_delta(low_rank: LowRank, w_layout: str) -> jax.Array:
    left, right = (jnp.asarray(getattr(low_rank, part), jnp.float32) for part in _AXES[w_layout])
    return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST) * np.float32(low_rank.scale)


def as_low_rank(name: str, value: object, w_layout: str, shape: tuple[int, ...] | None = None) -> LowRank:
    """The value as a LowRank of JAX arrays.

    Args:
      name: the value's name in messages.
      w_layout: "enk" or "ekn".
      shape: the shape of the term's weights; None for any.

    Raises:
      ValueError: shapes disagree, its scale is not finite or w_layout is unknown.
      TypeError: it is not a LowRank, a or b is not a float array, or its scale is not a number.
    """
    check_instance(name, value, LowRank, "a LowRank")
    assert isinstance(value, LowRank)
    check_one_of("w_layout", w_layout, W_LAYOUTS)
    arrays: dict[str, jax.Array] = {}
    for part, axes in _AXES[w_layout].items():
        arrays[part] = as_array(f"{name}.{part}", getattr(value, part))
        check_floats(f"{name}.{part}", arrays[part])
        check_rank(f"{name}.{part}", arrays[part], axes)
    left, right = _AXES[w_layout]
    rank = arrays[left].shape[2]
    experts, rows, columns = (*arrays[left].shape[:2], arrays[right].shape[2]) if shape is None else shape
    expected = {left: (experts, rows, rank), right: (experts, rank, columns)}
    if any(arrays[part].shape != expected[part] for part in "ab"):
        beside = "" if shape is None else f" for w {list(shape)}"
        raise ValueError(
            f"{name}{beside} in w_layout {w_layout!r} must have a {list(expected['a'])} and b {list(expected['b'])}, "
            f"got a {list(arrays['a'].shape)} and b {list(arrays['b'].shape)}."
        )
    return LowRank(**arrays, scale=as_finite(f"{name}.scale", value.scale))


def checked_beside(name: str, matrix: Matrix, term: object, w_layout: str) -> Matrix:
    """The matrix [E, N, K] or [E, K, N] with a term; raises as `as_low_rank` does."""
    return beside(matrix, as_low_rank(name, term, w_layout, matrix.shape))


def beside(matrix: Matrix, term: LowRank) -> Matrix:
    """The matrix with a checked term, which freezes its weights."""
    return matrix.beside(factors_of(term))


def factors_of(term: LowRank) -> Factors:
    """The factors of a checked term, as products take them."""
    return Factors(jnp.asarray(term.a), jnp.asarray(term.b) * jnp.asarray(term.scale, term.b.dtype))
