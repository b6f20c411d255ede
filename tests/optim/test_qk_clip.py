"""`jgg.optim.qk_clip`, and the largest attention logits, which it scales by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
import jgg.optim
from jgg.core.choices import ALL_TARGETS
from jgg.models.max_logits import max_logits
from tests.support.models import copied, fill_adapters, loaded, logits_of

RNG = np.random.default_rng(11)
TOKENS = RNG.integers(0, 64, (2, 9))
# without norms, with sinks and biases; norms of each head; norms of all heads; latent
FAMILIES = ("gpt_oss", "qwen3_moe", "olmoe", "deepseek_v3")
# latent without a rank of queries; with gates; keys that are values; norms and a partial rotation; without positions
MORE_FAMILIES = tuple(
    pytest.param(family, marks=pytest.mark.sweep)
    for family in ("glm4_moe_lite", "qwen3_next", "gemma4_text", "glm4_moe", "granitemoehybrid")
)


@pytest.mark.parametrize("length", [7, 530])  # in one part and in two
@pytest.mark.parametrize("limits", ["all", "window", "not local", "chunk", "segments"])
def test_largest_logits_of_the_keys_that_queries_attend_to(length, limits):
    q, k = (RNG.normal(size=(2, length, heads, 4)).astype(np.float32) for heads in (6, 2))
    at = np.arange(length)
    segments, starts = np.stack([at // 3, at // 5]), np.stack([at // 3 * 3, at // 5 * 5])
    options, sees = {
        "all": ({}, True),
        "window": ({"window": 3}, at[:, None] - at < 3),
        "not local": ({"window": 3, "is_local": jnp.asarray(False)}, True),
        "chunk": ({"starts": jnp.asarray(at // 4 * 4)[None]}, at[:, None] // 4 == at // 4),
        "segments": ({"starts": jnp.asarray(starts)}, segments[:, :, None] == segments[:, None]),
    }[limits]
    got = jax.jit(lambda q, k: max_logits(q, k, scale=0.3, **options))(q, k)
    logits = 0.3 * np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), np.repeat(k, 3, axis=2).astype(np.float64))
    sees = np.broadcast_to(sees & (at[:, None] >= at), (2, length, length))[:, None]
    np.testing.assert_allclose(got, np.where(sees, logits, -np.inf).max(axis=(0, 2, 3)), rtol=1e-5)


def clippable(family, folder):
    """A model whose adapters, of all matrices that may have one, add as much as the matrices."""
    folder = copied(family, folder / family, clip_qkv=None)
    return fill_adapters(jgg.models.load(folder, dtype=jnp.float32, lora_rank=2, lora_targets=ALL_TARGETS), 0.5)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_no_logit_of_the_first_layer_is_above_the_threshold(family, tmp_path):
    """Those of the heads that were below stay; of later layers also the input has changed."""
    model, max_logits = clippable(family, tmp_path), jax.jit(lambda model: model.max_logits(TOKENS))
    before = max_logits(model)
    for largest in before.values():
        assert np.all(np.isfinite(largest))
    plan = next(plan for plan in model.config.plan if plan.name in before)
    first = before[plan.name][0]
    threshold = float(np.median(first))
    assert threshold > 0
    jgg.optim.qk_clip(model, before, threshold)
    wanted = jnp.minimum(first, threshold)
    if plan.mixer.kind == "attention" and plan.mixer.qk_norm == "head":
        wanted = first * threshold / jnp.max(first)  # heads share the norms' scales
    np.testing.assert_allclose(max_logits(model)[plan.name][0], wanted, rtol=1e-4)


def test_logits_that_are_not_finite_change_nothing():
    model = loaded("qwen3_moe")
    before = jax.tree.map(jnp.copy, nnx.state(model))
    shape = model.config.plan[0].count, model.config.plan[0].mixer.num_heads
    jgg.optim.qk_clip(model, {"layers": jnp.resize(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 1.0]), shape)}, 2.0)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_a_high_threshold_changes_nothing():
    model = loaded("gpt_oss")
    logits = logits_of(model, TOKENS)

    @nnx.jit
    def clip(model, tokens):
        jgg.optim.qk_clip(model, model.max_logits(tokens), 1e6)

    clip(model, TOKENS)
    np.testing.assert_allclose(logits_of(model, TOKENS), logits, rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_segments_are_sequences_of_their_own():
    model, segments = loaded("deepseek_v3"), np.repeat([[0, 1]], 4, axis=1)
    largest_of = jax.jit(lambda model, *arrays: model.max_logits(*arrays))
    packed = largest_of(model, TOKENS[:1, :8], segments)
    alone = [largest_of(model, part) for part in (TOKENS[:1, :4], TOKENS[:1, 4:8])]
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
