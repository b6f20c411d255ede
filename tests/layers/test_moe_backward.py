"""What the expert MLP keeps for its backward pass, under which names, and what frozen arrays leave out of it."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them

import jgg
from tests.support.closeness import assert_close
from tests.support.moe_oracle import DATA, make
from tests.support.moe_runs import forward, indices_of

SMALL = {"tokens": 64, "features": 32, "hidden": 16, "experts": 4, "topk": 2}


def loss_of(dtype=jnp.float32, policy=None, residual_names=None, **sizes):
    floats, chosen, _ = make(**sizes)
    arrays = {name: jnp.asarray(a, dtype) for name, a in floats.items() if a is not None}
    indices = indices_of(jnp.asarray(chosen), len(floats["w_down"]))

    def loss(arrays):
        y = forward(arrays, indices, residual_names=residual_names)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return (loss if policy is None else jax.checkpoint(loss, policy=policy)), arrays


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_kept_for_the_backward_pass(dtype):
    """Measured in bytes, the weights and what is constant aside."""
    function, arrays = loss_of(dtype, tokens=256, features=64, hidden=48, experts=8, topk=4)
    kept = [
        aval
        for aval, source in saved_residuals(function, arrays)
        if not any(name in source for name in ("w_gate_up", "w_down", "literal"))
    ]
    total = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept)
    rows, itemsize = 256 * 4, jnp.dtype(dtype).itemsize
    x, pre_activation, y = 256 * 64 * itemsize, rows * 2 * 48 * itemsize, 256 * 64 * 4
    assert total >= x + pre_activation  # else the measure misses what must be there
    assert total <= x + pre_activation + 32 * rows + y, kept  # y: of this test's own square


@functools.cache
def gradients_that_keep_everything():
    function, arrays = loss_of(**SMALL)
    return jax.jit(jax.grad(function))(arrays)


OWN = {"pre_activation": "mlp"}


@pytest.mark.parametrize(
    ("own_names", "saved", "is_kept"),
    [
        (None, (), False),
        (None, ("jgg_x",), False),
        (None, ("jgg_x", "jgg_pre_activation"), True),
        (OWN, ("jgg_pre_activation",), False),
        (OWN, ("mlp",), True),
    ],
)
def test_policies_know_the_residuals_by_name(own_names, saved, is_kept):
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    function, arrays = loss_of(policy=policy, residual_names=own_names, **SMALL)
    shapes = [aval.shape for aval, source in saved_residuals(function, arrays) if "argument" not in source]
    assert ((128, 32) in shapes) == is_kept
    if is_kept or not saved:
        assert_close(jax.jit(jax.grad(function))(arrays), gradients_that_keep_everything())


@pytest.mark.parametrize(
    ("quantization", "biased"), [(None, False), (None, True), (jgg.Fp8(), False), (jgg.Fp8(keeps_weights=True), True)]
)
def test_frozen_arrays_leave_no_product(biased, quantization, launched):
    """In no program of a GPU, nor of a CPU before XLA sees it, is a gradient that nobody asked for."""
    floats, chosen, _ = make(biased=biased, tokens=64, features=32, hidden=48, experts=4)
    arrays = {name: jnp.asarray(a, jnp.bfloat16) for name, a in floats.items() if a is not None}
    indices = indices_of(jnp.asarray(chosen), 4)

    def traced(trained):
        @jax.jit
        @jax.grad
        def gradient(some, others):
            y = forward(some | others, indices, quantization=quantization)
            return jnp.sum(y.astype(jnp.float32))

        some = {name: arrays[name] for name in (*trained, "topk_weights")}
        return gradient.trace(some, {name: array for name, array in arrays.items() if name not in some})

    def kernels(trained):
        launched.clear()
        with jgg.target(89):
            traced(trained).lower(lowering_platforms=("cuda",))
        return collections.Counter(name for name, _ in launched)

    everything = kernels(("x", "w_gate_up", "w_down"))
    for trained in (), ("w_gate_up",), ("x", "w_down"), ("x", "w_gate_up"):
        missing = everything - kernels(trained)
        assert missing["dw_kernel"] == sum(name not in trained for name in ("w_gate_up", "w_down")), trained
        of_dx = "dx_kernel" if quantization is None else "forward_kernel"
        assert missing[of_dx] == ("x" not in trained), trained
        text = traced(trained).lower(lowering_platforms=("cpu",)).as_text(debug_info=True)
        products = set(re.findall(r"jgg\.dw\[[^]]*", text))
        assert len(products) == sum(name.startswith("w_") for name in trained), trained


@pytest.mark.parametrize("quantization", [None, pytest.param(jgg.Fp8(), id="fp8", marks=pytest.mark.sweep)])
def test_gradients_beside_frozen_arrays(quantization):
    """Are those where nothing is frozen; of biases and of the router too."""
    floats, chosen, dy = make(biased=True)
    arrays = {name: jnp.asarray(array) for name, array in floats.items()}
    indices = indices_of(jnp.asarray(chosen), DATA["experts"])

    @jax.jit
    @jax.grad
    def gradient(some, others):
        return jnp.sum(forward(some | others, indices, quantization=quantization) * dy)

    want = gradient(arrays, {})
    for frozen in ({"x", "w_gate_up"}, {"w_down"}):
        some = {name: array for name, array in arrays.items() if name not in frozen}
        got = gradient(some, {name: arrays[name] for name in frozen})
        for name, array in got.items():
            np.testing.assert_allclose(array, want[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} with {frozen} frozen")
