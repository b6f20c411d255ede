"""A family whose layers mix tokens in two ways: one entry of FAMILIES and one of MIXERS make it a whole model."""

import dataclasses
import operator
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.hf
import jgg.models
from jgg.core.mixers import MixerConfig
from jgg.hf.families import FAMILIES
from jgg.hf.model_settings import in_layers
from jgg.hf.tensors import matrix
from jgg.models.attention import Place
from jgg.models.layer import MIXERS
from jgg.models.modules import set_params
from jgg.models.norms import norm
from jgg.models.rotary import rotations
from jgg.models.stack_plan import schedule_of
from tests.support.models import config_of, logits_of

STATE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecayConfig(MixerConfig):
    """The options of a decay: it has none."""

    kind: ClassVar[str] = "decay"

    def shapes(self, features):
        return {"w_in": (features, STATE), "w_out": (STATE, features)}


class State(NamedTuple):
    """The sums of stacked layers, [layers, B, STATE]."""

    sums: jax.Array


class Decay(nnx.Module):
    """A sum of past tokens in which each counts half of the one that follows it."""

    def __init__(self, config, own, options, rngs):
        self.options = options
        set_params(self, own.shapes(config.features), 0.3, options, rngs)

    @staticmethod
    def empty_cache(own, layers, batch, positions, dtype):
        return State(jnp.zeros((layers, batch, STATE), dtype))

    def __call__(self, x, place, cache):
        first = jnp.zeros((x.shape[0], STATE), x.dtype) if cache is None else cache.sums[place.layer]

        def step(before, new):
            return (after := 0.5 * before + new), after

        last, sums = jax.lax.scan(step, first, jnp.moveaxis(x @ self.w_in[...], 1, 0))
        y = jnp.moveaxis(sums, 0, 1) @ self.w_out[...]
        return y, None if cache is None else State(cache.sums.at[place.layer].set(last))


@pytest.fixture
def model(monkeypatch):
    """GLM-4.5 with a decay in the first and the last of its layers, which are dense, sparse and sparse."""
    glm = FAMILIES["glm4_moe"]

    def read(settings):
        found = glm.model(settings)
        kinds = {"decay": DecayConfig(), "full_attention": found["mixers"][0]}
        return found | in_layers(settings, kinds, ["decay"] * len(found["mixers"]))

    family = dataclasses.replace(
        glm,
        defaults={**glm.defaults, "layer_types": None},
        model=read,
        layer={**glm.layer, "decay.w_in": matrix("decay.in.weight"), "decay.w_out": matrix("decay.out.weight")},
    )
    monkeypatch.setitem(FAMILIES, "decaying", family)
    monkeypatch.setitem(MIXERS, "decay", Decay)
    config = config_of("glm4_moe") | {"model_type": "decaying", "layer_types": ["decay", "full_attention", "decay"]}
    return jgg.models.Decoder(jgg.models.model_config(config), dtype=jnp.float32, rngs=nnx.Rngs(0))


TOKENS = np.random.default_rng(0).integers(64, size=(2, 9))


def test_the_plan_has_a_stack_for_layers_side_by_side_that_are_alike(model):
    plan = [(stack.name, stack.mixer.kind, list(stack.numbers)) for stack in model.config.plan]
    assert plan == [("dense_layers", "decay", [0]), ("layers", "attention", [1]), ("layers_2", "decay", [2])]
    _, sown = jax.eval_shape(lambda model: nnx.capture(model, nnx.Intermediate)(TOKENS), model)
    assert sown["topk_indices"][0].shape == (2, 2, 9, 2)  # of two layers with experts


def test_each_mixer_decodes_with_its_own_cache(model):
    logits, caches = logits_of(model, TOKENS), model.empty_caches(2, 9)
    assert [type(cache).__name__ for cache in caches] == ["State", "Cache", "State"]
    step = jax.jit(lambda model, *arguments: model.run_layers(*arguments))
    x, caches = step(model, TOKENS[:, :6], jnp.arange(6)[None], caches)
    parts = [x]
    for position in range(6, 9):
        x, caches = step(model, TOKENS[:, position : position + 1], jnp.full((2, 1), position), caches)
        parts.append(x)
    np.testing.assert_allclose(model.logits(jnp.concatenate(parts, axis=1)), logits, rtol=0, atol=1e-5)
    other = logits_of(model, np.concatenate([TOKENS[:, :1] ^ 1, TOKENS[:, 1:]], axis=1))
    assert np.abs(other - logits)[:, -1].max() > 1e-3  # the last token sees the first


def test_its_folder_has_the_names_of_the_family(model, tmp_path):
    jgg.models.save(model, tmp_path / "saved")
    names = [name for name in jgg.hf.Checkpoint(tmp_path / "saved") if ".decay." in name]
    assert sorted(names) == [f"model.layers.{layer}.decay.{name}.weight" for layer in (0, 2) for name in ("in", "out")]
    again = jgg.models.load(tmp_path / "saved", dtype=jnp.float32)
    np.testing.assert_array_equal(logits_of(again, TOKENS), logits_of(model, TOKENS))


@pytest.mark.parametrize(
    ("layers", "periods"),
    [
        ("aaaa", ["a", 4]),
        ("daaa", ["d", 1, "a", 3]),
        ("rrrarrra", ["rrra", 2]),
        ("drrrarrrar", ["dr", 1, "rrar", 2]),
        ("rrra", ["r", 3, "a", 1]),
    ],
)
def test_layers_run_in_periods_of_which_few_are_compiled(layers, periods):
    got = [part for period in schedule_of(layers) for part in ("".join(period.names), period.repeats)]
    assert got == periods


GIVEN = np.random.default_rng(1).permuted(np.tile(np.arange(4), (8, 2, 9, 1)), axis=-1)[..., :2]
POSITIONS = np.arange(9, dtype=np.int32)[None]


@pytest.fixture
def with_periods(model):
    """The model with two decays and two layers of attention, twice."""
    types = ["decay", "decay", "full_attention", "full_attention"] * 2
    config = model.config.hf | {"num_hidden_layers": 8, "layer_types": types, "first_k_dense_replace": 0}
    model = jgg.models.Decoder(jgg.models.model_config(config), dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert [(period.names, period.repeats) for period in model.config.schedule] == [
        (("layers", "layers", "layers_2", "layers_2"), 2)
    ]
    return model


@jax.jit
def layer(stack, number, x, rotary, topk_indices):
    """One layer, so that a layer of each kind is compiled once."""
    own = jax.tree.map(operator.itemgetter(number), stack)
    return own(x, Place(POSITIONS, rotary, None, None, None)._replace(topk_indices=topk_indices), None)[0]


def one_after_the_other(model):
    """The last features of TOKENS with the experts of GIVEN."""
    x, rotary = model.w_embedding[...][TOKENS], rotations(model.config.mixers[2].rotary, POSITIONS)
    for number in range(8):
        plan = next(plan for plan in model.config.plan if number in plan.numbers)
        x = layer(getattr(model, plan.name), plan.numbers.index(number), x, rotary, GIVEN[number])
    return norm(x, model.norm[...], model.config.norm_epsilon, None)


def in_periods(model):
    return model.run_layers(jnp.asarray(TOKENS), POSITIONS, topk_indices=jnp.asarray(GIVEN))[0]


def test_periods_compute_what_layers_do_one_after_the_other(with_periods):
    """With the experts of each chosen for it."""
    got, sown = jax.jit(lambda model: nnx.capture(in_periods, nnx.Intermediate)(model))(with_periods)
    np.testing.assert_allclose(got, one_after_the_other(with_periods), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sown["topk_indices"][0], GIVEN)


@pytest.mark.sweep
def test_periods_learn_what_layers_do_one_after_the_other(with_periods):
    def gradients(function):
        return jax.grad(lambda model: jnp.square(function(model)).sum(), allow_int=True)

    wanted = gradients(one_after_the_other)(with_periods)
    for remat in ("none", "names"):
        with_periods.options = dataclasses.replace(with_periods.options, remat=remat)
        got = jax.jit(gradients(in_periods))(with_periods)
        for array, expected in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-4)
