"""The loss of a model without its whole logits: by target, and as one sum whose gradients come with it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg.models
from jgg.models import loss
from jgg.models.head import Head, logits_of
from tests.support.closeness import assert_close, distance
from tests.support.models import config_of, loaded, reference

HEAD = Head()


def features(dtype=jnp.float32, batch=2, length=3, seed=0):
    """x [B, S, 8], w [8, 64] and targets."""
    x_key, w_key, key = jax.random.split(jax.random.key(seed), 3)
    x, w = jax.random.normal(x_key, (batch, length, 8), dtype), jax.random.normal(w_key, (8, 64), dtype)
    return x, w, jax.random.randint(key, (batch, length), 0, 64, jnp.int32)


def one_sum(x, w, targets, weights, head=HEAD):
    return loss.loss_of(x, w, targets, weights, head, None)


def sum_of_losses(x, w, targets, weights, head=HEAD):
    return jnp.sum(weights * loss.losses_of(x, w, targets, head, None).losses)


def sum_by_logits(x, w, targets, weights, head=HEAD):
    logits = head.final(logits_of(x, w, head)) / head.temperature
    return jnp.sum(weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def divide(monkeypatch, num_parts, num_blocks, num_logits):
    """Makes parts of the tokens, whose dw is added up if there are several blocks."""
    monkeypatch.setattr(loss, "_LOGITS_BYTES", 4 * num_logits // num_parts)
    monkeypatch.setattr(loss, "_num_blocks", lambda x, w, head: num_blocks)


@pytest.mark.parametrize(
    ("head", "num_parts", "num_blocks"),
    [
        (HEAD, 1, 1),
        (HEAD, 4, 1),  # which does not divide the 7 tokens of a sequence
        (HEAD, 4, 4),
        (Head(0.5, "enk"), 4, 2),
        (Head(0.5, softcap=2.0), 4, 2),
        (Head(0.5, softcap=2.0, temperature=0.7), 4, 2),
        pytest.param(Head(implementation="interpret"), 4, 2, marks=pytest.mark.interpret),
    ],
)
def test_losses_by_parts_are_those_of_all_logits(head, num_parts, num_blocks, monkeypatch):
    x, w, targets = features(length=7)
    w = w if head.w_layout == "ekn" else w.T
    weights = jax.random.normal(jax.random.key(9), targets.shape)
    divide(monkeypatch, num_parts, num_blocks, targets.size * 64)

    def run(function):
        def scaled(x, w, weights):  # so the gradients are multiplied in the backward pass
            value = function(x, w, targets, 3 * weights, head)
            return value / 3, value

        return jax.jit(jax.value_and_grad(scaled, argnums=(0, 1, 2), has_aux=True))(x, w, weights)

    want = run(sum_by_logits)
    assert_close(run(one_sum), want)
    assert_close(run(sum_of_losses), want)
    assert_close(one_sum(x, w, targets, weights, head), want[0][0])  # without gradients


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("function", [one_sum, sum_of_losses])
def test_gradients_inside_shard_map(function, num_blocks, monkeypatch):
    """With a head that all devices share; one device has the same types as several."""
    arrays = *features(length=4), jnp.ones((2, 4))
    divide(monkeypatch, 2, num_blocks, 8 * 64)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    own = jax.shard_map(
        lambda *own: jax.lax.psum(function(*own), "data"),
        mesh=mesh,
        in_specs=(jax.P("data"), jax.P(), jax.P("data"), jax.P("data")),
        out_specs=jax.P(),
    )
    got, want = (jax.jit(jax.grad(each, argnums=(0, 1, 3)))(*arrays) for each in (own, function))
    assert_close(got, want)


@pytest.mark.parametrize(
    "head",
    [
        HEAD,
        Head(0.5, softcap=2.0),
        pytest.param(Head(implementation="interpret"), marks=pytest.mark.interpret),
        pytest.param(Head(0.5, softcap=2.0, implementation="triton"), marks=pytest.mark.gpu),
    ],
)
def test_scores_are_those_of_all_logits(head, monkeypatch):
    x, w, targets = features(length=7)
    logits = np.asarray(head.final(logits_of(x, w, head)), np.float64)
    targets = np.stack([targets, logits.argmax(-1), np.full(targets.shape, -1)], axis=-1)
    divide(monkeypatch, 4, 1, 14 * 64)
    got = jax.jit(lambda *arrays: loss.scores_of(*arrays, head, None))(x, w, jnp.asarray(targets, jnp.int32))
    want = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = np.take_along_axis(want, np.maximum(targets, 0), axis=-1)
    want[..., 2] = np.nan
    np.testing.assert_allclose(got.log_probabilities, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.is_greedy[..., 0], targets[..., 0] == targets[..., 1])
    assert got.is_greedy[..., 1].all() and not got.is_greedy[..., 2].any()


@pytest.mark.parametrize("head", [HEAD, Head(0.5, softcap=2.0, temperature=0.7)])
def test_entropies_are_those_of_all_logits(head, monkeypatch):
    x, w, targets = features(length=7)
    divide(monkeypatch, 4, 1, 14 * 64)
    logits = np.asarray(head.final(logits_of(x, w, head)), np.float64) / head.temperature
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found, pull_back = jax.vjp(lambda x: loss.losses_of(x, w, targets, head, None, True), x)
    np.testing.assert_allclose(found.entropies, -(probabilities * np.log(probabilities)).sum(-1), rtol=1e-4, atol=1e-5)
    (no_gradient,) = pull_back(loss.Found(jnp.zeros_like(found.losses), jnp.ones_like(found.losses)))
    assert not no_gradient.any()


def test_losses_at_a_temperature_are_the_sampler_s():
    model, prompts = loaded("qwen3_moe"), [[5, 6, 7], [8, 9, 0]]
    drawn = jgg.models.generate(
        model, prompts, 4, lengths=[3, 2], temperature=0.7, seeds=[1, 2], num_samples=2, details=True
    )
    rows = drawn.training_rows(prompts, [3, 2])
    call, options = nnx.capture(model.losses, nnx.Intermediate), {"temperature": 0.7, "entropies": True}
    losses, sown = call(rows.tokens, rows.targets, mask=rows.mask, **options)
    wanted = -np.asarray(rows.sampled_log_probabilities)[rows.is_new]
    np.testing.assert_allclose(np.asarray(losses)[rows.is_new], wanted, rtol=1e-4, atol=1e-5)
    assert 0 < sown["entropies"][0].min() <= sown["entropies"][0].max() < np.log(64)
    with pytest.raises(ValueError, match="temperature must be greater than 0, got 0"):
        model.losses(rows.tokens, rows.targets, temperature=0)


def test_of_equally_likely_tokens_the_first_is_greedy():
    """As `generate` decodes: the others are no result of it."""
    x, w = jnp.ones((1, 2, 4)), jnp.ones((4, 6)).at[:, 0].set(0.0)
    targets = jnp.broadcast_to(jnp.arange(6), (1, 2, 6))
    got = loss.scores_of(x, w, targets, HEAD, None)
    assert got.is_greedy[0].tolist() == [[False, True, False, False, False, False]] * 2
    np.testing.assert_allclose(got.log_probabilities[0, 0, 2:], got.log_probabilities[0, 0, 1])


def test_the_scores_of_a_model_are_its_losses():
    model, tokens = loaded("qwen3_moe"), jnp.asarray(reference("qwen3_moe")["tokens"])
    targets = jnp.roll(tokens, -1, axis=1)
    options = {"segments": jnp.arange(tokens.shape[1])[None] // 4 + 0 * tokens}
    several = model.scores(tokens, jnp.stack([tokens, targets], axis=-1), **options)
    scores = model.scores(tokens, targets, **options)
    np.testing.assert_array_equal(scores.log_probabilities, several.log_probabilities[..., 1])
    np.testing.assert_allclose(scores.log_probabilities, -model.losses(tokens, targets, **options), rtol=1e-5)
    np.testing.assert_array_equal(scores.is_greedy, model(tokens, **options).argmax(-1) == targets)
    with pytest.raises(ValueError, match=r"targets must be \[B, S\] or \[B, S, C\], C at least 1, .*, got \[1, 2\]"):
        model.scores(tokens, [[1, 2]])


def test_targets_that_the_vocabulary_lacks_have_the_loss_nan():
    x, w, _ = features()
    targets, is_known = jnp.array([[5, -100, 63], [-1, 64, 0]]), jnp.array([[1, 0, 1], [0, 0, 1]], bool)

    @jax.jit
    def run(targets, weights):
        losses, pull_back = jax.vjp(lambda x, w: loss.losses_of(x, w, targets, HEAD, None).losses, x, w)
        return pull_back(weights), losses, jax.value_and_grad(one_sum, argnums=(0, 1))(x, w, targets, weights)

    weights = is_known.astype(jnp.float32)
    (gradients, losses, own), (*wanted, want) = run(targets, weights), run(jnp.where(is_known, targets, 0), weights)
    np.testing.assert_array_equal(losses, np.where(is_known, wanted[1], np.nan))
    # what has no weight has no part in them
    jax.tree.map(np.testing.assert_array_equal, (gradients, own), (wanted[0], want))
    d_weights = jax.jit(jax.grad(one_sum, argnums=3))(x, w, targets, weights)
    np.testing.assert_array_equal(d_weights, np.where(is_known, losses, 0))
    (dx, _), _, (value, (own_dx, _)) = run(targets, jnp.ones((2, 3)))
    assert np.isnan(value)
    for each in (dx, own_dx):
        np.testing.assert_array_equal(np.isnan(each).all(axis=-1), ~is_known)


def test_the_default_is_the_mean_and_weights_may_be_bools():
    model, tokens = loaded("mixtral"), jnp.asarray(reference("mixtral")["tokens"])
    losses = model.losses(tokens, tokens)
    np.testing.assert_allclose(model.loss(tokens, tokens), losses.mean(), rtol=1e-6)
    is_learned = np.arange(tokens.shape[1]) > np.array([[3], [5]])
    got, sown = nnx.capture(model.loss, nnx.Intermediate)(tokens, tokens, weights=is_learned)
    np.testing.assert_allclose(got, losses[is_learned].sum(), rtol=1e-6)
    assert "load_balancing_loss" in sown
    assert model.loss(tokens[:, :0], tokens[:, :0]) == 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_tokens_have_no_gradient(shape):
    x, w, targets = features(batch=shape[0], length=shape[1])
    value, (dx, dw) = jax.value_and_grad(one_sum, argnums=(0, 1))(x, w, targets, jnp.zeros(shape))
    assert value == 0
    assert dx.shape == x.shape
    np.testing.assert_array_equal(dw, jnp.zeros_like(w))


def test_weights_may_be_smaller_than_float16_can_hold_times_probabilities():
    """Of 2,048 words most have probabilities about 2^-11, which times 2^-14 is half of the least float16."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (1, 256, 8), jnp.float16), jax.random.normal(keys[1], (8, 2048), jnp.float16) / 8
    targets, weights = jax.random.randint(keys[2], (1, 256), 0, 2048, jnp.int32), jnp.full((1, 256), 2.0**-14)
    run = jax.jit(jax.grad(lambda w, x, function: function(x, w, targets, weights)), static_argnums=2)
    got, before = (run(w, x, function) for function in (one_sum, sum_of_losses))
    want = run(w.astype(jnp.float32), x.astype(jnp.float32), one_sum)
    assert got.dtype == jnp.float16
    assert distance(got, want) < 5e-3
    assert distance(before, want) > 5 * distance(got, want)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("function", [one_sum, sum_of_losses])
def test_a_frozen_head_has_no_gradient_in_the_program(function, num_blocks, monkeypatch):
    divide(monkeypatch, 2, num_blocks, 4 * 64)
    arrays = *features(length=2), jnp.ones((2, 2))

    def program(argnums):
        return jax.jit(jax.grad(function, argnums=argnums)).lower(*arrays).as_text()

    of_logits = 1 if function is one_sum else 2  # computed again in the backward pass
    assert program(0).count("dot_general") == of_logits + 1
    assert program((0, 1)).count("dot_general") == of_logits + 2
    kept = f"{2 // num_blocks}x2x1x64xf32"
    assert kept in program((0, 1))
    assert kept not in program(0)


def test_without_gradients_there_are_only_losses():
    assert jax.jit(one_sum).lower(*features(), jnp.ones((2, 3))).as_text().count("dot_general") == 1


@pytest.mark.parametrize("function", [one_sum, sum_of_losses])
def test_gradients_of_gradients(function):
    x, w, targets = features()
    weights = jax.random.normal(jax.random.key(9), targets.shape)

    def square(function, x, w):
        return sum(jnp.sum(own**2) for own in jax.grad(function, argnums=(0, 1))(x, w, targets, weights))

    run = jax.jit(jax.grad(square, argnums=(1, 2)), static_argnums=0)
    assert_close(run(function, x, w), run(sum_by_logits, x, w))


def test_a_batch_of_losses():
    arrays = [jnp.stack(each) for each in zip(*(features(seed=seed) for seed in range(3)), strict=True)]
    weights = jax.random.normal(jax.random.key(9), (3, 2, 3))
    run = jax.value_and_grad(one_sum, argnums=(0, 1, 3))
    want = [run(*(each[n] for each in arrays), weights[n]) for n in range(3)]
    assert_close(jax.jit(jax.vmap(run))(*arrays, weights), jax.tree.map(lambda *each: jnp.stack(each), *want))


def test_blocks_of_parts_take_no_more_memory_than_two_heads(monkeypatch):
    """The gradients of 4,096 tokens' logits are 2^20 bytes, two heads 2^12, and a block is of whole parts."""
    x, w = jnp.zeros((2, 2048, 8)), jnp.zeros((8, 64))
    for most, blocks in ((2**20, 1), (2**19, 2), (3 * 2**17, 4), (1, 256)):
        monkeypatch.setattr(loss, "_LOGITS_BYTES", most)
        assert loss._num_blocks(x, w, HEAD) == blocks
        assert loss._num_parts(x, 64) % blocks == 0


def test_the_whole_logits_never_exist():
    """And the gradients of logits, which dw needs, only where they take little memory compared with the head."""
    config = jgg.models.model_config(config_of("qwen3_moe") | {"vocab_size": 2**15})
    make = functools.partial(jgg.models.Decoder, config, param_dtype=jnp.bfloat16)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    tokens = jnp.zeros((4, 4096), jnp.int32)
    most = loss._LOGITS_BYTES
    assert 2 * 4 * config.features * config.vocabulary < most
    for compute in (jgg.models.Decoder.loss, lambda model, *tokens: model.losses(*tokens).mean()):
        gradient = jax.grad(lambda state, compute=compute: compute(nnx.merge(graphdef, state), tokens, tokens))
        kept = {v.aval for v in every_variable(jax.make_jaxpr(gradient)(state).jaxpr) if v.aval.shape}
        assert max(a.size * a.dtype.itemsize for a in kept if a.shape[-1] == config.vocabulary) <= most


def every_variable(jaxpr):
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda each: hasattr(each, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from every_variable(getattr(inner, "jaxpr", inner))


def test_wrong_targets_and_weights_are_named():
    model, tokens = loaded("mixtral"), np.zeros((2, 3), int)
    for compute in (model.losses, model.loss):
        with pytest.raises(ValueError, match=re.escape("targets must be [B, S], [2, 3], got [2, 4]")):
            compute(tokens, np.zeros((2, 4), int))
        with pytest.raises(TypeError, match="targets must be an integer array"):
            compute(tokens, np.zeros((2, 3)))
        with pytest.raises(ValueError, match=re.escape("mask must be [B, S] = [2, 3], got [3]")):
            compute(tokens, tokens, mask=np.ones(3))
    for unknown in (-100, -1, 64):
        message = f"targets must be ids from 0 to 63, the last of the model's vocabulary, got {unknown} at [1, 2]."
        with pytest.raises(ValueError, match=re.escape(message)):
            model.losses(tokens, [[0, 0, 0], [0, 0, unknown]])
    with pytest.raises(ValueError, match=re.escape("weights must be [B, S], [2, 3], got [3]")):
        model.loss(tokens, tokens, weights=np.ones(3))
    with pytest.raises(TypeError, match="weights must be an array of real numbers, got complex64"):
        model.loss(tokens, tokens, weights=np.ones((2, 3), np.complex64))
