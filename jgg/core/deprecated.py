"""Ways to call a function that still work in 0.2, with a warning that says how to write it."""

import functools
import warnings
from collections.abc import Callable


def positions_deprecated[**P, R](*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function of two arrays and of keywords, so that some keywords may still be passed by position.

    Args:
      names: keywords that may follow the two arrays by position, in this order.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        untyped: Callable[..., R] = function

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            given = dict(zip(names, args[2:], strict=False))
            if not given or len(args) > 2 + len(names) or not kwargs.keys().isdisjoint(given):
                return function(*args, **kwargs)  # raises TypeError if the arguments are wrong
            named = ", ".join(f"{name}=..." for name in given)
            warnings.warn(
                f"jgg.{function.__name__} will take only its two arrays by position; name what follows: {named}",
                DeprecationWarning,
                stacklevel=2,
            )
            return untyped(*args[:2], **given, **kwargs)

        return call

    return decorate
