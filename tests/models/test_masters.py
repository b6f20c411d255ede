"""`jgg.train.float32_masters`: 16-bit parameters that follow float32 masters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jgg.train import Trainer, float32_masters, stochastic_rounding

pytestmark = pytest.mark.usefixtures("optax_promotion")
RNG = np.random.default_rng(7)
SMALL_RATE = 3e-4  # bfloat16 parameters near 1 lose all such steps


def params_of(dtype):
    return {"w": jnp.asarray(RNG.normal(size=(17, 5)), dtype), "offset": jnp.asarray(RNG.normal(size=3), jnp.float32)}


def gradients_at(step, params):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape) + 0.5, p.dtype), params)


def trained(optimizer, params, steps=20):
    """Parameters and state after some steps under jit, donated."""

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(params)
    for number in range(steps):
        params, state = step(params, state, gradients_at(number, params))
    return params, state


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rate", [SMALL_RATE, 0.1])
def test_it_is_the_optimizer_on_float32_parameters(dtype, rate):
    params = params_of(dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(3.0), optax.adamw(rate, weight_decay=0.1))
    got, state = trained(float32_masters(optimizer), params)

    # the same gradients, which are rounded to 16 bits before
    wanted, inner = jax.tree.map(lambda p: p.astype(jnp.float32), params), None
    inner = optimizer.init(wanted)
    for number in range(20):
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients_at(number, params))
        updates, inner = jax.jit(optimizer.update)(gradients, inner, wanted)
        wanted = optax.apply_updates(wanted, updates)
    np.testing.assert_allclose(state.masters["w"], wanted["w"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got["offset"], wanted["offset"], rtol=1e-6, atol=1e-7)
    assert isinstance(state.masters["offset"], optax.MaskedNode)
    assert got["w"].dtype == dtype
    np.testing.assert_array_equal(got["w"], state.masters["w"].astype(dtype))
    assert np.any(state.masters["w"] != got["w"].astype(jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} <= {jnp.dtype("float32"), jnp.dtype("int32")}
    if rate == SMALL_RATE and dtype == "bfloat16":
        alone, _ = trained(optimizer, params)
        moved, moved_alone = (np.mean(each["w"] != params["w"]) for each in (got, alone))
        assert moved_alone < 0.5 * moved  # alone, only small parameters move


def special(dtype):
    """Numbers of a dtype of all magnitudes, in pairs: before and after a step.

    Their differences are normal in float32, and float16's have the smallest numbers, which are subnormal.
    """
    info = jnp.finfo(dtype)
    powers = 2.0 ** np.arange(max(info.minexp - info.nmant, -110), info.maxexp - 2)
    values = np.concatenate([[0], powers, -powers, powers * 1.37, RNG.normal(size=301)])
    before, after = (grid.ravel() for grid in np.meshgrid(values, values.astype(np.float32) * np.float32(1.0003)))
    return jnp.asarray(before, dtype), jnp.asarray(after, jnp.float32)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 15), ("float16", 12)])
def test_parameters_are_their_masters_rounded(dtype, bits, jit):
    before, after = special(dtype)

    @jit
    def move(before, after):
        to_after = optax.stateless(lambda updates, params: after - params)
        optimizer = float32_masters(to_after)
        updates, state = optimizer.update(jnp.zeros_like(before), optimizer.init(before), before)
        return optax.apply_updates(before, updates), state.masters

    got, after = move(before, after)
    exact, before, got = (np.asarray(each.astype(dtype), np.float64) for each in (after, before, got))
    shrinks = (np.abs(exact) < 2.0**-bits * np.abs(before)) & (exact != 0)
    np.testing.assert_array_equal(got[~shrinks], exact[~shrinks])
    assert np.all(np.abs(got - exact)[shrinks] <= 2.0**-24 * np.abs(before)[shrinks])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f])
def test_parameters_that_are_set_become_the_masters(dtype, jit):
    """In the program of a step too, where XLA need not round; all others keep what they have in float32 alone."""
    params, optimizer = params_of(dtype), float32_masters(optax.sgd(SMALL_RATE))
    moved, state = trained(optimizer, params, steps=3)
    scale = jnp.ones((17, 5)).at[:9].set(0.3).at[3, 2].set(jnp.nan)

    @jit
    def set_and_step(params, state, gradients):
        params = params | {"w": (params["w"].astype(jnp.float32) * scale).astype(dtype)}
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    gradients = gradients_at(7, params)
    got, after = set_and_step(moved, state, gradients)
    before, own = (np.asarray(each, np.float32) for each in (moved["w"], state.masters["w"]))
    assert np.mean(own != before) > 0.9
    wanted = np.where(scale == 1, own, before * scale) - SMALL_RATE * np.asarray(gradients["w"], np.float32)
    np.testing.assert_allclose(after.masters["w"][9:], wanted[9:], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(after.masters["w"], wanted, rtol=float(jnp.finfo(dtype).eps), atol=1e-9)
    rounded = after.masters["w"].astype(dtype)
    np.testing.assert_array_equal(got["w"].astype(jnp.float32), rounded.astype(jnp.float32))


def test_parameters_that_are_set_between_gradients_of_a_step():
    """By an assignment, between two gradients that MultiSteps adds up."""
    model = Line()
    optimizer = nnx.Optimizer(model, float32_masters(optax.MultiSteps(optax.sgd(0.5), 2)), wrt=nnx.Param)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, gradients)
    model.w[...], model.offset[...] = jnp.asarray([4.0, 5.0, 6.0], jnp.bfloat16), jnp.float32(1.5)
    optimizer.update(model, gradients)
    np.testing.assert_array_equal(model.w[...].astype(jnp.float32), [3.5, 4.5, 5.5])
    np.testing.assert_array_equal(model.offset[...], 1.0)


def test_numbers_that_round_to_zero_add_up():
    """Of float16, and in both directions, though an update never gives a parameter -0."""
    params = {"w": jnp.zeros(2, jnp.float16)}
    got, state = params, (optimizer := float32_masters(optax.sgd(1e-8))).init(params)
    for _ in range(4):
        updates, state = optimizer.update({"w": jnp.asarray([1, -1], jnp.float16)}, state, got)
        got = optax.apply_updates(got, updates)
    np.testing.assert_allclose(state.masters["w"], [-4e-8, 4e-8], rtol=1e-6)
    np.testing.assert_array_equal(got["w"], state.masters["w"].astype("float16"))


def test_leaves_without_masters_and_extra_arguments():
    """None, what optax masks, integers, and an optimizer that takes the loss."""
    params = {"w": jnp.ones(3, jnp.bfloat16), "none": None, "frozen": optax.MaskedNode(), "count": jnp.arange(2)}
    by_loss = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        lambda gradients, state, params=None, *, value: (jax.tree.map(lambda g: -g * value, gradients), state),
    )
    optimizer = float32_masters(by_loss)
    state = optimizer.init(params)
    gradients = {"w": jnp.ones(3, jnp.bfloat16), "none": None, "frozen": optax.MaskedNode(), "count": jnp.ones(2, int)}
    updates, state = jax.jit(optimizer.update)(gradients, state, params, value=jnp.float32(2.0))
    assert updates["none"] is None and updates["frozen"] == optax.MaskedNode()
    np.testing.assert_array_equal(optax.apply_updates(params["w"], updates["w"]), -jnp.ones(3, jnp.bfloat16))
    assert isinstance(state.masters["count"], optax.MaskedNode)


@pytest.mark.parametrize(
    "convert", [lambda steps: steps, optax.MultiSteps.gradient_transformation], ids=["", "converted"]
)
def test_partition_and_multi_steps(convert):
    """Only "w" has masters, and they move at every second step."""
    params = params_of("bfloat16")
    own = float32_masters(convert(optax.MultiSteps(optax.sgd(0.1), 2)))
    optimizer = optax.partition({"w": own, "offset": optax.set_to_zero()}, {"w": "w", "offset": "offset"})
    once, _ = trained(optimizer, params, steps=1)
    jax.tree.map(np.testing.assert_array_equal, once, params)
    twice, _ = trained(optimizer, params, steps=2)
    mean = sum(gradients_at(step, params)["w"].astype(jnp.float32) for step in range(2)) / 2
    wanted = (params["w"].astype(jnp.float32) - 0.1 * mean).astype(jnp.bfloat16)
    np.testing.assert_array_equal(twice["w"], wanted)
    np.testing.assert_array_equal(twice["offset"], params["offset"])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_steps_of_gradients_that_are_not_finite_are_left_out(bad):
    params = params_of("bfloat16")
    optimizer = float32_masters(optax.apply_if_finite(optax.adamw(0.1), 5))
    want, state = trained(optimizer, params, steps=1)
    gradients = gradients_at(1, params)
    gradients["w"] = gradients["w"].at[3, 2].set(bad)
    updates, skipped = jax.jit(optimizer.update)(gradients, state, want)
    jax.tree.map(np.testing.assert_array_equal, optax.apply_updates(want, updates), want)
    jax.tree.map(np.testing.assert_array_equal, skipped.masters, state.masters)


class Line(nnx.Module):
    """x @ w + offset, in which w is bfloat16 and offset float32."""

    def __init__(self):
        self.w = nnx.Param(jnp.asarray([1.0, -2.0, 3.0], jnp.bfloat16))
        self.offset = nnx.Param(jnp.float32(0.5))

    def __call__(self, x):
        return x @ self.w[...].astype(jnp.float32) + self.offset[...]


def loss(model, batch):
    x, y = batch
    return jnp.mean(jnp.square(model(x) - y)), {}


def batch_of(step):
    rng = np.random.default_rng(step)
    return rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=6).astype(np.float32)


def test_nnx_optimizer_and_trainer(tmp_path):
    """Both give the same parameters, and a run that is stopped goes on to the same bits."""
    model, make = Line(), lambda: float32_masters(optax.adamw(SMALL_RATE))
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(lambda model: loss(model, batch)[0])(model))

    for number in range(1, 301):
        step(model, optimizer, batch_of(number))
    stopped, going_on, whole = (Trainer(Line(), make(), loss) for _ in range(3))
    options = {"checkpoints": tmp_path / "run", "every": (), "save_every": 100}
    list(whole.fit(batch_of, 300, every=()))
    list(stopped.fit(batch_of, 200, **options))
    list(going_on.fit(batch_of, 300, **options))
    for trainer in (whole, going_on):
        jax.tree.map(np.testing.assert_array_equal, nnx.state(trainer.model), nnx.state(whole.model))
    np.testing.assert_array_equal(whole.model.w[...], model.w[...])
    assert np.any(model.w[...] != Line().w[...])


def test_rounding_at_random():
    """Steps of a thousandth of the distance of two bfloat16 numbers add up, and others train as without it."""
    params = {"w": jnp.full((64, 512), 1.25, jnp.bfloat16), "offset": jnp.zeros(3), "none": None}
    optimizer = stochastic_rounding(optax.chain(optax.scale(-(2.0**-17)), optax.trace(0.0)))
    gradients = jax.tree.map(jnp.ones_like, params)
    assert jax.tree.leaves(optimizer.init(params).inner)[-1].dtype == jnp.float32

    @jax.jit
    def trained(params, state):
        def step(_, own):
            params, state = own
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, 1000, step, (params, state))

    got, state = trained(params, optimizer.init(params))
    assert got["w"].dtype == jnp.bfloat16 and int(state.step) == 1000
    moved = np.asarray(got["w"].astype(jnp.float32)) - 1.25
    spread = np.sqrt(1000 * 2.0**-7 * 2.0**-17)  # of an element: each step rounds up or down by 2**-7 at most
    assert abs(moved.mean() + 1000 * 2.0**-17) < 5 * spread / np.sqrt(moved.size)
    assert 0.5 * spread < moved.std() < 1.5 * spread
    np.testing.assert_allclose(got["offset"], -1000 * 2.0**-17, rtol=1e-6)
    again, _ = trained(params, optimizer.init(params))
    np.testing.assert_array_equal(again["w"], got["w"])


def test_what_rounding_at_random_refuses():
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer of optax"):
        stochastic_rounding(optax.adamw)
    optimizer, params = stochastic_rounding(optax.sgd(0.1)), {"w": jnp.ones(2, jnp.float16)}
    with pytest.raises(ValueError, match=r"params must be the parameters.*got None"):
        optimizer.update(params, optimizer.init(params))
    with pytest.raises(ValueError, match=r"params must be bfloat16 to be rounded at random, got float16"):
        optimizer.update(params, optimizer.init(params), params)


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"optimizer must be an optimizer of optax"):
        float32_masters(optax.adamw)
    optimizer = float32_masters(optax.sgd(0.1))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"params must be the parameters.*got None"):
        optimizer.update(params, optimizer.init(params))
