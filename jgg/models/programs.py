"""`Program`: a function that is compiled, with other options where it is a program of its own."""

import functools
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.core import Tracer

# Where memory is scarce, XLA would compute norms and products of a token two or three times, which frees nothing that
# counts: caches and weights stay.
_ALONE = {"xla_disable_hlo_passes": "rematerialization"}


class JitOptions(TypedDict, total=False):
    """Arguments of `jax.jit`."""

    static_argnums: int
    static_argnames: str
    donate_argnames: str


class Program[**Parameters, Result]:
    """What `jax.jit` makes of a function, with compiler options unless it is a part of another program.

    JAX takes compiler options only from the outermost `jax.jit`.

    Args:
      function: the function.
      options: arguments of `jax.jit`.
    """

    def __init__(self, function: Callable[Parameters, Result], **options: Unpack[JitOptions]) -> None:
        functools.update_wrapper(self, function)
        self._alone = jax.jit(function, compiler_options=_ALONE, **options)
        self._within = jax.jit(function, **options)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        """Calls the function."""
        is_traced = isinstance(jnp.zeros(()), Tracer)
        result: Result = (self._within if is_traced else self._alone)(*args, **kwargs)
        return result

    def trace(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> jax.stages.Traced:
        """What `jax.jit` traces."""
        return self._alone.trace(*args, **kwargs)

    def num_compiled(self) -> int:
        """How many programs have been compiled."""
        programs: tuple[Any, ...] = self._alone, self._within
        return sum(each._cache_size() for each in programs)


def program[Result](**options: Unpack[JitOptions]) -> Callable[[Callable[..., Result]], Program[..., Result]]:
    """Makes a `Program` of a function, with arguments of `jax.jit`."""
    return lambda function: Program(function, **options)
