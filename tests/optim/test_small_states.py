"""Optimizers with moments in 8 bits: what stays as it is, how close they are to float32, and that they train."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg.optim
from jgg.optim import EightBitState, eight_bits, states_in_8_bits
from jgg.train import Trainer, TrainingError, float32_masters
from jgg.train.planning import num_bytes
from tests.support import processes

pytestmark = pytest.mark.usefixtures("optax_promotion")
SHAPES = {"moe": {"w_down": (2, 3, 32, 64)}, "w_o": (64, 160), "b_q": (20,), "scale": (), "none": (0, 8)}


def random_like(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def params_of(dtype="float32"):
    is_shape = lambda value: isinstance(value, tuple)  # noqa: E731
    return random_like(jax.tree.map(lambda shape: jnp.zeros(shape, dtype), SHAPES, is_leaf=is_shape), 100)


def run(optimizer, params, steps=5, start=0, state=None):
    state = optimizer.init(params) if state is None else state
    update = jax.jit(optimizer.update, donate_argnums=1)
    for step in range(start, start + steps):
        updates, state = update(random_like(params, step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def small_arrays(state):
    """Codes and exponents by path."""
    (found,) = (leaf for leaf in jax.tree.leaves(state, is_leaf=is_small) if is_small(leaf))
    codes = dict(jax.tree.leaves_with_path(found.inner))
    return {
        jax.tree_util.keystr(path): (codes[path], exponents)
        for path, exponents in jax.tree.leaves_with_path(found.exponents)
    }


def is_small(tree):
    return isinstance(tree, EightBitState)


def moment_of(state, path):
    code = eight_bits.Code.POSITIVE if ".nu" in path else eight_bits.Code.FLOAT
    return eight_bits.decoded(*small_arrays(state)[path], code)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
    "bfloat16 moments": lambda: optax.adamw(0.01, mu_dtype="bfloat16"),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)),
    "muon": lambda: jgg.optim.muon(0.01, consistent_rms=0.2, mu_dtype="bfloat16"),
    "partition": lambda: optax.partition(
        {"w": optax.adam(0.01), "": optax.sgd(0.01, 0.9)}, {name: "w" if name == "w_o" else "" for name in SHAPES}
    ),
    "two batches": lambda: optax.MultiSteps(optax.adam(0.01), 2),
    "finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "a rate that may change": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
}
NUM_SMALL = dict.fromkeys(OPTIMIZERS, 4) | {"muon": 2, "partition": 3}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_close_to_those_of_float32(name):
    wrapped, plain = states_in_8_bits(OPTIMIZERS[name]()), OPTIMIZERS[name]()
    params = params_of()
    first = wrapped.init(params)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), first) == jax.tree.map(
        lambda a: (a.shape, a.dtype), jax.eval_shape(wrapped.init, params)
    )
    (got, state), (wanted, _) = run(wrapped, params), run(plain, params)
    found = small_arrays(state)
    assert len(found) == NUM_SMALL[name]
    for codes, exponents in found.values():
        assert codes.dtype == exponents.dtype == jnp.uint8
        assert exponents.shape == {(2, 3, 32, 64): (2, 3, 32, 8), (64, 160): (64, 8)}[codes.shape]
    for param, own, other in zip(*map(jax.tree.leaves, (params, got, wanted)), strict=True):
        moved = np.asarray(other - param)
        error = np.linalg.norm(own - other)
        assert error <= 0.15 * np.linalg.norm(moved) and (error > 0) == (param.size > 4096)


@pytest.mark.parametrize("masters", [False, True])
def test_parameters_of_16_bits(masters):
    wrap = float32_masters if masters else lambda optimizer: optimizer
    params = params_of("bfloat16")
    got, state = run(wrap(states_in_8_bits(optax.adamw(0.01))), params)
    wanted, _ = run(wrap(optax.adamw(0.01)), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("bfloat16")}
    assert len(small_arrays(state)) == 4
    error, moved = (np.linalg.norm((got["w_o"] - other["w_o"]).astype(jnp.float32)) for other in (wanted, params))
    assert 0 < error < 0.2 * moved
    _, inside = run(states_in_8_bits(float32_masters(optax.adamw(0.01))), params)
    assert inside.inner.masters["w_o"].dtype == jnp.float32 and len(small_arrays(inside)) == 4


def test_bytes_of_states():
    params = {"w": jax.ShapeDtypeStruct((4, 8, 256, 2048), "float32")}
    for optimizer, most in ((optax.adamw(0.1), 2.02), (optax.sgd(0.1, 0.9), 1.01)):
        state = jax.eval_shape(states_in_8_bits(optimizer).init, params)
        assert num_bytes(state) / params["w"].size <= most


def moments(rounded_to_nearest, monkeypatch, steps=2000):
    """The mean root of the second moment over 1, which is where it starts, when gradients become 2."""
    if rounded_to_nearest:
        monkeypatch.setattr(eight_bits, "_noise", lambda shape, salt: jnp.full(shape, 2**31, jnp.uint32))
    optimizer = states_in_8_bits(optax.scale_by_rms(0.999, initial_scale=1.0))
    params = {"w": jnp.zeros((64, 64))}
    gradients = jax.tree.map(lambda p: jnp.full_like(p, 2.0), params)

    @jax.jit
    def after(state):
        return jax.lax.fori_loop(0, steps, lambda _, state: optimizer.update(gradients, state)[1], state)

    return float(jnp.mean(moment_of(after(optimizer.init(params)), ".nu['w']")))


def test_small_changes_of_a_second_moment_add_up(monkeypatch):
    """A thousandth of the way per step, which rounding to nearest leaves out."""
    assert moments(False, monkeypatch) == pytest.approx(4 - 3 * 0.999**2000, rel=0.02)
    assert moments(True, monkeypatch) == 1


def test_no_element_is_moved_far():
    """Gradients of all magnitudes in one block: second moments that become 0 would move elements without a bound."""
    rng = np.random.default_rng(0)
    scale = np.exp2(-rng.uniform(0, 50, (64, 128))).astype(np.float32)
    params = {"w": jnp.zeros((64, 128))}
    largest = {}
    for name, optimizer in (("float32", optax.adam(1.0)), ("8 bits", states_in_8_bits(optax.adam(1.0)))):
        state, update, found = optimizer.init(params), jax.jit(optimizer.update), []
        for step in range(300):
            updates, state = update({"w": scale * np.random.default_rng(step).normal(size=scale.shape)}, state)
            found.append(np.abs(updates["w"]).max())
        largest[name] = np.max(found)
    assert largest["8 bits"] < 3 * largest["float32"]


def test_a_layer_of_the_state_is_a_slice():
    """Layers that are updated alone have the bits of the whole stack."""
    params = {"w": params_of()["moe"]["w_down"], "b": jnp.ones((2, 30))}
    optimizer = states_in_8_bits(optax.adamw(0.01))
    layers = jax.vmap(optimizer.init)(params)
    assert layers.exponents[0].mu["w"].shape == (2, 3, 32, 8)
    wanted, state = run(optimizer, params)
    for layer in range(2):
        of_layer = functools.partial(jax.tree.map, lambda a, layer=layer: a[layer])
        own, own_state = of_layer(params), of_layer(layers)
        for step in range(5):
            updates, own_state = optimizer.update(of_layer(random_like(params, step)), own_state, own)
            own = optax.apply_updates(own, updates)
        np.testing.assert_allclose(own["w"], wanted["w"][layer], rtol=1e-5, atol=1e-6)
        same = own_state.inner[0].nu["w"] == state.inner[0].nu["w"][layer]
        assert np.mean(same) > 0.999


class Layer(nnx.Module):
    """A matrix, with an adapter of another type."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.w = nnx.Param(rngs.normal((64, 128)) * 0.1)
        self.a, self.b = (nnx.LoRAParam(rngs.normal(shape) * 0.1) for shape in ((64, 64), (64, 128)))

    def __call__(self, x):
        return x @ self.w[...] + x @ self.a[...] @ self.b[...]


def loss(model, batch):
    value = jnp.mean(jnp.square(model(batch) - jnp.roll(jnp.tile(batch, 2), 1, axis=-1)))
    return value, {"loss": value}


def batch_of(step):
    return np.random.default_rng(step).normal(size=(3, 8, 64)).astype(np.float32)


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam])
def test_trainer_learns_and_goes_on_to_the_same_bits(wrt, tmp_path):
    make = lambda: states_in_8_bits(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)))  # noqa: E731
    whole, stopped, going_on, plain = (
        Trainer(Layer(), optimizer, loss, wrt=wrt, accumulate=True)
        for optimizer in (make(), make(), make(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)))
    )
    options = {"checkpoints": tmp_path / "run", "save_every": 20, "every": (40,)}
    (wanted,), (of_float32,) = (each.fit(batch_of, 40, every=(40,)) for each in (whole, plain))
    list(stopped.fit(batch_of, 20, **options))
    (got,) = going_on.fit(batch_of, 40, **options)
    np.testing.assert_array_equal(got.metrics["loss"], wanted.metrics["loss"][20:])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(going_on.model), nnx.state(whole.model))
    assert len(small_arrays(going_on._opt_state)) == {nnx.Param: 6, nnx.LoRAParam: 4}[wrt]
    losses = wanted.metrics["loss"]
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, of_float32.metrics["loss"], rtol=0.02)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_stops_training(bad):
    trainer = Trainer(Layer(), states_in_8_bits(optax.adamw(0.01)), loss)
    with pytest.raises(TrainingError, match="step 2: the loss or a trained parameter is"):
        list(trainer.fit(lambda step: batch_of(step) * (bad if step == 2 else 1), 4, every=(1,)))


def test_an_update_that_is_left_out_leaves_the_state():
    optimizer = states_in_8_bits(optax.apply_if_finite(optax.adamw(0.1), 5))
    params = params_of()
    params, state = run(optimizer, params, 2)
    gradients = random_like(params, 2)
    gradients["w_o"] = gradients["w_o"].at[3, 2].set(np.nan)
    _, after = jax.jit(optimizer.update)(gradients, state, params)
    for path in small_arrays(state):
        np.testing.assert_array_equal(moment_of(after, path), moment_of(state, path))


def test_nnx_optimizer():
    model = Layer()
    optimizer = nnx.Optimizer(model, states_in_8_bits(optax.adamw(0.01)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        value, gradients = nnx.value_and_grad(lambda model: loss(model, batch)[0])(model)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, batch_of(number))) for number in range(40)]
    assert losses[-1] < 0.8 * losses[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(optimizer))} >= {jnp.dtype("uint8")}


def test_fields_by_other_names():
    params = params_of()
    optimizer = states_in_8_bits(optax.adagrad(0.1), non_negative=("sum_of_squares",))
    got, state = run(optimizer, params)
    wanted, _ = run(optax.adagrad(0.1), params)
    assert len(small_arrays(state)) == 2
    np.testing.assert_allclose(got["w_o"], wanted["w_o"], atol=0.02)


@pytest.mark.thorough
def test_eight_devices_make_the_same_updates():
    assert processes.run_program("run_sharded_optim", "states", timeout=300).splitlines()[-1] == "all right"


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer of optax"):
        states_in_8_bits(optax.adamw)
    for name in ("signed", "non_negative"):
        for fields in ("mu", ("mu", 3), 3):
            with pytest.raises(TypeError, match=rf'{name} must be a collection of names .*\("mu",\), got'):
                states_in_8_bits(optax.adamw(0.1), **{name: fields})
    with pytest.raises(ValueError, match=r"signed and non_negative must be of different fields, got mu in both"):
        states_in_8_bits(optax.adamw(0.1), non_negative=("nu", "mu"))
    with pytest.raises(ValueError, match=r"optimizer must have a state with a field mu or trace or nu, got none"):
        states_in_8_bits(optax.sgd(0.1)).init(params_of())
    with pytest.raises(ValueError, match=r"optimizer must not take a difference of moments, got a centered one"):
        states_in_8_bits(optax.chain(optax.rmsprop(0.1, centered=True))).init(params_of())
