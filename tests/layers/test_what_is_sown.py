"""Layers and models sow what the docstrings of their `__call__` say: names, dtypes and shapes."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.linen
import jgg.models
import jgg.nnx
from tests.support.closeness import assert_close
from tests.support.models import config_of

X, TOKENS = jnp.ones((3, 5, 8)), jnp.arange(15).reshape(3, 5)


def sown_in_nnx():
    layer = jgg.nnx.MoE(8, 16, num_experts=4, topk=2, rngs=nnx.Rngs(0))
    return layer, nnx.capture(layer, nnx.Intermediate)(X)[1]


def sown_in_linen():
    layer = jgg.linen.MoE(16, num_experts=4, topk=2)
    return layer, layer.apply(layer.init(jax.random.key(0), X), X, mutable="intermediates")[1]["intermediates"]


def sown_in_a_model():
    model = jgg.models.Decoder(jgg.models.model_config(config_of("glm4_moe")), rngs=nnx.Rngs(0))
    return model, nnx.capture(model, nnx.Intermediate)(TOKENS)[1]


@pytest.mark.parametrize("sown_in", [sown_in_nnx, sown_in_linen, sown_in_a_model])
def test_what_is_sown_is_what_the_docstring_says(sown_in):
    called = []

    def run():
        layer, sown = sown_in()
        called.append(layer)
        return {name: sown[name] for name in sown}

    sown = jax.eval_shape(run)
    # glm4_moe has three layers, the first without experts
    sizes = {"...": "3, 5", "B": "3", "S": "5", "E": "4", "k": "2", "L": "2"}
    listed = re.findall(r'^- "(\w+)", (\w+) \[(.*?)\]', inspect.getdoc(type(called[0]).__call__), re.MULTILINE)
    said = {
        name: (dtype, f"[{', '.join(sizes[size] for size in shape.split(', ') if size)}]")
        for name, dtype, shape in listed
    }
    assert said == {name: (value.dtype.name, str(list(value.shape))) for name, (value,) in sown.items()}


@pytest.mark.parametrize("given", [False, True])
def test_a_layer_s_losses_are_those_of_the_tokens_that_count(given):
    layer, mask = jgg.nnx.MoE(8, 16, num_experts=4, topk=2, rngs=nnx.Rngs(0)), np.arange(15).reshape(3, 5) % 4 > 0
    x = jax.random.normal(jax.random.key(0), X.shape)
    topk_indices = jnp.broadcast_to(jnp.array([2, 3]), (3, 5, 2)) if given else None
    y, sown = nnx.capture(layer, nnx.Intermediate)(jnp.where(mask[..., None], x, jnp.nan), topk_indices, mask=mask)
    logits = jgg.router_logits(x[mask], layer.w_router[...])
    np.testing.assert_allclose(
        sown["load_balancing_loss"][0], jgg.load_balancing_loss(logits, sown["topk_indices"][0][mask]), rtol=1e-6
    )
    np.testing.assert_allclose(sown["router_z_loss"][0], jgg.router_z_loss(logits), rtol=1e-6)
    assert_close(y[mask], layer(x, topk_indices)[mask], 1e-6)
    assert not np.any(y[~mask])
    assert sown["group_sizes"][0].sum() == 2 * mask.sum()


def test_a_mask_of_another_shape_is_named():
    layer = jgg.linen.MoE(16, num_experts=4, topk=2)
    with pytest.raises(ValueError, match=re.escape("mask must be [...] = [3, 5], got [15]")):
        layer.init(jax.random.key(0), X, mask=jnp.ones(15))
