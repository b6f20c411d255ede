"""What jgg puts into frameworks, without them: tests/frameworks has the same inside of them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.integrations.levanter
import jgg.integrations.maxtext

E, T, H, HIDDEN, K = 4, 24, 16, 12, 2


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 4


def test_maxtext_gmm():
    lhs, rhs, sizes = normal(0, 20, H), normal(1, 2, H, HIDDEN), jnp.array([3, 5, 0, 9])
    got = jgg.integrations.maxtext.gmm(
        lhs=lhs, rhs=rhs, group_sizes=sizes, preferred_element_type=jnp.float32, tiling=(128,) * 9, group_offset=1,
        lhs_quantize_dtype=None, weight_gather_axes=[], interpret=True, partial_sum=jnp.ones((20, HIDDEN)),
    )  # fmt: skip
    want = jnp.zeros((20, HIDDEN)).at[3:8].set(lhs[3:8] @ rhs[0]) + 1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["rhs_quantize_dtype", "transpose_rhs", "use_qwix_quantization"])
def test_maxtext_gmm_refuses_what_it_does_not_do(option):
    with pytest.raises(ValueError, match=f"{option} must not be set with jgg's gmm, got True"):
        jgg.integrations.maxtext.gmm(normal(0, 20, H), normal(1, 2, H, HIDDEN), jnp.array([3, 5]), **{option: True})


class Block:
    """A test double of MaxText's RoutedMoE, with what `sparse_matmul` reads of it."""

    def __init__(self, **config):
        kind = types.SimpleNamespace(value=config.pop("decoder_block", "mistral"))
        defaults = {
            "mlp_bias": False, "load_balance_loss_weight": 0.01, "matmul_precision": "highest", "quantization": "",
            "use_ring_of_experts": False, "ragged_buffer_factor": -1.0, "mlp_activations_limit": 7.0,
        }  # fmt: skip
        self.config = types.SimpleNamespace(**defaults | config, decoder_block=kind)
        self.mesh = jax.make_mesh((1, 1), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        self.dtype, self.rngs, self.activation_fn = jnp.float32, None, jax.nn.silu
        self.is_hash_routing, self.sown = False, {}

    def _logical_to_mesh_axes(self, names):
        return jax.P({"activation_batch": ("data", "expert")}.get(names[0]), None)

    def get_topk(self, gate_logits, pre_bias_logits, rngs, input_ids, forced_routed_experts):
        weights, experts = jax.lax.top_k(gate_logits, K)
        return jax.nn.softmax(weights), experts

    def sow(self, kind, name, value):
        self.sown[name] = value

    def load_balance_loss(self, experts, probabilities):
        return jnp.sum(probabilities)

    sparse_matmul = jgg.integrations.maxtext.sparse_matmul


@pytest.mark.parametrize(
    ("decoder_block", "activation", "biased"), [("mistral", "swiglu", False), ("gpt_oss", "clamped_swiglu", True)]
)
def test_maxtext_block(decoder_block, activation, biased):
    x, logits = normal(0, 2, T // 2, H), normal(1, 2, T // 2, E)
    gate, up, down = normal(2, E, H, HIDDEN), normal(3, E, H, HIDDEN), normal(4, E, HIDDEN, H)
    biases = [normal(5, E, HIDDEN), normal(6, E, HIDDEN), normal(7, E, H)] if biased else [None] * 3
    block = Block(mlp_bias=biased, decoder_block=decoder_block)

    @jax.jit
    def run(*arrays):
        return *block.sparse_matmul(*arrays), block.sown["moe_has_overflow"]

    @jax.jit
    def by_jgg(x, logits, _, gate, up, down, *biases):
        routing = jgg.route(logits.reshape(T, E), K, score="topk_softmax")
        return jgg.moe_mlp(
            x.reshape(T, H), jnp.concatenate([gate, up], 2), down, routing, activation=activation, w_layout="ekn",
            b_gate_up=jnp.concatenate(biases[:2], 1) if biased else None, b_down=biases[2], precision="highest",
        )  # fmt: skip

    arrays = x, logits, None, gate, up, down, *biases
    (y, loss, updates, has_overflow), want = run(*arrays), by_jgg(*arrays)
    np.testing.assert_allclose(y.reshape(T, H), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, T, rtol=1e-5)
    assert updates is None
    assert not has_overflow


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization": "int8"}, "quantization must be off with jgg's sparse_matmul, got 'int8'"),
        ({"decoder_block": "llama4"}, "decoder_block must be .* got 'llama4'"),
        ({"decoder_block": "deepseek"}, r"mlp_activations_limit must be off with deepseek, got 7\.0"),
    ],
)
def test_maxtext_block_refuses_what_it_does_not_do(config, message):
    x, logits = normal(0, 2, T // 2, H), normal(1, 2, T // 2, E)
    weights = [normal(2, E, H, HIDDEN)] * 2 + [normal(4, E, HIDDEN, H)]
    with pytest.raises(ValueError, match=message):
        Block(**config).sparse_matmul(x, logits, None, *weights, None, None, None)


def test_levanter_experts():
    x, w_gate_up, w_down = normal(0, T, H), normal(1, E, H, 2 * HIDDEN), normal(2, E, HIDDEN, H)
    routing = jgg.route(normal(3, T, E), K)
    valid = jnp.arange(T) % 3 > 0
    y, dropped = jgg.integrations.levanter.moe_mlp_local(
        x, routing.topk_indices, routing.topk_weights, valid, w_gate_up, w_down, activation_fn=jax.nn.silu,
        num_experts=E,
    )  # fmt: skip
    want = jgg.moe_mlp(x, w_gate_up, w_down, routing, w_layout="ekn")
    np.testing.assert_allclose(y, jnp.where(valid[:, None], want, 0), rtol=1e-5, atol=1e-5)
    assert dropped == 0


def test_haliax_ragged_dot():
    lhs, rhs, sizes = normal(0, 20, H), normal(1, 3, H, HIDDEN), jnp.array([3, 0, 9])
    got = jgg.integrations.levanter.ragged_dot(lhs, rhs, sizes, implementation="auto")
    np.testing.assert_array_equal(got, jgg.ragged_dot(lhs, rhs, sizes))
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def summed(lhs, rhs):
        return jgg.integrations.levanter.ragged_dot(lhs, rhs, sizes, ar=True)

    specs = jax.P(None, "model"), jax.P(None, "model", None)
    summed = jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=jax.P())
    np.testing.assert_allclose(summed(lhs, rhs), got, rtol=1e-5, atol=1e-5)
