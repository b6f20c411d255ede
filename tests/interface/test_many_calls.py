"""Many kinds of calls in one process, in random order: what was traced before changes nothing."""

import random

import jax
import jax.numpy as jnp
import pytest

import jgg
from tests.support.transforms import NAMES, WITH_EVERYTHING, batch_of

COUNT = 40
BATCH = 3
TRANSFORMS = {
    "vmap": lambda one, batch, argnums: batch,
    "grad-of-vmap": lambda one, batch, argnums: jax.grad(total(batch), argnums),
    "vmap-of-grad": lambda one, batch, argnums: one.mapped(jax.grad(total(one), argnums)),
    "jit-inside": lambda one, batch, argnums: jax.grad(total(jax.jit(batch)), argnums),
    "checkpoint": lambda one, batch, argnums: jax.grad(total(jax.checkpoint(batch)), argnums),
    "vjp": lambda one, batch, argnums: lambda *arrays: jax.vjp(total(batch), *arrays)[1](jnp.float32(1)),
    "grad-alone": lambda one, batch, argnums: lambda *a: jax.grad(total(one), argnums)(*one.first(a)),
    "value-alone": lambda one, batch, argnums: lambda *arrays: one(*one.first(arrays)),
    "in-a-loop": lambda one, batch, argnums: (
        lambda *arrays: jax.lax.map(lambda _: jax.grad(total(batch), argnums)(*arrays), jnp.arange(2))
    ),
}


def total(function):
    return lambda *arrays: jnp.sum(jnp.sin(function(*arrays)))


class One:
    """A product of one element of a batch as a function of x, w, topk_weights and bias; some of these are batched."""

    def __init__(self, implementation, batched, arrays):
        self.axes = [0 if name in batched else None for name in NAMES]
        self.options = {name: arrays[name][0] for name in ("group_sizes", "gather_indices")}
        self.options |= WITH_EVERYTHING.options | {"implementation": implementation}

    def __call__(self, x, w, topk_weights, bias):
        return jgg.grouped_gemm(x, w, topk_weights=topk_weights, bias=bias, **self.options)

    def mapped(self, function):
        return jax.vmap(function, self.axes)

    def first(self, arrays):
        return [a if axis is None else a[0] for a, axis in zip(arrays, self.axes, strict=True)]


@pytest.mark.parametrize("seed", [0])
def test_in_any_order(seed):
    """Traced, not run: that is where a rule of differentiation was missing after hundreds of other calls."""
    rng = random.Random(seed)
    arrays = batch_of(WITH_EVERYTHING, BATCH)
    for _ in range(COUNT):
        batched = [name for name in NAMES if rng.random() < 0.6] or ["x"]
        argnums = tuple(sorted(rng.sample(range(len(NAMES)), rng.randint(1, len(NAMES)))))
        transform, implementation = rng.choice(list(TRANSFORMS)), rng.choice([None, None, "xla"])
        one = One(implementation, batched, arrays)
        function = TRANSFORMS[transform](one, one.mapped(one), argnums)
        if rng.random() < 0.3:
            function = jax.jit(function)
        arguments = [arrays[name] if name in batched else arrays[name][0] for name in NAMES]
        results = jax.eval_shape(function, *arguments)
        where = f"{transform} {implementation} {batched} {argnums}"
        if transform in ("grad-of-vmap", "jit-inside", "checkpoint"):
            assert [r.shape for r in results] == [arguments[i].shape for i in argnums], where
        assert all(r.dtype == jnp.float32 for r in jax.tree.leaves(results)), where
