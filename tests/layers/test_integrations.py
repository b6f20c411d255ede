"""What jgg puts into frameworks, without them: tests/frameworks has the same inside of them."""

import contextlib
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
import jgg.integrations.levanter
import jgg.integrations.maxtext
from jgg.integrations import plugs
from jgg.integrations.maxtext_settings import check_settings

E, T, H, HIDDEN, K = 4, 24, 16, 12, 2


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 4


def test_maxtext_gmm():
    lhs, rhs, sizes = normal(0, 20, H), normal(1, 2, H, HIDDEN), jnp.array([3, 5, 0, 9])
    got = jgg.integrations.maxtext.gmm(
        lhs=lhs,
        rhs=rhs,
        group_sizes=sizes,
        preferred_element_type=jnp.float32,
        tiling=(128,) * 9,
        group_offset=1,
        lhs_quantize_dtype=None,
        weight_gather_axes=[],
        interpret=True,
        partial_sum=jnp.ones((20, HIDDEN)),
    )
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
            "mlp_bias": False,
            "load_balance_loss_weight": 0.01,
            "matmul_precision": "highest",
            "quantization": "",
            "use_ring_of_experts": False,
            "mlp_activations_limit": 7.0,
        }
        self.config = types.SimpleNamespace(**defaults | config, decoder_block=kind)
        self.mesh = jax.make_mesh((1, 1), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        self.dtype, self.rngs, self.activation_fn = jnp.float32, None, jax.nn.silu
        self.is_hash_routing, self.sown = False, {}

    def _logical_to_mesh_axes(self, names):
        return jax.P({"activation_batch": ("data", "expert")}.get(names[0]), None)

    def get_topk(self, gate_logits, pre_bias_logits, rngs, input_ids, forced_routed_experts):
        weights, experts = jax.lax.top_k(gate_logits, K)
        return jax.nn.softmax(weights), experts

    def get_ragged_buffer_factor(self):
        return -1.0

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
            x.reshape(T, H),
            jnp.concatenate([gate, up], 2),
            down,
            routing,
            activation=activation,
            w_layout="ekn",
            b_gate_up=jnp.concatenate(biases[:2], 1) if biased else None,
            b_down=biases[2],
            precision="highest",
        )

    arrays = x, logits, None, gate, up, down, *biases
    (y, loss, updates, has_overflow), want = run(*arrays), by_jgg(*arrays)
    np.testing.assert_allclose(y.reshape(T, H), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(loss, T, rtol=1e-5)
    assert updates is None
    assert not has_overflow


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization": "int8"}, "quantization must be '' with jgg's block of experts, got 'int8'"),
        ({"capacity_factor": 1.5}, r"capacity_factor must be -1\.0 with jgg's block of experts, got 1\.5"),
        ({"attention": "vllm_rpa"}, "attention must not be of vLLM.*, got 'vllm_rpa'"),
        ({"num_experts": 1}, "num_experts must be 2 or more with jgg's block of experts, got 1"),
        ({"decoder_block": "llama4"}, "decoder_block must be .* got 'llama4'"),
        ({"decoder_block": "deepseek"}, r"mlp_activations_limit must be off with deepseek, got 7\.0"),
        ({"custom_mesh_and_rule": "cp-as-ep"}, "custom_mesh_and_rule must not .* got 'cp-as-ep'"),
        (
            {"remat_policy": "custom", "moe_routing_maps": "offload"},
            "moe_routing_maps must be 'remat' .*, got 'offload'",
        ),
        (
            {"remat_policy": "custom", "moe_mlpwi_0": "device"},
            "moe_mlpwi_1 must be as moe_mlpwi_0, 'device', .*'remat'",
        ),
    ],
)
def test_maxtext_block_refuses_what_it_does_not_do(config, message):
    x, logits = normal(0, 2, T // 2, H), normal(1, 2, T // 2, E)
    weights = [normal(2, E, H, HIDDEN)] * 2 + [normal(4, E, HIDDEN, H)]
    with pytest.raises(ValueError, match=message):
        Block(**config).sparse_matmul(x, logits, None, *weights, None, None, None)


def test_maxtext_settings_of_other_policies_have_no_effect():
    check_settings(Block(moe_routing_maps="device", moe_mlpwi_0="device", remat_policy="full").config, "block")


@pytest.mark.parametrize(
    ("path", "replacement", "message"),
    [
        (
            "Layer.other",
            len,
            "jgg needs some_framework.Layer.other, which is not in Some 2.0. Versions known to work: 1.0",
        ),
        ("Missing.apply", len, "jgg needs some_framework.Missing.apply, which is not in Some 2.0"),
        ("Layer.apply", lambda self, y: y, r"must have the parameters \(self, y\), got \(self, x\) in Some 2.0"),
    ],
)
def test_other_versions_of_a_framework_are_named(path, replacement, message, monkeypatch, caplog):
    layer = type("Layer", (), {"apply": lambda self, x: x})
    monkeypatch.setitem(sys.modules, "some_framework", types.SimpleNamespace(Layer=layer))
    monkeypatch.setattr(plugs.importlib.metadata, "version", lambda distribution: "2.0")
    framework = plugs.Framework("Some", "some", tested=("1.0",))
    plugs.warn_once.cache_clear()
    framework.replace("some_framework", "Layer.apply", lambda self, x: x + 1)
    assert layer().apply(1) == 2
    assert caplog.messages == ["jgg was not tested with Some 2.0. Versions known to work: 1.0."]
    with pytest.raises(ImportError, match=message):
        framework.replace("some_framework", path, replacement)


def test_a_framework_that_is_not_installed():
    message = "no_framework.layers cannot be imported: .*docs/integrations.md says what to install for None"
    with pytest.raises(ImportError, match=message):
        plugs.Framework("None", "none", tested=("1.0",)).find("no_framework.layers", "Layer.apply")


@pytest.mark.parametrize(
    ("capability", "dtype", "kernels"),
    [
        (None, "bfloat16", "plain JAX"),
        (80, "bfloat16", "plain Triton kernels"),
        (90, "bfloat16", "Hopper kernels"),
        (90, "float32", "plain Triton kernels"),
    ],
)
def test_the_log_names_the_kernels_once(capability, dtype, kernels, caplog):
    plugs._log_once.cache_clear()
    x, w = jax.ShapeDtypeStruct((4096, 2048), jnp.float32), jax.ShapeDtypeStruct((64, 2048, 1536), jnp.float32)
    with caplog.at_level(logging.INFO, "jgg"), jgg.target(capability) if capability else contextlib.nullcontext():
        for _ in range(2):
            plugs.log_experts("Some", x, w, dtype, 8)
    assert [message for message in caplog.messages if message.startswith("jgg computes")] == [
        f"jgg computes the experts of Some by {kernels}. On each device: x [4096, 2048] and "
        f"w_gate_up [64, 2048, 1536] in {dtype}, 8 experts for each token."
    ]


def test_the_log_names_a_kernel_of_its_own(monkeypatch, caplog):
    config = types.SimpleNamespace(kernel="blackwell")
    monkeypatch.setattr(plugs, "choose_config", lambda *arguments: config)
    lhs, rhs = jax.ShapeDtypeStruct((40, 64), jnp.bfloat16), jax.ShapeDtypeStruct((3, 64, 48), jnp.bfloat16)
    with caplog.at_level(logging.INFO, "jgg"), jgg.target(90):
        plugs.log_grouped_gemm("Some", lhs, rhs)
    (message,) = (message for message in caplog.messages if message.startswith("jgg computes"))
    assert message.startswith("jgg computes the grouped GEMMs of Some by Blackwell kernels. On each device: rows [40,")


def test_levanter_experts():
    x, w_gate_up, w_down = normal(0, T, H), normal(1, E, H, 2 * HIDDEN), normal(2, E, HIDDEN, H)
    routing = jgg.route(normal(3, T, E), K)
    valid = jnp.arange(T) % 3 > 0
    y, dropped = jgg.integrations.levanter.moe_mlp_local(
        x,
        routing.topk_indices,
        routing.topk_weights,
        valid,
        w_gate_up,
        w_down,
        activation_fn=jax.nn.silu,
        num_experts=E,
    )
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
