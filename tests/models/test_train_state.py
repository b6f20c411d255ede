"""The state of `jgg.train.Trainer`: what is set on its model, what its loss changes, and who else has its arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg
import jgg.nnx
from jgg.train import Trainer, TrainingError
from jgg.train.state import is_shared
from tests.models.test_train import Line, batch_of, loss, trainer, values

pytestmark = pytest.mark.usefixtures("optax_promotion")
X = np.random.default_rng(0).normal(1, 1, (3, 4, 16, 8)).astype(np.float32)


class Net(nnx.Module):
    """A layer between normalization and dropout, which count and measure in each call."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.norm, self.linear = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls, self.total = nnx.Variable(0), jnp.zeros(8)  # one of Python, and an array that is no variable

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        self.total = self.total + jnp.sum(x, axis=0)
        return self.dropout(self.linear(self.norm(x)))


class Normed(nnx.Module):
    """A layer whose call replaces its parameters."""

    def __init__(self):
        self.norm = nnx.SpectralNorm(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.norm(x, update_stats=True)


def mean_square(model, x):
    value = jnp.mean(jnp.square(model(x)))
    return value, value


def net(seed=0, **options):
    return Trainer(Net(), optax.adam(0.01), mean_square, **options)


def part(step):
    return X[step % 3, 0]


@pytest.mark.parametrize("kind", [Net, Normed])
def test_variables_that_the_loss_changes_are_those_of_a_loop_of_nnx(kind):
    model = kind()
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        (value, _), gradients = nnx.value_and_grad(mean_square, has_aux=True)(model, x)
        optimizer.update(model, gradients)
        return value

    wanted = [step(model, optimizer, part(number)) for number in (1, 2, 3)]
    own = Trainer(kind(), optax.adam(0.01), mean_square)
    (record,) = own.fit(part, 3, every=())
    np.testing.assert_allclose(record.metrics, wanted, rtol=1e-5)
    for got, expected in zip(*(jax.tree.leaves(nnx.state(each)) for each in (own.model, model)), strict=True):
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def test_parts_of_a_batch_change_variables_one_after_the_other():
    own = net(accumulate=True)
    list(own.fit(lambda step: X[step % 3], 2))
    assert own.model.calls.get_value() == own.model.dropout.rngs.count[...] == 2 * 4
    np.testing.assert_allclose(own.model.total, X[1:].sum((0, 1, 2)), rtol=1e-5)


def test_what_the_loss_changes_is_saved(tmp_path):
    whole, first, second = net(), net(), net()
    list(whole.fit(part, 4))
    list(first.fit(part, 2, checkpoints=tmp_path))
    list(second.fit(part, 4, checkpoints=tmp_path))
    for own, expected in zip(*(jax.tree.leaves(nnx.state(each.model)) for each in (second, whole)), strict=True):
        if jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
            own, expected = jax.random.key_data(own), jax.random.key_data(expected)
        np.testing.assert_array_equal(own, expected)


def test_a_step_starts_from_what_is_set():
    """In NumPy too; the program is compiled again only where options change."""
    traces = []

    def counted(model, batch):
        traces.append(model.dropout.deterministic)
        return mean_square(model, batch)

    own = Trainer(Net(), optax.sgd(0.0), counted)
    for record in own.fit(part, 6, every=(1,)):
        if record.step == 2:
            own.model.linear.kernel.set_value(np.full((8, 8), 3, np.float32))
            own.model.dropout.rngs.count.set_value(np.uint32(7))
        if record.step == 3:
            own.model = nnx.clone(own.model)
        own.model.eval()
        if record.step < 4:
            own.model.train()
    np.testing.assert_array_equal(own.model.linear.kernel[...], 3)
    assert own.model.dropout.rngs.count[...] == 7 + 2 and own.model.calls.get_value() == 6
    assert set(traces[:-2]) == {False} and traces[-2:] == [True, True] and len(traces) == 4


def experts(**options):
    return jgg.nnx.MoE(8, 8, num_experts=4, topk=2, use_selection_bias=True, rngs=nnx.Rngs(0), **options)


def adapted(model):
    def distance(model, x):
        return mean_square(lambda x: model(x) - jnp.roll(x, 1), x)

    return Trainer(model, optax.adam(0.1), distance, wrt=nnx.LoRAParam)


def test_adapters_that_are_merged_stay_merged_and_are_saved(tmp_path):
    """So is a selection bias; matrices that nothing changed are compared, and not written."""
    own = adapted(experts(lora_rank=2))
    options = {"checkpoints": tmp_path, "every": (1,)}
    output_of = nnx.jit(lambda model, x: model(x))
    list(own.fit(part, 2, **options))
    wanted = output_of(own.model, part(0))
    own.model.merge_adapters()
    np.testing.assert_allclose(output_of(own.model, part(0)), wanted, rtol=1e-3, atol=1e-4)
    own.model.selection_bias.set_value(np.arange(4, dtype=np.float32))
    frozen = own.model.w_down[...]
    list(own.fit(part, 3, **options))
    assert own.model.w_down[...] is frozen
    again = adapted(experts(lora_rank=2))
    assert list(again.fit(part, 3, **options)) == []
    assert values(again.model) == values(own.model)


def test_frozen_weights_must_be_those_of_the_run(tmp_path):
    list(adapted(experts(lora_rank=2)).fit(part, 1, checkpoints=tmp_path))
    other = experts(lora_rank=2)
    other.w_down.set_value(other.w_down.get_value().at[1, 2, 3].add(2.0**-20))
    message = r"/1: model\.w_down, which is not trained, has other values than in that run$"
    with pytest.raises(TrainingError, match=message):
        list(adapted(other).fit(part, 2, checkpoints=tmp_path))
    assert [record.step for record in adapted(experts(lora_rank=2)).fit(part, 2, checkpoints=tmp_path)] == [2]


def test_variables_for_which_there_is_no_state_of_the_optimizer_are_named():
    own = trainer()
    list(own.fit(batch_of, 1))
    own.model.w.set_value(own.model.w[...].astype(jnp.float16))
    with pytest.raises(ValueError, match=r"model.w float16 \[3\], was float32 \[3\]: make another Trainer"):
        list(own.fit(batch_of, 1))
    own.model.w = nnx.LoRAParam(jnp.ones(3))
    own.model.more = nnx.Param(jnp.ones(2))
    with pytest.raises(ValueError, match=r"model.more float32 \[2\], was none: make another Trainer"):
        list(own.fit(batch_of, 1))


def test_a_loss_that_changes_more_than_values_is_refused():
    def growing(model, batch):
        measured = loss(model, batch)
        model.offset.set_value(jnp.zeros(2))
        return measured

    def adding(model, batch):
        model.more = nnx.Variable(jnp.zeros(2))
        return loss(model, batch)

    for own, message in ((growing, r"leave the shape and dtype of offset, float32 \[\]"), (adding, "got a new more")):
        with pytest.raises(ValueError, match=message):
            list(Trainer(Line(), optax.sgd(0.1), own).fit(batch_of, 1))


def test_two_trainers_share_a_model_also_one_inside_the_other():
    model = Line()
    outer, inner = Trainer(model, optax.adam(0.1), loss), Trainer(model, optax.sgd(0.1), loss, wrt=nnx.LoRAParam)

    def batches(step):
        list(inner.fit(batch_of, 1))
        return batch_of(step)

    list(outer.fit(batches, 3, every=()))
    expected = Line()
    alone = [Trainer(expected, optax.adam(0.1), loss), Trainer(expected, optax.sgd(0.1), loss, wrt=nnx.LoRAParam)]
    outside = alone[0].fit(lambda step: list(alone[1].fit(batch_of, 1)) and batch_of(step), 3, every=(1,))
    assert len(list(outside)) == 3
    assert outer.model is inner.model and values(model) == values(expected)


@pytest.mark.thorough
def test_arrays_that_others_refer_to_stay():
    """Those of clones made before the Trainer, before its first step and between steps, and plain references."""
    model = Line()
    kept = [nnx.clone(model)]
    own = trainer_of(model)
    kept += [nnx.clone(own.model), nnx.state(nnx.clone(own.model))]
    wanted = [values(each) for each in kept]
    for record in own.fit(batch_of, 6, every=(2, 3)):
        kept += [nnx.clone(own.model), own.model.w[...]]
        wanted += [values(each) for each in kept[-2:]]
        assert record.step
    assert [values(each) for each in kept] == wanted
    assert len({own[0] for own in wanted}) > 4


def test_nothing_is_copied_where_only_the_model_refers_to_its_arrays(tmp_path):
    """Nor while a checkpoint is written, for which Orbax keeps references."""
    own = trainer_of(Line())
    place = own.model.w.get_value().unsafe_buffer_pointer()
    list(own.fit(batch_of, 8))
    assert own.model.w.get_value().unsafe_buffer_pointer() == place
    for _ in own.fit(batch_of, 3, every=(1,), checkpoints=tmp_path, save_every=1):
        assert not is_shared(own.model.w) and not is_shared(own.model.offset)
    held = own.model.w[...]
    assert is_shared(own.model.w) and held is own.model.w[...]


def trainer_of(model):
    return Trainer(model, optax.adam(0.1), loss)


def test_arrays_of_an_optimizer_s_options_stay():
    rate = jnp.float32(0.1)
    list(Trainer(Line(), optax.inject_hyperparams(optax.sgd)(learning_rate=rate), loss).fit(batch_of, 2))
    assert rate == np.float32(0.1)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.schedule_free_sgd(0.1),  # its state begins with the parameters themselves
        optax.contrib.cocob(),  # with one array twice
        optax.chain(optax.contrib.dog(), optax.contrib.dog()),
    ],
    ids=["parameters", "twice", "chain"],
)
def test_an_optimizer_s_first_state_may_share_arrays(optimizer):
    own = Trainer(Line(), optimizer, loss)
    leaves = [id(leaf) for leaf in jax.tree.leaves((own._opt_state, nnx.state(own.model)))]
    assert len(set(leaves)) == len(leaves)
    (record,) = own.fit(batch_of, 2)
    assert np.isfinite(record.metrics["loss"]).all()


def test_an_array_that_an_optimizer_was_given_stays():
    held = jnp.full(3, 0.5)

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: -0.1 * u, updates), state + 1

    list(Trainer(Line(), optax.GradientTransformation(lambda params: held, update), loss).fit(batch_of, 2))
    assert held.tolist() == [0.5] * 3


@pytest.mark.parametrize("stop", [2, 3])
def test_a_checkpoint_has_what_is_set_at_the_record_of_its_step(stop, tmp_path):
    """So that a run that goes on is the one that was not stopped."""

    def scaled(own, steps, folder, last=None):
        for record in own.fit(batch_of, steps, every=(1,), checkpoints=tmp_path / folder, save_every=2):
            own.model.w.set_value(own.model.w[...] * 0.9)
            if record.step == last:
                break
        return values(own.model)

    wanted = scaled(trainer(), 6, "whole")
    scaled(trainer(), stop, "stopped")
    assert scaled(trainer(), 6, "stopped") == wanted
    scaled(trainer(), 6, "left", last=stop)  # asks for no other record
    assert scaled(trainer(), 6, "left") == wanted
