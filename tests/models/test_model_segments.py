"""Several sequences in a row give what each gives alone."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.models.token_arrays import as_segments, runs_of
from tests.support.models import FEW_FAMILIES, loaded, reference


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_sequences_that_share_a_row_give_what_each_gives_alone(family):
    model, tokens = loaded(family), jnp.asarray(reference(family)["tokens"])
    run = jax.jit(lambda model, tokens, segments=None: model(tokens, segments=segments))
    # the number 5 comes twice, for two sequences
    got = run(model, tokens, jnp.array([[5] * 4 + [2] * 8 + [5], [0] * 13]))
    # each alone, before padding, which causal attention does not see
    first, second = tokens
    alone = run(model, jnp.stack([first, jnp.roll(first, -4), jnp.roll(first, -12), second]))
    wanted = jnp.stack([jnp.concatenate([alone[0, :4], alone[1, :8], alone[2, :1]]), alone[3]])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
    assert np.abs(got[0, 4:] - reference(family)["logits"][0, 4:]).max() > 1e-2


def test_large_numbers_stay_different():
    numbers = jnp.array([[2**31, 2**32 - 1, 2**31 + 1]], jnp.uint32)
    for segments in (numbers, np.array([[-(2**31), 2**31 - 1, 0]])):
        runs, positions = runs_of(as_segments("segments", segments))
        np.testing.assert_array_equal(runs, [[1, 2, 3]])
        np.testing.assert_array_equal(positions, [[0, 0, 0]])


def test_wrong_segments_are_named():
    model, tokens = loaded("mixtral"), np.zeros((2, 3), int)
    with pytest.raises(ValueError, match=re.escape("segments must be [B, S], [2, 3], got [2, 4]")):
        model(tokens, segments=np.zeros((2, 4), int))
    with pytest.raises(TypeError, match="segments must be an integer array"):
        model(tokens, segments=np.zeros((2, 3)))
    with pytest.raises(ValueError, match=re.escape("segments must be within int32, got 4294967296 at [0, 2]")):
        model(tokens, segments=np.array([[0, 0, 2**32], [0, 0, 0]]))
