"""A barrier that orders computations, but does not compute values that turn out to be unused."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.interpreters import partial_eval as pe

type Tangent = jax.Array | ad.Zero

_barrier = Primitive("jgg_barrier")
_barrier.multiple_results = True


def barrier[Values](values: Values) -> Values:
    """Returns a pytree of arrays unchanged; whatever uses a result is computed after all arrays whose results are used.

    It is `jax.lax.optimization_barrier`, except that an array whose result nothing uses is left out. JAX's barrier
    computes all operands as soon as one result is used. JAX drops dead code when it lowers a program; `jax.jit` with
    `keep_unused=True` drops none, not even here.

    So a rule for gradients may order the products of all gradients without knowing which of them are asked for. It
    could not know: `custom_vjp` with `symbolic_zeros` tells the forward rule, but JAX may call the backward rule with
    the residuals' tree of another trace of the same forward rule, where other gradients were asked for.
    """
    leaves, structure = jax.tree.flatten(values)
    return jax.tree.unflatten(structure, _barrier.bind(*leaves))


def _compute(*arrays: jax.Array) -> list[jax.Array]:
    return list(jax.lax.optimization_barrier(arrays))


def _differentiate(
    arrays: Sequence[jax.Array], tangents: Sequence[Tangent]
) -> tuple[Sequence[jax.Array], list[Tangent]]:
    return _barrier.bind(*arrays), _of_nonzero(tangents)


def _transpose(cotangents: Sequence[Tangent], *_: object) -> list[Tangent]:
    return _of_nonzero(cotangents)


def _of_nonzero(tangents: Sequence[Tangent]) -> list[Tangent]:
    """Puts the tangents behind a barrier, except symbolic zeros."""
    is_zero = [type(tangent) is ad.Zero for tangent in tangents]
    results = iter(_barrier.bind(*(each for each, zero in zip(tangents, is_zero, strict=True) if not zero)))
    return [each if zero else next(results) for each, zero in zip(tangents, is_zero, strict=True)]


def _batch(arrays: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[Sequence[jax.Array], Sequence[int | None]]:
    return _barrier.bind(*arrays), axes


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """The rule for dead code: which operands are still used, and the equation of them alone."""
    equation = rest[-1]  # JAX 0.12 gives something else before it
    if not any(used):
        return list(used), None
    operands, results = (
        [variable for variable, is_used in zip(variables, used, strict=True) if is_used]
        for variables in (equation.invars, equation.outvars)
    )
    return list(used), equation.replace(invars=operands, outvars=results)


_barrier.def_abstract_eval(lambda *types: list(types))
_barrier.def_impl(lambda *arrays: xla.apply_primitive(_barrier, *arrays))
mlir.register_lowering(_barrier, mlir.lower_fun(_compute, multiple_results=True))
ad.primitive_jvps[_barrier] = _differentiate
ad.primitive_transposes[_barrier] = _transpose
batching.primitive_batchers[_barrier] = _batch
pe.dce_rules[_barrier] = _drop_unused
