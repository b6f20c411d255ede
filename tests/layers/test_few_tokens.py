"""Layers of quantized experts give for few tokens what they give for many."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.quantized import as_dense
from jgg.layers import MoELayer
from tests.support.closeness import assert_close, largest_error

E, H, HIDDEN, K = 12, 256, 128, 3
LAYER = MoELayer(
    in_features=H,
    hidden_features=HIDDEN,
    num_experts=E,
    topk=K,
    use_bias=True,
    lora_rank=2,
    lora_targets=("w_gate_up",),
)


def make_params(layer, **experts):
    shapes = layer.shapes | layer.adapter_shapes
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for name, shape in shapes.items()}
    return params | {name: jgg.quantize_weights(params[name]) for name in ("w_gate_up", "w_down")}


@functools.partial(jax.jit, static_argnums=0, static_argnames="quantization")
def apply(layer, params, x, quantization=None):
    return layer.apply(params, x, quantization=quantization)


def tokens(count):
    return jnp.asarray(np.random.default_rng(count).normal(size=(count, H)), jnp.float32)


@pytest.mark.parametrize(
    ("count", "rank", "quantization"), [(1, None, None), (1, 2, jgg.Fp8()), (3, 2, None), (3, None, jgg.Fp8())]
)
def test_few_tokens_give_what_each_gives_among_many(count, rank, quantization):
    layer = LAYER if rank else dataclasses.replace(LAYER, lora_rank=None, lora_alpha=None)
    params, x = make_params(layer), tokens(count)
    many = jnp.concatenate([x, tokens(E)])
    got, metrics = apply(layer, params, x, quantization=quantization)
    want, _ = apply(layer, params, many, quantization=quantization)
    assert largest_error(got, want[:count]) < (1e-5 if quantization is None else 0.01)
    assert metrics.group_sizes.shape == (E,) and metrics.group_sizes.sum() == count * K


@pytest.mark.sweep
def test_choices_from_outside_and_gradients():
    params, x = make_params(LAYER), tokens(2)
    choices = jnp.array([[7, 7, 2], [-1, 0, 11]])
    dense = params | {name: as_dense(name, params[name], jnp.float32) for name in ("w_gate_up", "w_down")}

    @jax.jit
    def run(params):
        def total(x, a):
            return LAYER.apply(params | {"w_gate_up_lora_a": a}, x, topk_indices=choices)[0].sum()

        return jax.value_and_grad(total, (0, 1))(x, params["w_gate_up_lora_a"])

    assert_close(run(params), run(dense), 1e-5)


def test_rows_of_no_expert_add_nothing():
    params, x = make_params(LAYER), tokens(1)
    logits = np.full((1, E), -np.inf, np.float32)
    logits[0, 4] = 0  # the other choices have weights of zero
    own = params | {"w_router": jnp.zeros((H, E)), "b_router": jnp.asarray(logits[0])}
    layer = dataclasses.replace(LAYER, use_router_bias=True)
    y, _ = apply(layer, own, x)
    dense = own | {name: as_dense(name, own[name], jnp.float32) for name in ("w_gate_up", "w_down")}
    assert_close(y, apply(layer, dense, x)[0], 1e-5)
