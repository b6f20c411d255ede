"""`jgg.train.OptimizerInBackward`: it trains as the optimizer alone does, and no second copy of the layers exists."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg.models
import jgg.optim
from jgg.core.rounding import rounded_stochastically
from jgg.data.batching import DTYPES
from jgg.train import OptimizerInBackward, Trainer, TrainingError, float32_masters, next_token_loss
from jgg.train.state import split
from jgg.train.steps import lowered, step_of
from tests.models.test_train import Line, values
from tests.support.models import DATA, fill_adapters, loaded

pytestmark = pytest.mark.usefixtures("optax_promotion")
LOSS = next_token_loss(balance_weight=0.1)


def batch_of(step):
    """Two rows, the second with padding."""
    rng = np.random.default_rng(step)
    tokens = rng.integers(1, 60, (2, 13), np.int32)
    segments = np.ones((2, 12), np.int32)
    segments[1, 9:] = 0
    weights = np.float32(segments > 0) / np.float32(segments.sum())
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segments": segments, "weights": weights}


def in_backward(**options):
    return OptimizerInBackward(optax.sgd(0.1), **options)


def trained(model, optimizer, steps=3, **options):
    """The trainer after some steps, and their losses."""
    own = Trainer(model, optimizer, LOSS, **options)
    (record,) = own.fit(batch_of, steps, every=())
    return own, record.metrics["loss"]


def assert_same_training(got, wanted, tolerance):
    np.testing.assert_allclose(got[1], wanted[1], rtol=1e-5)
    leaves = [nnx.to_flat_state(nnx.state(own.model)) for own, _ in (got, wanted)]
    for (path, a), (_, b) in zip(*leaves, strict=True):
        np.testing.assert_allclose(a[...], b[...], rtol=0, atol=tolerance * np.abs(b[...]).max(), err_msg=str(path))


# one stack; windows in half of the layers; dense layers first; periods of several layers, and of several stacks
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_moe",
        "gpt_oss",
        "glm4_moe",
        pytest.param("deepseek_v3", marks=pytest.mark.sweep),
        "qwen3_next",
        pytest.param("gemma4_text", marks=pytest.mark.sweep),
    ],
)
def test_it_trains_as_the_optimizer_alone(family):
    """Weight decay and a schedule by the count of steps; rounding grows where AdamW divides by small numbers."""
    optimizer = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 3), eps=1e-3, weight_decay=0.1)
    wanted = trained(loaded(family, remat="all"), optimizer)
    got = trained(loaded(family, remat="all"), OptimizerInBackward(optimizer))
    assert_same_training(got, wanted, 1e-4)
    state = got[0]._opt_state
    assert {np.asarray(count).tolist() == [3] * len(count) for count in (own[0].count for own in state.stacks.values())}


def test_what_layers_take_may_be_kept_on_the_host():
    wanted, got = (trained(loaded("qwen3_moe", remat=remat), in_backward(max_norm=1.0)) for remat in ("all", "offload"))
    assert values(got[0].model) == values(wanted[0].model)


def test_muon_trains_the_layers():
    muon = jgg.optim.muon(0.01, consistent_rms=0.2, ns_dtype="float32")
    wanted = trained(loaded("qwen3_moe", remat="all"), muon)
    others = optax.adamw(0.01, nesterov=True)
    got = trained(loaded("qwen3_moe", remat="all"), OptimizerInBackward(muon, others=others))
    assert_same_training(got, wanted, 1e-3)


def test_adapters_alone_are_trained():
    """No parameter outside the layers is, so the features that they take have no gradient."""
    models = [fill_adapters(loaded("qwen3_moe", remat="all", lora_rank=2)) for _ in range(2)]
    before = values(nnx.state(models[0], nnx.Not(nnx.LoRAParam)))
    wanted = trained(models[0], optax.sgd(0.1), wrt=nnx.LoRAParam)
    got = trained(models[1], OptimizerInBackward(optax.sgd(0.1)), wrt=nnx.LoRAParam)
    assert_same_training(got, wanted, 1e-5)
    assert values(nnx.state(got[0].model, nnx.Not(nnx.LoRAParam))) == before


def test_gradients_are_bound_by_the_norm_of_the_step_before():
    rate, bound = 0.1, 0.3
    got, _ = trained(loaded("qwen3_moe", remat="all"), OptimizerInBackward(optax.sgd(rate), max_norm=bound), steps=2)
    model, norm = loaded("qwen3_moe", remat="all"), 0.0
    gradients_of = nnx.jit(nnx.grad(lambda model, batch: LOSS(model, batch)[0]))
    for step in (1, 2):
        gradients = gradients_of(model, batch_of(step))
        factor = 1 / max(1, norm / bound)
        norm = float(optax.tree.norm(gradients))
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g, f=factor: p - rate * f * g, params, gradients))
    assert factor < 1
    np.testing.assert_allclose(got._opt_state.norm, norm, rtol=1e-5)
    assert_same_training((got, 0), (Trainer(model, optax.sgd(rate), LOSS), 0), 1e-5)


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(tmp_path):
    def own():
        model = loaded("qwen3_moe", remat="all", param_dtype=jnp.bfloat16)
        return Trainer(model, OptimizerInBackward(optax.adamw(1e-2, mu_dtype="bfloat16"), max_norm=1.0), LOSS)

    whole, first, second = own(), own(), own()
    list(whole.fit(batch_of, 4))
    list(first.fit(batch_of, 2, checkpoints=tmp_path / "run"))
    list(second.fit(batch_of, 4, checkpoints=tmp_path / "run"))
    assert values(second.model) == values(whole.model)
    assert values(second._opt_state) == values(whole._opt_state)
    mu, nu = (own["layers"].moe.w_down.dtype for own in second._opt_state.stacks["layers"][0][1:])
    assert (mu, nu) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("rounding", [True, False])
def test_small_updates_of_bfloat16_are_not_lost(rounding):
    """Each step is far below the distance of bfloat16 numbers; stochastic rounding keeps them on average."""
    optimizer, steps = optax.sgd(2e-3), 12
    exact, _ = trained(loaded("qwen3_moe", remat="all"), optimizer, steps)
    model = loaded("qwen3_moe", remat="all", param_dtype=jnp.bfloat16)
    before = np.asarray(model.layers.moe.w_down[...], np.float32)
    got, _ = trained(model, OptimizerInBackward(optimizer, stochastic_rounding=rounding), steps)
    moved, wanted = (np.asarray(own.model.layers.moe.w_down[...], np.float32) - before for own in (got, exact))
    share = np.sum(moved * wanted) / np.sum(wanted * wanted)  # of the way that float32 goes
    assert abs(share - 1) < 0.3 if rounding else share < 0.5


def test_masters_work_too():
    optimizer = float32_masters(optax.adamw(1e-3, eps=1e-3))
    in_backward = OptimizerInBackward(optimizer, stochastic_rounding=False)
    models = [loaded("qwen3_moe", remat="all", param_dtype=jnp.bfloat16) for _ in range(2)]
    wanted, got = trained(models[0], optimizer), trained(models[1], in_backward)
    assert_same_training(got, wanted, 2**-8)
    inner = got[0]._opt_state.stacks["layers"]
    master = inner.masters["layers"].moe.w_down[...]
    np.testing.assert_array_equal(master.astype(jnp.bfloat16), got[0].model.layers.moe.w_down[...])


def test_stochastic_rounding_is_right_on_average():
    numbers = jnp.asarray([1 + 2**-10, -3.14159, 1e-30, 2.0**-140, 0.0, -1.5, jnp.inf, -jnp.inf])
    salts = jnp.arange(20_000, dtype=jnp.uint32)
    rounded = jax.jit(jax.vmap(lambda salt: rounded_stochastically(numbers, salt)))(salts).astype(jnp.float32)
    finite, exact = np.asarray(numbers[:6], np.float64), np.asarray(rounded, np.float64)
    steps = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(np.abs(finite), 2.0**-126))) - 7), 2.0**-133)
    assert np.all(np.abs(exact[:, :6].mean(0) - finite) < steps * 5 / np.sqrt(4 * len(salts)))
    assert np.all(np.abs(exact[:, :6] - finite) < steps)
    np.testing.assert_array_equal(exact[:, 5:], np.broadcast_to(np.float64([-1.5, np.inf, -np.inf]), (len(salts), 3)))
    assert np.all(np.isnan(rounded_stochastically(jnp.full(1000, jnp.nan), salts[7]).astype(jnp.float32)))


def test_the_program_copies_no_stack():
    """Neither the weights nor the gradients of all layers exist a second time."""
    config = json.loads((DATA / "qwen3_moe" / "config.json").read_text()) | {"num_hidden_layers": 11}
    config = jgg.models.model_config(config)
    model = nnx.eval_shape(lambda: jgg.models.Decoder(config, remat="all", dtype="float32", rngs=nnx.Rngs(0)))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def stacks_made(optimizer):
        graphdef, state, frozen = split(model, nnx.Param)
        batch = {name: jax.ShapeDtypeStruct((2, 16), dtype) for name, dtype in DTYPES.items()}
        arguments = (state, jax.eval_shape(optimizer.init, state)), frozen, batch
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
        text = lowered(step_of(graphdef, optimizer, LOSS, False), *arguments, {}).compile().as_text()
        made = re.findall(r"= f32\[11,4,\d+,\d+\]\S* (copy|broadcast)\(", text)  # broadcast: a stack of gradients
        return len(made)

    assert stacks_made(OptimizerInBackward(optax.sgd(0.1))) == stacks_made(OptimizerInBackward(optax.adamw(0.1))) == 0
    assert stacks_made(optax.sgd(0.1)) > 0


def test_a_loss_that_is_not_finite_is_an_error():
    own = Trainer(loaded("qwen3_moe", remat="all"), OptimizerInBackward(optax.sgd(1e38)), LOSS)
    with pytest.raises(TrainingError, match="a trained parameter is nan"):
        list(own.fit(batch_of, 3))


def test_what_it_cannot_train_is_an_error():
    with pytest.raises(TypeError, match=r"model must be a jgg.models.Decoder with an OptimizerInBackward, got .*Line"):
        Trainer(Line(), in_backward(), LOSS)
    with pytest.raises(ValueError, match=r"model must have remat='all' or 'offload' with an .*, got 'names'"):
        Trainer(loaded("qwen3_moe", remat="names"), in_backward(), LOSS)
    model = loaded("qwen3_moe", remat="all")
    parts = lambda step: jax.tree.map(lambda a: np.stack([a, a]), batch_of(step))  # noqa: E731
    with pytest.raises(ValueError, match=r"batch must have one part with an OptimizerInBackward, .*, got 2"):
        list(Trainer(model, in_backward(), LOSS, accumulate=True).fit(parts, 1))

    def twice(model, batch):
        return LOSS(model, batch)[0] + LOSS(model, batch)[0], ()

    with pytest.raises(ValueError, match=r"loss must call the model once .*, got a second call"):
        list(Trainer(model, in_backward(), twice).fit(batch_of, 1))
    for options in ({"max_norm": 0}, {"max_norm": float("nan")}):
        with pytest.raises(ValueError, match="max_norm must be "):
            in_backward(**options)
    with pytest.raises(TypeError, match="optimizer must be an optimizer of optax, got int"):
        OptimizerInBackward(1)


def test_one_part_is_the_batch():
    one = lambda step: jax.tree.map(lambda a: a[None], batch_of(step))  # noqa: E731
    own = Trainer(loaded("qwen3_moe", remat="all"), in_backward(), LOSS, accumulate=True)
    (record,) = own.fit(one, 2, every=())
    wanted, losses = trained(loaded("qwen3_moe", remat="all"), in_backward(), steps=2)
    np.testing.assert_array_equal(record.metrics["loss"], losses)
    assert values(own.model) == values(wanted.model)
