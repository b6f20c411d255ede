"""`jgg.optim.qk_clip`, and the largest logits of attention, by which it scales."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
import jgg.optim
from jgg.models.max_logits import max_logits
from tests.support.models import copied, loaded

RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 64, (2, 9))
# without norms, sinks and biases beside; norms of each head; norms of all heads; latent
FAMILIES = ("gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3")


@pytest.mark.parametrize("length", [7, 530])  # in one part and in two
@pytest.mark.parametrize("limits", ["all", "window", "not local", "chunk", "segments"])
def test_largest_logits_of_the_keys_that_queries_attend_to(length, limits):
    q, k = (RNG.normal(size=(2, length, heads, 4)).astype(np.float32) for heads in (6, 2))
    at = np.arange(length)
    segments = np.stack([at // 3, at // 5]).astype(np.int32)
    options, sees = {
        "all": ({}, True),
        "window": ({"window": 3}, at[:, None] - at < 3),
        "not local": ({"window": 3, "is_local": jnp.asarray(False)}, True),
        "chunk": ({"chunk": 4}, at[:, None] // 4 == at // 4),
        "segments": ({"segments": jnp.asarray(segments)}, segments[:, :, None] == segments[:, None]),
    }[limits]
    got = jax.jit(lambda q, k: max_logits(q, k, scale=0.3, positions=jnp.arange(length)[None], **options))(q, k)
    logits = 0.3 * np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), np.repeat(k, 3, axis=2).astype(np.float64))
    sees = np.broadcast_to(sees & (at[:, None] >= at), (2, length, length))[:, None]
    np.testing.assert_allclose(got, np.where(sees, logits, -np.inf).max(axis=(0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_logit_of_the_first_layer_is_above_the_threshold(family, tmp_path):
    """Those of the heads that were below stay; of later layers also the input has changed."""
    model = jgg.models.load(copied(family, tmp_path / family, clip_qkv=None), dtype=jnp.float32)
    before = model.max_logits(TOKENS)
    for largest in before.values():
        assert np.all(np.isfinite(largest))
    name = model.config.plan[0].name
    threshold = float(np.median(before[name][0]))
    assert threshold > 0
    jgg.optim.qk_clip(model, before, threshold)
    got, wanted = model.max_logits(TOKENS)[name][0], jnp.minimum(before[name][0], threshold)
    if model.config.plan[0].mixer.kind == "attention" and model.config.plan[0].mixer.qk_norm == "head":
        wanted = before[name][0] * threshold / jnp.max(before[name][0])  # heads share the norms' scales
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


def test_a_high_threshold_changes_nothing():
    model = loaded("gpt_oss")
    logits = model(TOKENS)

    @nnx.jit
    def clip(model, tokens):
        jgg.optim.qk_clip(model, model.max_logits(tokens), 1e6)

    clip(model, TOKENS)
    np.testing.assert_allclose(model(TOKENS), logits, rtol=1e-6, atol=1e-6)


def test_segments_are_sequences_of_their_own():
    model, segments = loaded("deepseek_v3"), np.repeat([[0, 1]], [4, 5], axis=1)
    packed = model.max_logits(TOKENS[:1], segments)
    alone = [model.max_logits(part) for part in (TOKENS[:1, :4], TOKENS[:1, 4:])]
    for name, largest in packed.items():
        np.testing.assert_allclose(largest, jnp.maximum(*(each[name] for each in alone)), rtol=1e-4)


def test_what_it_refuses():
    model = loaded("qwen3_moe")
    layers, heads = model.config.plan[0].count, model.config.plan[0].mixer.num_heads
    for logits, message in (
        ({}, r"max_logits must have \['layers'\], got \[\]"),
        ({"layers": jnp.ones((layers, heads + 1))}, rf"must be \[{layers}, {heads}\], got"),
    ):
        with pytest.raises(ValueError, match=message):
            jgg.optim.qk_clip(model, logits)
    with pytest.raises(ValueError, match="threshold must be greater than 0, got 0"):
        jgg.optim.qk_clip(model, {"layers": jnp.ones((layers, heads))}, 0)
    with pytest.raises(TypeError, match=r"model must be a jgg\.models\.Decoder"):
        jgg.optim.qk_clip(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), {})
