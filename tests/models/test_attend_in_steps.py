"""Attention in a fixed order of keys: its values and gradients, in tokens' own layers and with a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How
from jgg.models import attention, flash
from jgg.models.attend_in_steps import Tokens, attend_in_steps, with_attention_gradients
from jgg.models.rotary import rotations
from tests.models.test_attend import OPTIONS, SCALE, arguments, by_definition, inputs, with_gradients
from tests.models.test_flash import (
    BACKWARD_CALLS,
    CALLS,
    as_on_a_gpu,  # noqa: F401
    calls_in,
    forward,
    lowered_for_cuda,
    stand_in,  # noqa: F401
)
from tests.support.closeness import largest_error
from tests.support.models import loaded

FEW = "causal", "segments with sinks", "window with sinks", "local", "not local"


def check(name, implementation, dtype=jnp.float32, tolerance=1e-5):
    options = dict(OPTIONS[name])
    arrays, dy = inputs(options.pop("sinks", False))
    want = with_gradients(functools.partial(by_definition, **options), arrays, dy)
    window, is_local, starts = arguments(options).values()

    def run(q, k, v, sinks):
        tokens = Tokens(q, k, v, is_local, starts, sinks)
        return attend_in_steps(How(implementation, current_target()), tokens, scale=SCALE, window=window)

    q, k, v, sinks = arrays
    got = jax.jit(functools.partial(with_gradients, run))((*(a.astype(dtype) for a in (q, k, v)), sinks), dy)
    for got_one, want_one in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert largest_error(got_one, want_one) <= tolerance


@pytest.mark.parametrize("name", FEW)
def test_values_and_gradients_are_those_of_the_definition(name):
    check(name, "xla")


@pytest.mark.parametrize("name", FEW)
def test_gradients_by_cudnn(name, stand_in):  # noqa: F811
    check(name, "xla")


def test_gradients_by_cudnn_of_a_known_result_with_fewer_features(stand_in):  # noqa: F811
    (q, k, v, _), dy = inputs(has_sinks=False)
    arrays, dy = (q, k, v[..., :8]), dy[..., :8]
    want = with_gradients(functools.partial(by_definition, sinks=None), arrays, dy)
    y, log_sums = forward(*arrays, jnp.zeros(0), scale=SCALE, is_training=True)

    def run(*arrays):
        tokens = Tokens(*arrays, None, None, None)
        return with_attention_gradients(tokens, y, log_sums.transpose(0, 2, 1), scale=SCALE)

    got = jax.jit(functools.partial(with_gradients, run))(arrays, dy)
    for got_one, want_one in zip(got, want, strict=True):
        assert largest_error(got_one, want_one) <= 1e-5


def test_gradients_by_cudnn_of_blocks_of_queries(stand_in, monkeypatch):  # noqa: F811
    monkeypatch.setattr(flash, "_QUERIES", 20)
    check("segments with sinks", "xla")


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["all", "local"])
def test_the_kernel_attends_as_the_definition_does(name):
    check(name, "interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(name, dtype):
    check(name, "triton", dtype, 0.02)


KERNELS = {"implementation": "interpret", "batch_invariant": True}


@pytest.mark.parametrize(
    ("family", "is_traced", "options"),
    [
        pytest.param("gpt_oss", False, {}, marks=pytest.mark.sweep),
        ("qwen3_moe", True, {}),
        pytest.param("gpt_oss", True, KERNELS, marks=pytest.mark.interpret),
    ],
)
def test_a_prompt_in_parts_has_the_result_of_the_whole(family, is_traced, options):
    """Of one layer; the lengths of two sequences end in different parts."""
    module = loaded(family, **options).layers.attention
    config, plan, length = module.config, module.config.plan[0], 11
    module = jax.tree.map(lambda stacked: stacked[0], module)
    x = jax.random.normal(jax.random.key(0), (2, length, config.features))
    window = plan.window
    lengths = jnp.asarray([length, 5], jnp.int32)

    def run(cache, start, own):
        positions = jnp.arange(own.shape[1], dtype=jnp.int32)[None] + start
        rotation = rotations(plan.mixer.rotary, positions)
        is_local = None if window is None else jnp.asarray(True)
        place = attention.Place(positions, rotation, jnp.int32(0), window, is_local, lengths=lengths, start=start)
        return module(own, place, cache)

    run = jax.jit(run, static_argnums=() if is_traced else 1)
    empty = attention.Attention.empty_cache(plan.mixer, 1, 2, length + 2, jnp.float32)
    whole, whole_cache = run(empty, 0, x)
    cache, parts = empty, []
    for start, end in ((0, 4), (4, 9), (9, 10), (10, 11)):
        y, cache = run(cache, start, x[:, start:end])
        parts.append(y)
    got = jnp.concatenate(parts, axis=1)
    for row, count in enumerate(lengths):
        np.testing.assert_allclose(got[row, :count], whole[row, :count], rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5), cache, whole_cache)


@pytest.mark.parametrize(("policy", "count"), [(True, 1), (False, 2)], ids=["kept", "not kept"])
def test_what_remat_keeps_decides_whether_a_gpu_attends_again(policy, count, as_on_a_gpu):  # noqa: F811
    (q, k, v, sinks), _ = inputs(has_sinks=True)
    q, k, v = (array.astype(jnp.bfloat16) for array in (q, k, v))
    names = flash.NAMES if policy else ()

    def loss(q, k, v):
        run = functools.partial(attend_in_steps, How("triton", current_target()), scale=SCALE, window=12)
        run = jax.checkpoint(run, policy=jax.checkpoint_policies.save_only_these_names(*names))
        return run(Tokens(q, k, v, jnp.asarray(True), None, sinks)).astype(jnp.float32).sum()

    with jgg.target(90):
        text = lowered_for_cuda(jax.value_and_grad(loss, (0, 1, 2)), q, k, v)
    assert text.count("triton_kernel_call") == count
    assert (calls_in(text, CALLS), calls_in(text, BACKWARD_CALLS)) == (0, 2)
