"""Pairs of a context and a continuation, scored in batches: the sums of the losses of each pair alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.integrations import lm_eval_batches as ours
from jgg.integrations.lm_eval_batches import Pair, batches, score
from tests.support.models import loaded, logits_of


def pairs_of(seed=0):
    """Of many lengths; some differ in their last token alone, and two are the same."""
    rng = np.random.default_rng(seed)
    pairs = [
        Pair(rng.integers(0, 64, size).tolist(), rng.integers(0, 64, more).tolist())
        for size, more in ((5, 1), (1, 1), (40, 3), (2, 33), (12, 2))
    ]
    context, (*beginning, _) = pairs[2]
    pairs += [Pair(context, [*beginning, token]) for token in (0, 1, 2)]
    return [*pairs, Pair(context + beginning[:1], [*beginning[1:], 9]), pairs[0]]


def logits_alone(model, tokens):
    """Of one sequence, [S, V]; what comes behind it has no part in them."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(logits_of(model, jnp.asarray(padded)), np.float64)[0, : len(tokens)]


def want_of(model, pairs, max_length):
    for context, continuation in pairs:
        whole = (context + continuation)[-max_length - 1 :]
        logits = logits_alone(model, whole[:-1])[-len(continuation) :]
        losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(continuation)), continuation]
        yield -losses.sum(), logits.argmax(-1).tolist() == continuation


@pytest.mark.parametrize(("size", "max_length"), [(None, 100), (2, 34)])
def test_scores_are_those_of_each_pair_alone(size, max_length):
    model, pairs = loaded("qwen3_moe"), pairs_of()
    likeliest = logits_alone(model, pairs[2].context[-max_length:])[-1].argmax()
    pairs.append(Pair(pairs[2].context, [likeliest]))
    want = list(want_of(model, pairs, max_length))
    got = dict(score(model, pairs, size, max_length))
    assert got.keys() == set(range(len(pairs)))
    np.testing.assert_allclose([got[index][0] for index in range(len(pairs))], [value for value, _ in want], rtol=1e-5)
    assert [got[index][1] for index in range(len(pairs))] == [is_greedy for _, is_greedy in want]
    assert got[len(pairs) - 1][1]


def test_pairs_that_agree_but_for_a_token_run_once(monkeypatch):
    model, run, ran = loaded("qwen3_moe"), ours._scores, []

    def scores(*arguments):
        ran.append(arguments[-1].sum(axis=1))
        return run(*arguments)

    monkeypatch.setattr(ours, "_scores", scores)
    assert len(list(score(model, [Pair([1, 2, 3], [token]) for token in range(6)], None, 100))) == 6
    assert [lengths.tolist() for lengths in ran] == [[3]]


def test_a_continuation_may_not_be_longer_than_a_sequence():
    with pytest.raises(ValueError, match="a continuation must have at most max_length, 3 tokens, got 4"):
        list(score(loaded("qwen3_moe"), [Pair([1], [1, 2, 3, 4])], None, 3))


def test_batches_have_few_shapes():
    model = loaded("qwen3_moe")
    lengths = np.random.default_rng(0).integers(1, 1000, 3000).tolist()
    made = list(batches(model, lengths, None))
    assert sorted(index for batch in made for index in batch.indices) == list(range(3000))
    assert len({(batch.rows, batch.width) for batch in made}) <= 16
    for batch in made:
        longest = max(lengths[index] for index in batch.indices)
        assert 0 <= batch.width - longest < max(32, longest / 4)
        assert len(batch.indices) <= batch.rows and batch.rows * batch.width <= 2**14
    assert [batch.rows for batch in batches(model, [7] * 5, 2)] == [2, 2, 2]
    assert [batch.rows for batch in batches(model, [7] * 5, None)] == [8]


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_rows_are_a_multiple_of_devices():
    from jgg.sharding import MoESharding

    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = loaded("qwen3_moe", sharding=MoESharding(mesh, fsdp="fsdp"))
    pairs = pairs_of()[:5]
    want, got = (dict(score(model, pairs, 3, 100)) for model in (loaded("qwen3_moe"), sharded))
    assert [batch.rows for batch in batches(sharded, [7] * 5, 3)] == [4, 4]
    for index, (value, is_greedy) in want.items():
        np.testing.assert_allclose(got[index][0], value, rtol=1e-5)
        assert got[index][1] == is_greedy
