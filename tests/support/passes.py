"""Runs a function forward and backward."""

import jax


def forward_and_backward(function):
    """A function of `dy` and of what `function` takes, to y and the gradient of sum(dy * y) in each of those."""

    def both(dy, *arrays):
        y, vjp = jax.vjp(function, *arrays)
        return y, *vjp(dy.astype(y.dtype))

    return both
