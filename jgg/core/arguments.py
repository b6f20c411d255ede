"""What arguments must be, whatever function they are of: arrays, whole numbers, numbers, flags, precisions.

Each function returns the argument as what it counts as, or raises a sentence with its name, what was expected and what
came. Options are static parameters of JAX programs, whose caches take 4.0 for 4 and True for 1: here they become plain
ints, floats and bools before anything is traced.
"""

import math
import numbers
import operator
from collections.abc import Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

Shaped = jax.Array | jax.ShapeDtypeStruct
_DEFAULT, _HIGH, _HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST

# Each name as the first of the three that keeps as many bits of the factors. On a GPU these are TF32 with 11, three
# passes of TF32 with about 21, and float32 with 24; float16 has 11, bfloat16 8, three passes of it about 16, six 24.
# Operands are no wider than float32, so that float64 counts as that.
_PRECISIONS = {
    **dict.fromkeys(("default", "fastest", "bfloat16", "tensorfloat32"), _DEFAULT),
    **dict.fromkeys(("high", "bfloat16_3x"), _HIGH),
    **dict.fromkeys(("highest", "float32"), _HIGHEST),
    # of jax.lax.DotAlgorithmPreset all but those that lax.dot takes for float8 alone
    **dict.fromkeys(("DEFAULT", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16"), _DEFAULT),
    **dict.fromkeys(("BF16_BF16_F32", "TF32_TF32_F32"), _DEFAULT),
    **dict.fromkeys(("BF16_BF16_F32_X3", "TF32_TF32_F32_X3"), _HIGH),
    **dict.fromkeys(("BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32", "F64_F64_F64"), _HIGHEST),
}


def as_array(name: str, value: object) -> jax.Array:
    """Arrays as they are; what `jnp.asarray` makes an array of numbers of, such as a list of them, as that array.

    Raises: TypeError: it makes none of it.
    """
    if isinstance(value, jax.Array):  # a traced one would be converted, which jax_debug_nans takes for a computation
        return value
    try:
        return jnp.asarray(cast(ArrayLike, value))
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array, got {_kind(value)}.") from None


def as_array_or_none(name: str, value: object) -> jax.Array | None:
    """`as_array` of what may be None."""
    return None if value is None else as_array(name, value)


def as_arrays(values: Mapping[str, object], may_be_none: Collection[str] = ()) -> dict[str, Any]:
    """`as_array` of each by its name; None only for those that may be."""
    return {
        name: None if value is None and name in may_be_none else as_array(name, value) for name, value in values.items()
    }


def as_int(name: str, value: Any, least: int | None = None, expected: str | None = None) -> int:
    """A whole number, Python's, NumPy's or an array's, of at least `least`; True is none.

    Args:
      expected: what the message says of it, where `least` is not all.

    Raises: TypeError: it is no whole number. ValueError: it is less.
    """
    wanted = {None: "an int", 1: "a positive int"}.get(least, f"an int of at least {least}")
    message = f"{name} must be {expected or wanted}, got {value!r}."
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(message) from None
    if isinstance(value, bool):
        raise TypeError(message)
    if least is not None and number < least:
        raise ValueError(message)
    return number


def as_flag(name: str, value: object) -> bool:
    """True or False, Python's or NumPy's.

    Raises: TypeError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def as_names(name: str, value: object, defaults: Mapping[str, str]) -> dict[str, str]:
    """The names given for some of `defaults`, and those of the rest; None gives none.

    Raises: TypeError: it is no dict of names. ValueError: it names something else.
    """
    given: Any = {} if value is None else value
    message = f"{name} must be None or a dict with names of {' or '.join(map(repr, defaults))}, got {value!r}."
    if not isinstance(given, Mapping) or not all(isinstance(part, str) for item in given.items() for part in item):
        raise TypeError(message)
    check(given.keys() <= defaults.keys(), message)
    return {**defaults, **given}


def as_finite(name: str, value: object) -> float:
    """A finite real number.

    Raises: TypeError: it is no number. ValueError: it is infinite or NaN.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def as_dtype(name: str, value: Any, choices: Collection[DTypeLike] | None = None) -> jnp.dtype:
    """One of several dtypes, or of all floats, given in any way that JAX takes.

    Raises: TypeError: it is none of them.
    """
    message = f"{name} must be {'a float dtype' if choices is None else f'one of {dtype_names(choices)}'}, got"
    if value is None or isinstance(value, jax.Array | np.ndarray):  # NumPy takes None for float64
        raise TypeError(f"{message} {_kind(value)}.")
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{message} {value!r}.") from None
    if not (jnp.issubdtype(dtype, jnp.floating) if choices is None else dtype in choices):
        raise TypeError(f"{message} {dtype}.")
    return dtype


def as_precision(precision: jax.lax.PrecisionLike) -> jax.lax.Precision:
    """What `jax.lax.dot` would take from `precision`, or from `jax_default_matmul_precision` where it is None.

    A pair, one entry for each operand, counts as its more precise entry.

    Raises: ValueError: it is none of what `jax.lax.dot` takes for float32, float16 and bfloat16.
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
    """By the width of the factors and in how many passes their parts are multiplied."""
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


def check_one_of(name: str, value: object, choices: Collection[str]) -> None:
    """Raises ValueError unless the value is one of several names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {tuple(choices)}, got {value!r}.")


def check_instance(name: str, value: object, kind: Any, expected: str) -> None:
    """Raises TypeError unless the value is an instance of a class, or of one of several."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {_kind(value)}.")


def check_integers(name: str, array: Shaped) -> None:
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


def check_rank(name: str, array: Any, axes: str) -> None:
    """Raises ValueError unless an array has the axes that are written like "[T, k]"; alternatives have as many."""
    rank = axes.partition("]")[0].count(",") + 1
    if len(array.shape) != rank:
        raise ValueError(f"{name} must be {axes}, {rank}-dimensional, got {list(array.shape)}.")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__
