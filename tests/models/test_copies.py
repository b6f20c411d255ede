"""Nothing copies a model: its arrays stay where they are, and the FP8 forms of weights are made once."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.models
from jgg.integrations import lm_eval_batches
from jgg.linear.weights import forms_of_forward
from jgg.models import decoding, fp8_forms, loading
from jgg.models.generation import generate
from jgg.models.requests import asked
from jgg.train import losses
from tests.support.models import DATA, loaded
from tests.support.returned import returned_arguments

IDS = np.arange(6, dtype=np.int32)[None]


def arrays_of(model):
    return jax.tree.leaves(nnx.state(model))


def made_for_generation(model):
    """The arrays that the programs of generation take in addition to the model's own."""
    own = set(map(id, arrays_of(model)))
    return [array for array in jax.tree.leaves(decoding.split_model(model)[1]) if id(array) not in own]


def invariant(experts="dense", **options):
    """A model that multiplies in FP8, by weights that it quantizes or that are loaded so, and that it alone has."""
    model = jgg.models.load(DATA / "qwen3_moe", dtype=jnp.float32, experts=experts, batch_invariant=True, **options)
    model.layers.moe.quantization = jgg.Fp8()
    return model


def are_same(some, others):
    return [a is b for a, b in zip(some, others, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"batch_invariant": True, "lora_rank": 2}, {"batch_invariant": True, "experts": jgg.Fp8()}]
)
def test_generation_takes_the_arrays_of_the_model(options):
    assert not made_for_generation(loaded("qwen3_moe", **options))


def test_generation_casts_adapters_and_leaves_those_of_the_model():
    model = loaded("qwen3_moe", dtype=jnp.bfloat16, lora_rank=2)
    before = arrays_of(model)
    adapters = jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert {array.dtype for array in adapters} == {jnp.dtype("float32")}
    made = made_for_generation(model)
    assert {array.dtype for array in made} == {jnp.dtype("bfloat16")} and len(made) == len(adapters)
    assert all(are_same(arrays_of(model), before))


def test_forms_are_made_once_for_weights_and_freed_with_them():
    model = invariant(lora_rank=2)
    first, moe = made_for_generation(model), model.layers.moe
    assert len(first) == 4  # values and scales of two matrices
    moe.w_down_lora_b.set_value(moe.w_down_lora_b.get_value() + 1)  # as a step of training does
    assert all(are_same(made_for_generation(model), first))
    assert all(are_same(made_for_generation(nnx.merge(*nnx.split(model))), first))
    references = [weakref.ref(array) for array in first]
    del model, moe, first
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


def test_forms_are_of_the_weights_that_a_model_has_now():
    model = invariant()
    before, variable = made_for_generation(model), model.layers.moe.w_down
    value = variable.get_value()
    variable.set_value(-value)
    assert sum(are_same(made_for_generation(model), before)) == 2  # those of w_gate_up
    other = nnx.merge(nnx.graphdef(model), jax.tree.map(jnp.copy, nnx.state(model)))
    first, wanted = (jgg.models.generate(each, IDS, 3, details=True) for each in (model, other))
    jax.tree.map(np.testing.assert_array_equal, first, wanted)
    variable.set_value(value)
    again = jgg.models.generate(model, IDS, 3, details=True)
    assert (again.log_probabilities != first.log_probabilities).any()


def test_nothing_is_kept_of_traced_or_deleted_weights():
    model = invariant()
    own = set(map(id, arrays_of(model)))

    def kept():
        return sum(not own.isdisjoint(key) for key in list(fp8_forms._KEPT))

    traced = jax.jit(lambda model: jax.tree.leaves(decoding.split_model(model)[1]))(model)
    assert kept() == 0
    jax.jit(lambda x: (x, len(decoding.split_model(model))))(1)
    assert kept() == 2
    made = decoding.split_model(model)[1]
    jax.tree.map(np.testing.assert_array_equal, traced, jax.tree.leaves(made))
    assert kept() == 2
    model.layers.moe.w_down.get_value().delete()
    with pytest.raises(RuntimeError, match="deleted"):
        decoding.split_model(model)
    assert kept() == 1


def calls():
    """The functions that jgg compiles for whole models or stacks, as (function, arguments, keywords)."""
    model = invariant(lora_rank=2)
    split = decoding.split_model(model)
    options = generate.__kwdefaults__ | {"details": True, "repetition_penalty": 1.5, "temperature": 1.0}
    wanted = asked(model, IDS, 3, **options | {"key": jax.random.key(0)})
    prompts, request, plan = wanted.prompts, wanted.request, {"plan": wanted.plan}
    state = jax.eval_shape(functools.partial(decoding.start, split[0], **plan), split[1], prompts, request)
    batch = {name: IDS for name in ("tokens", "targets", "segments", "weights")}
    value = model.layers.moe.w_down.get_value()
    of_layer = jax.tree.map(lambda array: array[0], value)
    how = fp8_forms.How(None, fp8_forms.current_target())
    yield decoding.start, (*split, prompts, request), plan
    yield decoding.advance, (*split, state, request.stops, np.zeros(1, bool), 3), plan
    yield (
        jax.jit(forms_of_forward, static_argnums=(0, 2, 3, 4)),
        ("w_down", value, jgg.Fp8(), model.options.dtype, how),
        {},
    )
    yield loading._with_layer, (value, of_layer, 0), {"count": 2, "where": None}
    yield losses._sum_of_losses, (model, batch, True), {}
    yield lm_eval_batches._scores, (*nnx.split(model), IDS, IDS[..., None], IDS > 0), {}


def test_no_compiled_function_returns_what_it_is_given():
    for function, arguments, keywords in calls():
        assert returned_arguments(function, *arguments, **keywords) == []


def test_returned_arguments_are_found():
    """Also through calls and loops."""

    def run(x, y, z):
        (a, _), b = jax.lax.scan(lambda carry, each: ((carry[0], carry[1] + each), each), (x, y), z)
        return jax.jit(lambda a: (a, a + 1))(a), b, z[::-1]

    arrays = jnp.ones(3), jnp.ones(3), jnp.ones((4, 3))
    assert returned_arguments(jax.jit(run), *arrays) == ["x", "z"]
    assert returned_arguments(jax.jit(run, donate_argnums=0), *arrays) == ["z"]
