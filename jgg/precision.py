"""How operands are multiplied: whatever `jax.lax.dot` takes as precision, as one of the three that kernels have."""

import jax
import jax.numpy as jnp

_DEFAULT, _HIGH, _HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST

# Each name as the first of the three that keeps as many bits of the factors. On a GPU these are TF32 with 11, three
# passes of TF32 with about 21, and float32 with 24; float16 has 11, bfloat16 8, three passes of it about 16, six 24.
# Operands are no wider than float32, so that float64 counts as that.
_NAMED = {
    **dict.fromkeys(("default", "fastest", "bfloat16", "tensorfloat32"), _DEFAULT),
    **dict.fromkeys(("high", "bfloat16_3x"), _HIGH),
    **dict.fromkeys(("highest", "float32"), _HIGHEST),
    # of jax.lax.DotAlgorithmPreset all but those that lax.dot takes for float8 alone
    **dict.fromkeys(("DEFAULT", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16"), _DEFAULT),
    **dict.fromkeys(("BF16_BF16_F32", "TF32_TF32_F32"), _DEFAULT),
    **dict.fromkeys(("BF16_BF16_F32_X3", "TF32_TF32_F32_X3"), _HIGH),
    **dict.fromkeys(("BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32", "F64_F64_F64"), _HIGHEST),
}


def canonical_precision(precision) -> jax.lax.Precision:
    """What `jax.lax.dot` would take from `precision`, or from `jax_default_matmul_precision` where it is None.

    A pair, one entry for each operand, counts as its more precise entry.

    Raises: ValueError: it is none of what `jax.lax.dot` takes for float32, float16 and bfloat16.
    """
    if precision is None:
        default = jax.config.jax_default_matmul_precision
        return _DEFAULT if default is None else _canonical("jax_default_matmul_precision", default)
    return _canonical("precision", precision)


def _canonical(name, precision):
    if isinstance(precision, jax.lax.DotAlgorithm):
        return _of_algorithm(precision)
    entries = precision if isinstance(precision, tuple | list) and len(precision) == 2 else (precision,)
    known = [one for one in map(_find, entries) if one is not None]
    if len(known) < len(entries):
        raise ValueError(
            f"{name} must be None, a jax.lax.Precision, a pair of them, a jax.lax.DotAlgorithm or one of "
            f"{sorted(_NAMED)}, got {precision!r}."
        )
    return max(known, key=lambda one: one.value)


def _find(precision):
    if isinstance(precision, jax.lax.Precision):
        return precision
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    return _NAMED.get(precision) if isinstance(precision, str) else None


def _of_algorithm(algorithm):
    """By the width of the factors and in how many passes their parts are multiplied."""
    widest = max(jnp.dtype(kind).itemsize for kind in (algorithm.lhs_precision_type, algorithm.rhs_precision_type))
    passes = algorithm.num_primitive_operations
    if widest > 2 or passes > 3:
        return _HIGHEST
    return _HIGH if passes > 1 else _DEFAULT
