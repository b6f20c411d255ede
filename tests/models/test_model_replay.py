"""Whole models that are given their experts' choices, masks, and calls without adapters."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgg.core.choices import ALL_TARGETS
from tests.support.closeness import assert_close
from tests.support.models import FAMILIES, loaded, reference

SEGMENTS = np.array([[1] * 13, [1] * 4 + [0] * 9])
MASK = SEGMENTS > 0  # the second row has 4 tokens and padding


# families whose programs are compiled at every change
FEW = [family if family == "glm4_moe" else pytest.param(family, marks=pytest.mark.sweep) for family in FAMILIES]


def losses_and_sown(model, tokens, segments=None, **options):
    losses, sown = nnx.capture(model.losses, nnx.Intermediate)(tokens, tokens, segments, **options)
    return losses, {name: value for name, (value,) in nnx.to_pure_dict(sown).items()}


forward = jax.jit(losses_and_sown)


@functools.partial(jax.jit, static_argnums=0)
def differentiated(graphdef, state, tokens, segments=None, weights=1.0, **options):
    """Losses and what is sown, and the gradients of the sum of the weighted losses."""

    def compute(state):
        results = losses_and_sown(nnx.merge(graphdef, state), tokens, segments, **options)
        return jnp.sum(results[0] * jnp.float32(weights)), results

    gradients, results = jax.grad(compute, has_aux=True)(state)
    return results, gradients


def with_adapters(family, **options):
    """A model whose adapters are not zero."""
    model, rng = loaded(family, lora_rank=2, **options), np.random.default_rng(0)
    noisy = lambda a: np.asarray(a) + rng.normal(0, 0.1, a.shape).astype(a.dtype)  # noqa: E731
    nnx.update(model, jax.tree.map(noisy, nnx.state(model, nnx.LoRAParam)))
    return model


@pytest.mark.parametrize("family", FEW)
def test_a_model_replays_its_own_choices(family):
    graphdef, state = nnx.split(loaded(family, remat="names"))
    tokens = reference(family)["tokens"]
    run = functools.partial(differentiated, graphdef, state, tokens, SEGMENTS, MASK)
    own = run()
    chosen = own[0][1]["topk_indices"]
    open_ = chosen.at[1].set(-1).at[0, 0, ::2].set(-1)  # these are left to the router
    for given in (chosen, open_):
        got = run(topk_indices=given)
        np.testing.assert_array_equal(got[0][0], own[0][0])
        np.testing.assert_array_equal(got[0][1]["topk_indices"], chosen)
        assert_close(got, own, 1e-6)


def test_each_layer_uses_the_choices_that_it_is_given():
    model, tokens = loaded("glm4_moe"), reference("glm4_moe")["tokens"]  # whose first layer has no experts
    losses, sown = forward(model, tokens)
    chosen = sown["topk_indices"]
    for layer in range(2):
        given = np.array(chosen)
        given[layer, 1, 5] = given[layer, 1, 5][::-1] ^ 1  # other experts, of one token
        changed, own = forward(model, tokens, topk_indices=given)
        np.testing.assert_array_equal(own["topk_indices"], given)
        moved = np.argwhere(np.abs(changed - losses) > 1e-6)
        assert moved.tolist()[0] == [1, 5] and np.all(moved[:, 0] == 1)
    loss = jax.jit(lambda model, given: model.loss(tokens, tokens, topk_indices=given))(model, given)
    np.testing.assert_allclose(loss, changed.mean(), rtol=1e-5)


def test_decoding_replays_choices():
    """The prompt at once, then one token at a time, as whole sequences are replayed."""
    model, tokens = loaded("glm4_moe"), reference("glm4_moe")["tokens"]
    given = np.random.default_rng(0).permuted(np.tile(np.arange(4), (2, *tokens.shape, 1)), axis=-1)[..., :2]

    @jax.jit
    def step(model, caches, tokens, positions, given):
        x, caches = model.run_layers(tokens, positions[None], caches, topk_indices=given)
        return model.logits(x), caches

    want = jax.jit(lambda model: model(tokens, topk_indices=given))(model)
    caches = model.empty_caches(*tokens.shape)
    for part in (slice(0, 10), slice(10, 11), slice(11, 12)):
        own = tokens[:, part], np.arange(13, dtype=np.int32)[part], given[:, :, part]
        logits, caches = step(model, caches, *map(jnp.asarray, own))
        np.testing.assert_allclose(logits, want[:, part], rtol=0, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("remat", ["names", "all"])
def test_masked_tokens_cost_no_rows_and_change_no_other(remat):
    graphdef, state = nnx.split(loaded("glm4_moe", remat=remat))
    tokens = reference("glm4_moe")["tokens"]
    run = functools.partial(differentiated, graphdef, state, tokens, SEGMENTS, MASK)
    got, want = run(mask=MASK), run()
    assert_close(got[0][0][MASK], want[0][0][MASK], 1e-6)
    assert_close(got[1], want[1], 1e-5)
    sown, of_all = got[0][1], want[0][1]["topk_indices"]
    np.testing.assert_array_equal(sown["topk_indices"], np.where(MASK[None, ..., None], of_all, -1))
    np.testing.assert_array_equal(sown["group_sizes"].sum(axis=1), 2 * MASK.sum())
    # causal attention never sees padding that comes last; and what is sown is replayed
    again, _ = forward(nnx.merge(graphdef, state), tokens, mask=MASK, topk_indices=sown["topk_indices"])
    np.testing.assert_allclose(again[MASK], got[0][0][MASK], rtol=0, atol=1e-5)
    assert np.abs(got[0][0] - want[0][0])[~MASK].max() > 1e-3


@pytest.mark.parametrize("family", FEW)
def test_a_model_without_its_adapters_is_the_one_that_they_were_added_to(family):
    model, base, tokens = with_adapters(family), loaded(family), reference(family)["tokens"]

    @functools.partial(nnx.jit, static_argnames="adapters")
    def compute(model, adapters=True):
        return model(tokens, adapters=adapters), model.loss(tokens, tokens, adapters=adapters)

    want = compute(base)
    jax.tree.map(np.testing.assert_array_equal, compute(model, adapters=False), want)
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(compute(model), want, strict=True))


@pytest.mark.sweep
def test_every_adapter_is_left_out():
    """Also those of dense layers, shared experts and routers; the reference gives none a gradient."""
    model, tokens = with_adapters("glm4_moe", lora_targets=ALL_TARGETS, remat="names"), reference("glm4_moe")["tokens"]
    graphdef, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def gradients(adapters):
        def squares(adapters):
            model = nnx.merge(graphdef, adapters, rest)
            reference = model.losses(tokens, tokens, adapters=False)
            return jnp.sum(reference), jnp.sum((model.losses(tokens, tokens) - reference) ** 2)

        return [jax.grad(lambda adapters, i=i: squares(adapters)[i])(adapters) for i in range(2)]

    of_reference, of_difference = gradients(adapters)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_reference))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(of_difference))


def given(*choices):
    """Choices of 2 layers with 4 experts, for 2 rows of 3 tokens: the router's but for those of one token."""
    every = np.full((2, 2, 3, 2), -1, np.int64)
    every[1, 0, 2] = choices
    return every


ERRORS = {
    "shape": ({"topk_indices": np.zeros((3, 2, 3, 2), int)}, ValueError, "= [2, 2, 3, 2], got [3, 2, 3, 2]"),
    "axes": ({"topk_indices": np.zeros((2, 3, 2), int)}, ValueError, "topk_indices must be [L, B, S, k] = [2, 2,"),
    "none": ({"topk_indices": given(3, 4)}, ValueError, "from 0 to 3, or -1 for a choice of the router, got 4 at"),
    "below": ({"topk_indices": given(-2, 0)}, ValueError, "got -2 at [1, 0, 2, 0]."),
    "beyond int32": ({"topk_indices": given(0, 2**32 + 1)}, ValueError, "got 4294967297 at [1, 0, 2, 1]."),
    "twice": ({"topk_indices": given(3, 3)}, ValueError, "at most once, got expert 3 at [1, 0, 2] twice."),
    "twice, with a mask": ({"topk_indices": given(3, 3), "mask": np.eye(2, 3) < 1}, ValueError, "got expert 3"),
    "dtype": ({"topk_indices": np.zeros((2, 2, 3, 2))}, TypeError, "topk_indices must be an integer array, got float"),
    "adapters": ({"adapters": None}, TypeError, "adapters must be True or False, got None"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(options, error, message):
    model, tokens = loaded("glm4_moe"), np.zeros((2, 3), int)
    of_targets = (functools.partial(compute, targets=tokens) for compute in (model.losses, model.loss))
    for compute in (model, *of_targets):
        with pytest.raises(error, match=re.escape(message)):
            compute(tokens, **options)


def test_choices_of_tokens_that_do_not_count_are_not_read():
    model, tokens, mask = loaded("glm4_moe"), np.zeros((2, 3), int), np.ones((2, 3), bool)
    mask[0, 2] = False
    got, want = (model(tokens, mask=mask, topk_indices=given(*own)) for own in ((3, 3), (-1, -1)))
    np.testing.assert_array_equal(got, want)
