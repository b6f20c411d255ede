"""Checks and converts single arguments for all functions: arrays, whole numbers, numbers, flags, paths, precisions.

Each function returns the converted argument, or raises an error that names the argument, what was expected and what
came. Options are static parameters of JAX programs, and JAX's caches treat 4.0 like 4 and True like 1. So options
become plain ints, floats and bools here, before anything is traced.
"""

import math
import numbers
import operator
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, SupportsIndex, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

Shaped = jax.Array | jax.ShapeDtypeStruct


class HasShape(Protocol):
    """An array, or a stand-in for one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        ...


_DEFAULT, _HIGH, _HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST

# Maps each name to the least precise of the three that keeps as many bits of the factors as the name asks for. On a
# GPU, DEFAULT is TF32 with 11 bits, HIGH three passes of TF32 with about 21, and HIGHEST float32 with 24. float16 has
# 11 bits, bfloat16 8, three bfloat16 passes about 16, six 24. Operands are at most float32, so float64 counts as that.
_PRECISIONS = {
    **dict.fromkeys(("default", "fastest", "bfloat16", "tensorfloat32"), _DEFAULT),
    **dict.fromkeys(("high", "bfloat16_3x"), _HIGH),
    **dict.fromkeys(("highest", "float32"), _HIGHEST),
    # the names in jax.lax.DotAlgorithmPreset, without the presets that lax.dot takes only for float8
    **dict.fromkeys(("DEFAULT", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16"), _DEFAULT),
    **dict.fromkeys(("BF16_BF16_F32", "TF32_TF32_F32"), _DEFAULT),
    **dict.fromkeys(("BF16_BF16_F32_X3", "TF32_TF32_F32_X3"), _HIGH),
    **dict.fromkeys(("BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32", "F64_F64_F64"), _HIGHEST),
}


def as_array(name: str, value: object) -> jax.Array:
    """The value as a JAX array; what is no array yet, such as a list of numbers, goes through `jnp.asarray`.

    Raises: TypeError: `jnp.asarray` does not take the value. ValueError: it has an integer that JAX's ints cannot hold.
    """
    if isinstance(value, jax.Array):  # asarray would convert a traced array, and jax_debug_nans would check that
        return value
    try:
        return jnp.asarray(cast(ArrayLike, value))
    except OverflowError:
        dtype = jax.dtypes.canonicalize_dtype(int)
        raise ValueError(f"{name} must have integers within {dtype}, got a larger one.") from None
    except (TypeError, ValueError):
        rows = "rows of unequal lengths in a " if _is_ragged(value) else ""
        raise TypeError(f"{name} must be an array, got {rows}{_kind(value)}.") from None


def _is_ragged(value: object) -> bool:
    try:
        np.shape(cast(ArrayLike, value))
    except ValueError:
        return True
    return False


def as_array_or_none(name: str, value: object) -> jax.Array | None:
    """The value as `as_array` returns it, or None for None."""
    return None if value is None else as_array(name, value)


def as_mask(mask: ArrayLike | None, axes: str, shape: tuple[int, ...]) -> jax.Array | None:
    """The mask of the tokens that count, as bools; None without one. Raises unless it has this shape, named `axes`."""
    if mask is None:
        return None
    mask = as_array("mask", mask)
    check_reals("mask", mask)
    check(mask.shape == shape, f"mask must be {axes} = {list(shape)}, got {list(mask.shape)}.")
    return mask.astype(bool)


def as_int(name: str, value: object, least: int | None = None, expected: str | None = None) -> int:
    """The value, a whole number of Python, of NumPy or in an array, as an int of at least `least`; a bool is refused.

    Args:
      expected: how the message describes a valid value, where `least` does not say it all.

    Raises: TypeError: the value is no whole number. ValueError: it is less than `least`.
    """
    wanted = {None: "an int", 1: "a positive int"}.get(least, f"an int of at least {least}")
    message = f"{name} must be {expected or wanted}, got {value!r}."
    try:
        number = operator.index(cast(SupportsIndex, value))
    except TypeError:
        raise TypeError(message) from None
    if isinstance(value, bool):
        raise TypeError(message)
    if least is not None and number < least:
        raise ValueError(message)
    return number


def as_flag(name: str, value: object) -> bool:
    """The value, a bool of Python or NumPy, as a Python bool.

    Raises: TypeError: the value is no bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def as_path(name: str, value: object) -> Path:
    """The path; raises TypeError unless it is a str or a path of str, and ValueError if it has what no path can."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} must be a str or a Path, got {value!r}.")
    path = Path(value)
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate
        is_possible = False
    check(is_possible, f"{name} must be a path that the file system can have, got {str(path)!r}.")
    return path


def as_names(name: str, value: object, defaults: Mapping[str, str]) -> dict[str, str]:
    """`defaults`, updated with the names that `value` gives; None changes nothing.

    Raises: TypeError: the value is no dict of strings. ValueError: it has a key that `defaults` lacks.
    """
    given = {} if value is None else value
    message = f"{name} must be None or a dict with names of {' or '.join(map(repr, defaults))}, got {value!r}."
    if not isinstance(given, Mapping) or not all(isinstance(part, str) for item in given.items() for part in item):
        raise TypeError(message)
    check(given.keys() <= defaults.keys(), message)
    return {**defaults, **given}


def as_finite(name: str, value: object) -> float:
    """The value, a finite real number, as a float.

    Raises: TypeError: the value is no number. ValueError: it is infinite or NaN.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    try:
        number = float(value)
    except OverflowError:  # an int that no float can be
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return number


def as_dtype(name: str, value: object, choices: Collection[DTypeLike] | None = None) -> jnp.dtype:
    """The value as a dtype, which must be one of `choices` or, where that is None, any float dtype.

    Raises: TypeError: JAX takes the value for no dtype, or for a dtype that is not allowed.
    """
    message = f"{name} must be {'a float dtype' if choices is None else f'one of {dtype_names(choices)}'}, got"
    if value is None or isinstance(value, jax.Array | np.ndarray):  # NumPy takes None for float64
        raise TypeError(f"{message} {_kind(value)}.")
    try:
        dtype = jnp.dtype(cast(DTypeLike, value))
    except TypeError:
        raise TypeError(f"{message} {value!r}.") from None
    if not (jnp.issubdtype(dtype, jnp.floating) if choices is None else dtype in choices):
        raise TypeError(f"{message} {dtype}.")
    return dtype


def as_precision(precision: jax.lax.PrecisionLike) -> jax.lax.Precision:
    """The jax.lax.Precision that `precision` stands for; None stands for `jax_default_matmul_precision`.

    A pair, one entry for each operand, counts as its more precise entry.

    Raises: ValueError: `jax.lax.dot` does not take `precision` for float32, float16 and bfloat16.
    """
    name = "precision"
    if precision is None:
        name, precision = "jax_default_matmul_precision", jax.config.jax_default_matmul_precision
        if precision is None:
            return _DEFAULT
    if isinstance(precision, jax.lax.DotAlgorithm):
        return _precision_of_algorithm(precision)
    entries = precision if isinstance(precision, tuple | list) and len(precision) == 2 else (precision,)
    known = [one for one in map(_find_precision, entries) if one is not None]
    if len(known) < len(entries):
        raise ValueError(
            f"{name} must be None, a jax.lax.Precision, a pair of them, a jax.lax.DotAlgorithm or one of "
            f"{sorted(_PRECISIONS)}, got {precision!r}."
        )
    return max(known, key=lambda one: one.value)


def _find_precision(precision: object) -> jax.lax.Precision | None:
    if isinstance(precision, jax.lax.Precision):
        return precision
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    return _PRECISIONS.get(precision) if isinstance(precision, str) else None


def _precision_of_algorithm(algorithm: jax.lax.DotAlgorithm) -> jax.lax.Precision:
    """The precision of an algorithm, by the width of its factors and the number of passes that multiply their parts."""
    widest = max(jnp.dtype(kind).itemsize for kind in (algorithm.lhs_precision_type, algorithm.rhs_precision_type))
    passes = algorithm.num_primitive_operations
    if widest > 2 or passes > 3:
        return _HIGHEST
    return _HIGH if passes > 1 else _DEFAULT


def dtype_names(dtypes: Collection[DTypeLike]) -> str:
    """Names of dtypes for a message."""
    return ", ".join(jnp.dtype(dtype).name for dtype in dtypes)


def check(condition: object, message: str) -> None:
    """Raises ValueError with the message where the condition does not hold."""
    if not condition:
        raise ValueError(message)


def check_keywords(given: Collection[str], kind: type) -> None:
    """Raises TypeError if a keyword argument is none of those that `kind`, a TypedDict, has."""
    if unknown := sorted(set(given) - kind.__annotations__.keys()):
        raise TypeError(f"{unknown[0]} is an unexpected keyword argument, not one of {[*kind.__annotations__]}.")


def check_one_of(name: str, value: object, choices: Collection[str]) -> None:
    """Raises ValueError unless the value is one of several names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}.")


def check_instance(name: str, value: object, kind: Any, expected: str) -> None:
    """Raises TypeError unless the value is an instance of a class, or of one of several."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {_kind(value)}.")


def check_integers(name: str, array: Shaped | np.ndarray) -> None:
    """Raises TypeError unless an array is of integers."""
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer array, got {array.dtype}.")


def check_floats(name: str, array: Shaped) -> None:
    """Raises TypeError unless an array is of floats."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be a float array, got {array.dtype}.")


def check_reals(name: str, array: Shaped) -> None:
    """Raises TypeError unless an array is of bools, integers or floats."""
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
        raise TypeError(f"{name} must be an array of real numbers, got {array.dtype}.")


def check_rank(name: str, array: HasShape, axes: str) -> None:
    """Raises ValueError unless an array has as many axes as `axes` lists, such as "[T, k]" or "[H, E] or [E, H]"."""
    rank = axes.partition("]")[0].count(",") + 1
    if len(array.shape) != rank:
        raise ValueError(f"{name} must be {axes}, {rank}-dimensional, got {list(array.shape)}.")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
