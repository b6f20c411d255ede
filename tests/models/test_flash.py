"""`flash_attention` around a plain stand-in for cuDNN, and the programs that JAX makes of it for a GPU."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them

import jgg
import jgg.models
from jgg.models import attend, attend_in_steps, flash
from tests.models.test_attend import OPTIONS, arguments, by_definition, check, inputs, with_gradients
from tests.support.closeness import largest_error
from tests.support.models import config_of


def _logits(q, k, bias, scale):
    """Logits [B, heads, queries, keys] of causal attention, or of a bias."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    return jnp.where(np.tri(q.shape[1], dtype=bool), logits, -jnp.inf) if bias is None else logits + bias


def forward(q, k, v, bias, *_, scale, is_training, **__):
    """The first primitive."""
    assert is_training
    logits = _logits(q, k, bias if bias.size else None, scale)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v), jax.nn.logsumexp(logits, axis=-1)


def backward(q, k, v, bias, *others, scale, **_):
    """The second primitive: the gradients by flash attention's formula, for a result and statistics that are given."""

    *_, log_sums, y, dy = others

    def of_kv(array):
        return array.reshape(*k.shape[:3], -1, array.shape[3]).sum(axis=3)

    k_all, v_all = (jnp.repeat(array, q.shape[2] // k.shape[2], axis=2) for array in (k, v))
    p = jnp.exp(_logits(q, k, bias if bias.size else None, scale) - log_sums[..., None])
    products = jnp.einsum("bqhd,bqhd->bhq", dy, y)[..., None]
    ds = p * (jnp.einsum("bqhd,bkhd->bhqk", dy, v_all) - products) * scale
    dk, dv = jnp.einsum("bhqk,bqhd->bkhd", ds, q), jnp.einsum("bhqk,bqhd->bkhd", p, dy)
    return jnp.einsum("bhqk,bkhd->bqhd", ds, k_all), of_kv(dk), of_kv(dv)


@pytest.fixture
def stand_in(monkeypatch):
    stand_ins = {flash._FORWARD: forward, flash._BACKWARD: backward}
    for name, function in stand_ins.items():
        monkeypatch.setattr(flash._jax, name, types.SimpleNamespace(bind=function))
    monkeypatch.setattr(attend, "choose", lambda *_, **__: attend.Way.FLASH)
    monkeypatch.setattr(attend_in_steps, "choose", lambda *_, **__: attend.Way.FLASH)


@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_are_those_of_the_definition(name, stand_in):
    check(name, jnp.float32, 1e-5)


def test_blocks_of_queries_within_segments(stand_in, monkeypatch):
    monkeypatch.setattr(flash, "_QUERIES", 20)
    check("segments with sinks", jnp.float32, 1e-5)


def test_on_hopper_values_of_fewer_features_are_not_padded(stand_in, monkeypatch):
    monkeypatch.setattr(flash, "takes_fewer_values", lambda: True)
    monkeypatch.setattr(attend, "padded", None)
    monkeypatch.setattr(attend, "known_gpu", lambda: 90)
    (q, k, v, sinks), dy = inputs(has_sinks=True)
    arrays, dy = (q, k, v[..., :8]), dy[..., :8]
    want = with_gradients(functools.partial(by_definition, sinks=sinks), arrays, dy)
    run = functools.partial(attend.attend, scale=0.25, sinks=sinks)
    got = jax.jit(functools.partial(with_gradients, run))(arrays, dy)
    for got_one, want_one in zip(got, want, strict=True):
        assert largest_error(got_one, want_one) <= 1e-5


def test_infinite_sinks_take_nothing_or_all(stand_in):
    (q, k, v, _), dy = inputs(has_sinks=True)

    @jax.jit
    def run(sinks):
        y, pull_back = jax.vjp(lambda *arrays: attend.attend(*arrays, scale=0.25, sinks=sinks), q, k, v)
        return y, *pull_back(dy)

    got, without = run(jnp.asarray([-jnp.inf, jnp.inf, -3e38, 3e38])), run(None)
    of_sinks = [False, True, False, True]  # heads 0 and 1 share keys, and so do 2 and 3
    np.testing.assert_array_equal(got[0][:, :, ::2], without[0][:, :, ::2])
    np.testing.assert_allclose(got[1][:, :, ::2], without[1][:, :, ::2], rtol=0, atol=1e-6)
    assert not got[0][:, :, of_sinks].any() and not got[1][:, :, of_sinks].any()
    assert all(np.isfinite(array).all() for array in got)


def test_vmap_and_grad_of_grad_where_there_is_no_gpu():
    arrays, dy = inputs(has_sinks=True)
    q, k, v, sinks = (array[:1, :8] if array.ndim == 4 else array for array in arrays)

    def loss(sinks):
        return jnp.sum(attend.attend(q, k, v, scale=0.25, sinks=sinks) * dy[:1, :8])

    less, more = jax.jit(jax.vmap(jax.grad(loss)))(jnp.stack([sinks - 0.01, sinks + 0.01]))
    second = jax.jit(jax.grad(lambda sinks: jnp.sum(jax.grad(loss)(sinks))))(sinks)
    np.testing.assert_allclose(second, (more - less) / 0.02, rtol=0.02, atol=1e-3)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def lowered_for_cuda(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


CALLS = "__cudnn$fmhaSoftmax(", "__cudnn$fmhaScaleBiasSoftmax("
BACKWARD_CALLS = "__cudnn$fmhaSoftmaxBackward(", "__cudnn$fmhaScaleBiasSoftmaxBackward("


def calls_in(text, names):
    return sum(text.count(f"@{name}") for name in names)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_for_a_gpu_calls_cudnn_and_multiplies_nothing_itself(name, as_on_a_gpu):
    options = dict(OPTIONS[name])
    (q, k, v, sinks), dy = inputs(options.pop("sinks", False))
    run = functools.partial(attend.attend, scale=0.25, sinks=sinks, **arguments(options))

    def with_gradients(dy, *arrays):
        y, pull_back = jax.vjp(run, *arrays)
        return y, pull_back(dy)

    text = lowered_for_cuda(with_gradients, *(array.astype(jnp.bfloat16) for array in (dy, q, k, v)))
    branches = 2 if "is_local" in options and name != "window past the end" else 1
    assert "dot_general" not in text
    assert (calls_in(text, CALLS), calls_in(text, BACKWARD_CALLS)) == (branches, branches)


def test_a_layer_with_a_window_or_none_keeps_its_result_once(as_on_a_gpu):
    (q, k, v, sinks), _ = inputs(has_sinks=True)
    q, k, v = (array.astype(jnp.bfloat16) for array in (q, k, v))
    run = functools.partial(attend.attend, scale=0.25, sinks=sinks, window=12, is_local=jnp.asarray(True))
    policy = jax.checkpoint_policies.save_only_these_names(*flash.NAMES)
    kept = saved_residuals(jax.checkpoint(run, policy=policy), q, k, v)
    shapes = [(aval.shape, aval.dtype) for aval, source in kept if "argument" not in source and aval.ndim > 2]
    assert sorted(shapes, key=str) == [(q.shape[:3], jnp.float32), (q.shape, jnp.bfloat16)]


def test_an_odd_length_trains_by_cudnn_without_a_mask(as_on_a_gpu):
    (q, k, v, _), _ = inputs(has_sinks=False)
    q, k, v = (array[:, :-1].astype(jnp.bfloat16) for array in (q, k, v))
    text = lowered_for_cuda(jax.grad(lambda q: attend.attend(q, k, v, scale=0.25).astype(jnp.float32).sum()), q)
    assert (calls_in(text, CALLS), calls_in(text, BACKWARD_CALLS)) == (1, 1)


@pytest.mark.parametrize(("remat", "count"), [("none", 1), ("attention", 1), ("names", 2), ("all", 2)])
def test_what_remat_keeps_decides_whether_a_gpu_attends_again(remat, count, as_on_a_gpu):
    config = jgg.models.model_config(config_of("qwen3_moe") | {"head_dim": 16})
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    make = functools.partial(jgg.models.Decoder, config, remat=remat, implementation="xla")
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

    def loss(state, tokens):
        return nnx.merge(graphdef, state).losses(tokens, tokens).mean()

    text = lowered_for_cuda(jax.grad(loss), state, tokens)
    assert (calls_in(text, CALLS), calls_in(text, BACKWARD_CALLS)) == (count, 1)


def test_this_jax_has_the_primitives():
    assert flash.is_available()
