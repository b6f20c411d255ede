"""`jgg.train.Trainer`: what it computes, yields, saves, and refuses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg.models
from jgg.train import Trainer, TrainingError, compiler_options, meter
from tests.support.models import DATA

pytestmark = pytest.mark.usefixtures("optax_promotion")


class Line(nnx.Module):
    """x @ w + offset; an optimizer may train `offset` alone."""

    def __init__(self):
        self.w = nnx.Param(jnp.array([1.0, -2.0, 3.0]))
        self.offset = nnx.LoRAParam(jnp.float32(0.5))

    def __call__(self, x):
        return x @ self.w[...] + self.offset[...]


def loss(model, batch):
    x, y = batch
    value = jnp.mean(jnp.square(model(x) - y))
    return value, {"loss": value, "count": jnp.int32(len(x))}


def batch_of(step):
    """Six rows, others at each step."""
    rng = np.random.default_rng(step)
    return rng.normal(size=(6, 3)).astype(np.float32), rng.normal(size=6).astype(np.float32)


def trainer(rate=0.1, **options):
    return Trainer(Line(), optax.adamw(rate), loss, **options)


def values(model):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(model)]


@pytest.mark.parametrize("stop", [4, 5, 6])  # at a checkpoint; after it; before the next one and at a record
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(stop, tmp_path):
    whole, first, second = trainer(), trainer(), trainer()
    wanted = {record.step: record.metrics["loss"] for record in whole.fit(batch_of, 12, every=(1,))}
    options = {"every": (1,), "checkpoints": tmp_path / "run", "save_every": 4}
    for record in first.fit(batch_of, 12, **options):
        if record.step == stop:
            break
    del record
    got = {record.step: record.metrics["loss"] for record in second.fit(batch_of, 12, **options)}
    assert list(got) == list(range(5, 13))
    assert all(got[step] == wanted[step] for step in got)
    assert values(second.model) == values(whole.model)
    assert list(trainer().fit(batch_of, 12, **options)) == []  # and nothing is left to do


def test_accumulation_is_the_large_batch():
    def parts(step):
        return tuple(array.reshape(3, 2, *array.shape[1:]) for array in batch_of(step))

    whole, accumulating = (Trainer(Line(), optax.sgd(0.1), loss, accumulate=is_split) for is_split in (False, True))
    (wanted,), (got,) = whole.fit(batch_of, 5, every=()), accumulating.fit(parts, 5, every=())
    np.testing.assert_allclose(got.metrics["loss"], wanted.metrics["loss"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), accumulating.model, whole.model)


def test_gradients_of_16_bits_are_added_up_in_float32():
    """The mean of 1 and 300 times 2**-9: in bfloat16, 1 + 2**-9 would be 1."""
    model = Line()
    model.w.set_value(jnp.zeros(3, jnp.bfloat16))

    def weighted(model, weight):
        return jnp.sum(model.w[...] * weight.astype(jnp.bfloat16)).astype(jnp.float32), {}

    weights = np.array([1.0] + [2.0**-9] * 300, np.float32)
    trainer = Trainer(model, optax.sgd(-301.0), weighted, accumulate=True)
    list(trainer.fit(lambda step: weights, 1, every=()))
    np.testing.assert_allclose(trainer.model.w[...].astype(jnp.float32), weights.sum(), rtol=2**-8)


def test_records_have_all_steps():
    records = list(trainer(lengths_of=lambda batch: np.array([len(batch[0])])).fit(batch_of, 11, every=(4, 6)))
    assert [record.step for record in records] == [4, 6, 8, 11]
    assert [record.metrics["loss"].shape for record in records] == [(4,), (2,), (2,), (3,)]
    assert [record.speed.tokens for record in records] == [24, 12, 12, 18]
    np.testing.assert_array_equal(records[0].metrics["count"], [6, 6, 6, 6])
    own = trainer()
    models = {record.step: values(own.model) for record in own.fit(batch_of, 3, every=(2,), first=True)}
    assert list(models) == [1, 2, 3]
    (last,) = trainer().fit(batch_of, 3, every=())
    np.testing.assert_allclose(last.metrics["loss"][0], loss(Line(), batch_of(1))[0], rtol=1e-6)
    assert all(before != after for before, after in itertools.pairwise(models.values()))


def test_each_batch_is_asked_for_once_and_a_program_of_the_model_compiles_once():
    program, steps = jax.jit(lambda model, x: model(x)), []

    def drawn(step):
        steps.append(step)
        x, _ = batch_of(step)
        return x, program(own.model, x)

    own = trainer(wrt=nnx.LoRAParam)
    list(own.fit(drawn, 3))
    assert steps == [1, 2, 3]
    assert program._cache_size() == 1


def test_only_what_is_to_be_trained_changes():
    own = trainer(wrt=nnx.LoRAParam)
    list(own.fit(batch_of, 2))
    np.testing.assert_array_equal(own.model.w[...], Line().w[...])
    assert own.model.offset[...] != 0.5
    with pytest.raises(ValueError, match="model must have a variable of type BatchStat to train, got none"):
        trainer(wrt=nnx.BatchStat)


def test_parameters_of_numpy_train_alike():
    model = Line()
    model.w.set_value(np.asarray(model.w[...]))
    (wanted,), (got,) = (
        each.fit(batch_of, 2, every=()) for each in (trainer(), Trainer(model, optax.adamw(0.1), loss))
    )
    np.testing.assert_array_equal(got.metrics["loss"], wanted.metrics["loss"])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_loss_that_is_not_finite_is_named(bad, tmp_path):
    def batches(step):
        x, y = batch_of(step)
        return x, y + np.float32(bad if step == 5 else 0)

    own = trainer()
    message = r"step 5: the loss or a trained parameter is nan, so nothing more is written; the last .* is of step 4$"
    with pytest.raises(TrainingError, match=message):
        list(own.fit(batches, 9, every=(8,), checkpoints=tmp_path, save_every=2))
    with pytest.raises(TrainingError, match=r"nothing more is written$"):
        list(trainer().fit(batches, 9))


def test_a_parameter_that_is_not_finite_shows_in_the_loss():
    with pytest.raises(TrainingError, match="step 1: the loss or a trained parameter is nan"):
        list(Trainer(Line(), optax.sgd(3e38), loss).fit(batch_of, 1))


def damage(folder):
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_text("x")


def test_a_damaged_checkpoint_is_named(tmp_path):
    list(trainer().fit(batch_of, 2, checkpoints=tmp_path / "run"))
    damage(tmp_path / "run" / "2")
    with pytest.raises(TrainingError, match=r"checkpoints must have steps of this model, got .*run/2: ") as raised:
        list(trainer().fit(batch_of, 3, checkpoints=tmp_path / "run"))
    assert "go on from" not in str(raised.value)


def test_the_checkpoint_before_a_damaged_one_is_named_and_goes_on_once_that_is_moved(tmp_path):
    options = {"checkpoints": tmp_path / "run", "save_every": 2, "every": (1,)}
    wanted = [record.metrics["loss"] for record in trainer().fit(batch_of, 7, **options)]
    damage(tmp_path / "run" / "7")
    for _ in range(2):  # nothing was done about it
        with pytest.raises(TrainingError, match=r"run/7: .*; if it is damaged, delete or move it and .* from step 6$"):
            list(trainer().fit(batch_of, 8, **options))
    (tmp_path / "run" / "7").rename(tmp_path / "7")
    record, _ = trainer().fit(batch_of, 8, **options)
    assert record.step == 7 and record.metrics["loss"] == wanted[-1]


def test_checkpoints_that_are_no_folder_are_refused_before_a_step(tmp_path):
    (tmp_path / "run").write_text("a file")
    steps = []
    with pytest.raises(ValueError, match=r"checkpoints must be a folder, got .*/run, which is none"):
        list(trainer().fit(lambda step: steps.append(step) or batch_of(step), 2, checkpoints=tmp_path / "run"))
    assert not steps


def test_one_number_is_no_collection_of_them():
    with pytest.raises(TypeError, match="every must be a collection of ints, such as "):
        next(trainer().fit(batch_of, 2, every=10))


@pytest.mark.parametrize("option", [{"every": (10, 0)}, {"save_every": 0}, {"steps": -1}])
def test_a_wrong_option_is_named(option):
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be"):
        list(trainer().fit(batch_of, **{"steps": 1} | option))


@pytest.mark.parametrize("wrt", [nnx.LoRAParam, nnx.Param])
def test_flops_of_a_decoder(wrt, monkeypatch):
    model = jgg.models.load(DATA / "gpt_oss", lora_rank=2)
    own, config, each = meter.Meter(model, wrt), model.config, 6 if wrt is nnx.Param else 4
    attention, h, i = config.mixers[0], config.features, config.moe.hidden_features
    q, kv = attention.num_heads * 12, attention.num_kv_heads * 12
    matrices = 2 * h * q + 2 * h * kv + h * config.moe.num_experts + config.moe.topk * 3 * h * i
    adapters = 2 * (2 * (h + q) + 2 * (h + kv) + config.moe.topk * (h + 2 * i + i + h))
    wanted = config.num_layers * (each * matrices + 6 * adapters) + each * h * config.vocabulary
    assert own.flops_per_token == wanted
    own.add(np.array([3, 6]))
    distances = [np.arange(n)[:, None] - np.arange(n) for n in (3, 6)]
    attended = sum(
        np.sum((distance >= 0) & (distance < (mixer.window or 99))) for distance in distances for mixer in config.mixers
    )
    assert own.flops == 9 * wanted + 12 * q * attended
    assert own.read().mfu is None
    monkeypatch.setattr(meter, "PEAK_FLOPS", {jax.devices()[0].device_kind: 1e9})
    speed = own.read()
    assert speed.mfu == pytest.approx(own.flops / speed.seconds / 1e9)
    assert str(speed._replace(tokens=4096, seconds=2.0, mfu=0.5, peak_memory=3 * 2**29)) == (
        "2,048 tokens/s, MFU 50.0%, peak memory 1.5 GiB"
    )


def stack_of_sines(x):
    """A scan that keeps a value of each iteration for the backward pass."""
    return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x @ x), None), x, None, 5)[0])


@pytest.mark.parametrize("num_devices", [1, 2])
def test_compiler_options_are_for_gpus(monkeypatch, num_devices):
    assert compiler_options(num_devices) == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jax.random.normal(jax.random.key(0), (17, 17))
    wanted = jax.jit(jax.grad(stack_of_sines))(x)
    # an option that XLA does not know raises
    options = compiler_options(num_devices)
    assert ("optimization_level" in options) == (num_devices > 1)
    got = jax.jit(jax.grad(stack_of_sines), compiler_options=options)(x)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
def test_a_gpu_does_not_fill_stacks():
    x = jax.random.normal(jax.random.key(0), (17, 17))
    plain = jax.jit(jax.grad(stack_of_sines)).lower(x).compile()
    without_fills = jax.jit(jax.grad(stack_of_sines), compiler_options=compiler_options()).lower(x).compile()
    assert "AllocateBuffer" in without_fills.as_text() and "AllocateBuffer" not in plain.as_text()
    np.testing.assert_array_equal(without_fills(x), plain(x))


def test_batches_are_split_over_devices_after_their_lengths_are_counted():
    seen = []

    def lengths_of(batch):
        seen.append(type(batch[0]))
        return np.full(len(batch[0]), 5)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = trainer(lengths_of=lengths_of, batch_sharding=jax.NamedSharding(mesh, jax.P("data")))
    (got,), (wanted,) = split.fit(batch_of, 3, every=()), trainer().fit(batch_of, 3, every=())
    np.testing.assert_array_equal(got.metrics["loss"], wanted.metrics["loss"])
    assert seen == [np.ndarray] * 3 and got.speed.tokens == 3 * 6 * 5
