"""Llama 4's attention within chunks of 4 tokens: in training, in chunks of prompts, in decoding, and in packed rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg.models
from tests.support.models import config_of, copied, loaded, logits_of, reference

FAMILY, LENGTHS = "llama4", np.array([1, 5, 9])


def test_a_layer_with_chunks_does_not_see_those_before(tmp_path):
    """With experts and rotary embeddings, but in layers with chunks alone."""
    text = config_of(FAMILY)["text_config"]
    text |= {"no_rope_layers": [1, 1, 1], "layer_types": ["chunked_attention"] * 3}
    model = jgg.models.load(copied(FAMILY, tmp_path / "chunks", text_config=text), dtype=jnp.float32)
    tokens = jnp.asarray(reference(FAMILY)["tokens"])
    logits = logits_of(model, tokens)
    others = logits_of(model, tokens.at[:, :4].set(0))
    assert np.abs(logits - others)[:, 3].max() > 1e-2
    np.testing.assert_array_equal(logits[:, 4:], others[:, 4:])


@pytest.mark.sweep
@pytest.mark.parametrize("size", [3, 4])
def test_chunks_of_prompts_need_not_be_those_of_attention(size):
    expected = reference(FAMILY)
    prompts, most = expected["prompts"], expected["greedy"].shape[1]
    got = jgg.models.generate(loaded(FAMILY), prompts, most, lengths=LENGTHS, prefill_chunk=size)
    np.testing.assert_array_equal(got, expected["greedy"])


def test_each_of_several_sequences_in_a_row_has_its_own_chunks_and_temperatures():
    model, tokens = loaded(FAMILY), jnp.asarray(reference(FAMILY)["tokens"])
    run = jax.jit(lambda model, tokens, segments=None: model(tokens, segments=segments))
    got = run(model, tokens, jnp.array([[0] * 3 + [1] * 10, [0] * 13]))
    alone = run(model, jnp.stack([tokens[0], jnp.roll(tokens[0], -3)]))
    np.testing.assert_allclose(got[0], jnp.concatenate([alone[0, :3], alone[1, :10]]), rtol=0, atol=1e-4)


def test_each_mixer_says_how_many_pairs_attend():
    config = jgg.models.model_config(config_of(FAMILY))
    lengths = np.array([3, 4, 13])
    assert [own.pairs(lengths).tolist() for own in config.mixers] == [[6, 10, 31], [6, 10, 91], [6, 10, 31]]
    window = jgg.models.model_config(config_of("mixtral")).mixers[0]
    assert window.pairs(lengths).tolist() == [6, 10, 63]


def test_chunks_that_do_not_fit_the_order_of_keys_are_refused_with_batch_invariant():
    message = "batch_invariant needs chunks of attention whose size is a multiple of 512, got 4."
    with pytest.raises(ValueError, match=re.escape(message)):
        loaded(FAMILY, batch_invariant=True)
