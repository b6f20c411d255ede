"""The gated delta rule token after token: its values and gradients, and equal bits for any number of tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.launching import triton
from jgg.models.delta_rule import delta_rule, delta_rule_in_order
from tests.support.closeness import assert_close, distance
from tests.support.delta_rule import EPSILON, SCALE, SIZES, random, rule64, run, run_and_gradients
from tests.support.lowering import lower
from tests.support.marks import KERNELS


@KERNELS
@pytest.mark.parametrize("has_resets", [True, pytest.param(False, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.sweep] * (name != "short")) for name in SIZES])
def test_values_and_gradients(name, has_resets, implementation):
    arrays, resets, dy, d_state = random(SIZES[name], seed=1)
    got = run_and_gradients(arrays, resets if has_resets else None, dy, d_state, implementation, in_order=True)
    assert_close(got, rule64(arrays, resets & has_resets, dy, d_state))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1.5e-3), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("size", [SIZES["odd"], (2, 300, 2, 4, 128, 128), (2, 70, 1, 2, 256, 40)], ids=str)
def test_in_16_bits(size, dtype, tolerance):
    arrays, resets, dy, d_state = random(size, dtype=dtype)
    got = run_and_gradients(arrays, resets, dy, d_state, "triton", in_order=True)
    errors = jax.tree.map(distance, got, rule64(arrays, resets, np.asarray(dy, np.float64), d_state))
    assert max(jax.tree.leaves(errors)) < tolerance, errors


@pytest.mark.parametrize(
    ("implementation", "size", "dtype"),
    [
        pytest.param("interpret", (2, 7, 1, 2, 8, 4), "float16", marks=pytest.mark.interpret),
        pytest.param("triton", (3, 200, 2, 4, 128, 128), "bfloat16", marks=pytest.mark.gpu),
        pytest.param("triton", (3, 70, 1, 3, 48, 20), "float32", marks=pytest.mark.gpu),
    ],
)
def test_a_token_has_the_same_bits_however_many_are_beside_it(size, dtype, implementation):
    (*tokens, state), _, dy, d_state = random(size, dtype=dtype)
    state, length = state * 0, size[1]
    rule = functools.partial(run, implementation=implementation, in_order=True)
    y, last = rule([*tokens, state], None)
    with_gradients, _ = run_and_gradients([*tokens, state], None, dy, d_state, implementation, in_order=True)
    assert_equal(with_gradients, (y, last))
    alone = rule([*(array[1:2] for array in tokens), None], None)
    assert_equal(alone, (y[1:2], last[1:2]))
    # row 1 after row 0, as in packed sequences
    in_one = [array[:2].reshape(1, 2 * length, *array.shape[2:]) for array in tokens]
    packed, last_of_packed = rule([*in_one, None], (jnp.arange(2 * length) % length == 0)[None])
    assert_equal((packed[:, length:], last_of_packed), alone)
    padded = [jnp.pad(array, ((0, 0), (0, 3)) + ((0, 0),) * (array.ndim - 2)) for array in tokens]
    of_padded, last_of_padded = rule([*padded, state], None)
    assert_equal((of_padded[:, :length], last_of_padded), (y, last))
    step = functools.partial(delta_rule_in_order, scale=SCALE, epsilon=EPSILON, implementation=implementation)
    step, states = jax.jit(step), jnp.stack([state + 1, state])
    ends = [1, 2, length - 2, length - 1, length]  # pieces of one token and of more
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        piece, states = step(*(array[:, start:end] for array in tokens), states, 1)
        assert_equal(piece, y[:, start:end])
    assert_equal(states, jnp.stack([state + 1, last]))


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.thorough
def test_one_compiled_program_computes_any_number_of_tokens():
    """With and without a state before, sequences that begin later, and what the backward pass reads."""
    pytest.importorskip("jax_triton")
    triton.load()
    from jgg.kernels.delta_rule_in_order import delta_rule_in_order_kernel as kernel

    options = {"scale": SCALE, "epsilon": EPSILON, "implementation": "triton"}
    rule = functools.partial(delta_rule, in_order=True, **options)
    step = functools.partial(delta_rule_in_order, **options)

    def with_what_is_kept(*tokens, resets):
        return jax.vjp(functools.partial(rule, resets=resets), *tokens)[0]

    before = set(vars(kernel).get("_jT_kernel_cache", ()))
    with jgg.target(90):
        for batch, length in ((1, 1), (3, 16), (2, 70)):
            (*tokens, state), resets, *_ = random((batch, length, 1, 2, 32, 24), dtype="bfloat16")
            lower(rule, *tokens)
            lower(lambda resets, *tokens: with_what_is_kept(*tokens, resets=resets), resets, *tokens)
            lower(step, *tokens, jnp.stack([state, state]), jnp.int32(1))
    assert len(set(vars(kernel)["_jT_kernel_cache"]) - before) == 1


@KERNELS
def test_one_head_starts_anew_and_others_go_on(implementation):
    arrays, *_ = random((2, 5, 1, 2, 8, 4), seed=2)
    arrays[3] = arrays[3].at[0, 2, 1].set(-jnp.inf)
    got, want = (
        delta_rule_in_order(*arrays[:5], arrays[5][None], 0, scale=SCALE, epsilon=EPSILON, implementation=each)
        for each in (implementation, "xla")
    )
    assert_close(got, want)
    alone, _ = delta_rule(
        *(array[:, 2:] for array in arrays[:5]), state=None, scale=SCALE, epsilon=EPSILON, implementation="xla"
    )
    assert_close(want[0][0, 2:, 1], alone[0, :, 1])
