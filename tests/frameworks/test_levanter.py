"""Levanter's experts and haliax's grouped GEMM by jgg: values and gradients against their own."""

import importlib
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.integrations.levanter as ours
from tests.support.closeness import assert_close
from tests.support.documents import code_of, run_code
from tests.support.frameworks import framework

pytestmark = framework("haliax", "levanter")


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def inputs(tokens, features, hidden, experts, topk):
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, features))
    chosen = jax.random.randint(keys[1], (tokens, topk), 0, experts, dtype=jnp.int32)
    weights = jax.nn.softmax(jax.random.normal(keys[2], (tokens, topk)))
    w_gate_up = jax.random.normal(keys[3], (experts, features, 2 * hidden)) / features**0.5
    return chosen, [x, weights, w_gate_up, jax.random.normal(keys[4], (experts, hidden, features)) / hidden**0.5]


def gradients(function, arrays):
    def loss(*arrays):
        y = function(*arrays)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(arrays)))))(*arrays)


def install(monkeypatch):
    """Puts jgg into haliax and Levanter until the test ends, with the code of docs/integrations.md."""
    from levanter.grug import grug_moe  # noqa: F401
    from levanter.grug._moe import local

    theirs = importlib.import_module("haliax.nn.ragged_dot").ragged_dot
    for module in list(sys.modules.values()):
        if module.__name__.startswith(("haliax.", "levanter.")) and vars(module).get("ragged_dot") is theirs:
            monkeypatch.setattr(module, "ragged_dot", theirs)  # to be put back after the test
    monkeypatch.setitem(local._MOE_LOCAL_FNS, "scatter", local._MOE_LOCAL_FNS["scatter"])
    (code,) = code_of("integrations.md", "Levanter and haliax")
    run_code(code)


@pytest.mark.parametrize("sizes", [[5, 0, 7, 2], [0, 0, 0, 0], [14, 0, 0, 0]])
def test_ragged_dot(sizes):
    theirs = importlib.import_module("haliax.nn.ragged_dot").ragged_dot
    arrays = [jax.random.normal(jax.random.key(size), shape) for size, shape in ((14, (14, 24)), (4, (4, 24, 40)))]
    sizes = jnp.array(sizes)
    got = gradients(lambda lhs, rhs: ours.ragged_dot(lhs, rhs, sizes), arrays)
    want = gradients(lambda lhs, rhs: theirs(lhs, rhs, sizes), arrays)
    assert_close(got, want, 2e-4)


def test_haliax_layer(monkeypatch):
    import haliax as hax
    from haliax.nn import MoELinear

    rows, experts, into, out = hax.make_axes(rows=14, experts=4, into=24, out=40)
    layer = MoELinear.init(experts, into, out, key=jax.random.key(0), use_bias=False, use_gmm=True)
    x, sizes = hax.random.normal(jax.random.key(1), (rows, into)), hax.named(jnp.array([5, 0, 7, 2]), experts)

    def result():
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=kinds, devices=jax.devices()[:1])
        with jax.set_mesh(mesh), hax.axis_mapping({"rows": "data"}):
            return layer(x, sizes).array

    want = result()
    install(monkeypatch)
    monkeypatch.setattr(jax.lax, "ragged_dot_general", None)  # which would be theirs
    assert_close(result(), want, 2e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu2"])
@pytest.mark.parametrize("masked", [False, True])
def test_experts_of_one_device(activation, masked, monkeypatch):
    from levanter.grug import grug_moe
    from levanter.grug._moe import local
    from levanter.utils.activation import ActivationFunctionEnum

    chosen, arrays = inputs(tokens=32, features=16, hidden=24, experts=8, topk=2)
    valid = jnp.arange(32) % 3 > 0 if masked else None

    def function(x, weights, *ws):
        options = {"implementation": "scatter", "activation": ActivationFunctionEnum(activation)}
        return grug_moe.moe_mlp(x, chosen, weights, *ws, token_valid=valid, **options)

    want = gradients(function, arrays)
    install(monkeypatch)
    assert local._MOE_LOCAL_FNS["scatter"] is ours.moe_mlp_local
    got = gradients(function, arrays)
    assert_close(got, want, 2e-4)
    if masked:
        np.testing.assert_array_equal(got[1][0][~valid], 0)


def test_policies_of_levanter_find_the_residuals(monkeypatch):
    from jax._src.ad_checkpoint import saved_residuals
    from levanter.grug import grug_moe

    chosen, arrays = inputs(tokens=32, features=16, hidden=24, experts=8, topk=2)

    def layer(*arrays):
        x, weights, *ws = arrays
        y, _ = ours.moe_mlp_local(x, chosen, weights, jnp.ones(32, bool), *ws, activation_fn=jax.nn.silu, num_experts=8)
        return jnp.sum(jnp.sin(y))

    policy = jax.checkpoint_policies.save_only_these_names(*grug_moe.MOE_REMAT_SAVE_NAMES)
    saved = saved_residuals(jax.checkpoint(layer, policy=policy), *arrays)
    assert (64, 48) in [aval.shape for aval, source in saved if "argument" not in source]


@pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")
def test_a_ring_of_several_devices(monkeypatch):
    from levanter.grug import grug_moe

    kinds = (jax.sharding.AxisType.Explicit,) * 3
    mesh = jax.make_mesh((4, 2, 1), ("data", "expert", "model"), axis_types=kinds)
    chosen, arrays = inputs(tokens=128, features=32, hidden=64, experts=4, topk=2)

    def function(x, weights, *ws):
        x, weights, indices = (jax.sharding.reshard(a, jax.P(("data", "expert"))) for a in (x, weights, chosen))
        return grug_moe.moe_mlp(x, indices, weights, *ws, implementation="ring", capacity_factor=4.0)

    def loss(*arrays):
        return jnp.sum(jnp.square(function(*arrays)))

    with jax.set_mesh(mesh):
        gradient = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
        want = jax.jit(gradient)(*arrays)
        install(monkeypatch)
        jax.clear_caches()
        assert_close(jax.jit(gradient)(*arrays), want, 2e-4)
        with jgg.target(90):
            lowered = jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in lowered


def test_the_example_learns_as_with_levanter_alone(monkeypatch, capsys, caplog):
    from levanter_moe import main  # of examples

    main(["--steps", "21", "--experts", "levanter"])
    want = capsys.readouterr().out
    install(monkeypatch)
    monkeypatch.setattr(ours, "install", lambda: None)
    with caplog.at_level(logging.INFO, "jgg"):
        main(["--steps", "21"])
    assert "jgg computes the experts of Levanter by" in caplog.text
    assert capsys.readouterr().out == want
    losses = [float(line.split()[-1]) for line in want.splitlines()]
    assert len(losses) == 3 and losses[-1] < 0.1 * losses[0]
