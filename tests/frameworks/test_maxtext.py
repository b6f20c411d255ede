"""MaxText's routed experts by jgg's gmm and as a whole block: loss and every gradient against MaxText's own."""

import functools
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them

import jgg
import jgg.integrations.maxtext
from jgg.integrations.maxtext_settings import check_settings
from tests.support import processes
from tests.support.frameworks import framework

pytestmark = [*framework("maxtext"), pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")]
SIZES = {
    "base_emb_dim": 64,
    "base_mlp_dim": 96,
    "base_moe_mlp_dim": 96,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 32,
    "base_num_decoder_layers": 1,
    "vocab_size": 128,
    "per_device_batch_size": 4,
    "max_target_length": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
OPTIONS = {
    "run_name": "test",
    "enable_checkpointing": False,
    "model_name": "mixtral-8x7b",
    "override_model_config": True,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "float32_gate_logits": True,
    "skip_jax_distributed_system": True,
    "log_config": False,
    "sparse_matmul": True,
    "load_balance_loss_weight": 0.01,
}
MESHES = {
    "data": {},
    "fsdp": {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    "tensor": {"ici_tensor_parallelism": 2},
    "ring of experts": {"ici_expert_parallelism": 2, "use_ring_of_experts": True},
    "ring of experts, tensor": {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2, "use_ring_of_experts": True},
}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def base_config():
    import maxtext

    return str(Path(maxtext.__path__[0]) / "configs" / "base.yml")


def config_of(**options):
    from maxtext.configs import pyconfig

    return pyconfig.initialize([None, base_config()], **(SIZES | OPTIONS | options))


def make(**options):
    """The function of (variables, x) that gives the loss, and these two."""
    import flax.linen as nn
    from flax.linen import partitioning
    from maxtext.layers import moe
    from maxtext.layers.initializers import nd_dense_init
    from maxtext.utils import maxtext_utils

    config = config_of(**options)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    block = moe.get_routed_moe(
        name="block",
        config=config,
        num_experts=8,
        num_experts_per_tok=2,
        mesh=mesh,
        dtype=config.dtype,
        kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", "mlp"),
        intermediate_dim=config.mlp_dim,
    )
    batch = int(config.per_device_batch_size) * jax.device_count()
    x = jax.random.normal(jax.random.key(1), (batch, config.max_target_length, 64), config.dtype)

    def in_mesh(function, *arguments):
        with mesh, partitioning.axis_rules(config.logical_axis_rules):
            return function(*arguments)

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    variables = in_mesh(lambda: nn.meta.unbox(block.init(keys, x)))

    def loss(variables, x):
        y, balance, *_ = block.apply(variables, x)
        return jnp.sum(jnp.square(y.astype(jnp.float32))) + (0 if balance is None else balance)

    return loss, variables, x, in_mesh


def gradients(**options):
    loss, variables, x, in_mesh = make(**options)
    return in_mesh(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), variables, x)


@functools.cache
def reference():
    """MaxText's loss and gradients with `jax.lax.ragged_dot`; without a ring of experts, where it cannot use that."""
    return gradients(megablox=False)


def install(monkeypatch, how):
    """Puts jgg into MaxText until the test ends; returns the MaxText option that it needs."""
    from maxtext.kernels import megablox
    from maxtext.layers import moe

    for place, name in ((megablox, "gmm"), (moe.RoutedMoE, "sparse_matmul"), (moe.RoutedMoE, "__init__")):
        monkeypatch.setattr(place, name, getattr(place, name))  # to be put back after the test
    jgg.integrations.maxtext.install(how)
    return {"megablox": how == "gmm"}


# by ragged all-to-all, which MaxText's own block cannot do on a CPU
EXCHANGED = {"ici_expert_parallelism": 2, "use_ring_of_experts": False}


@pytest.mark.parametrize(
    ("how", "mesh"),
    [pytest.param(how, mesh, id=f"{how}, {name}") for name, mesh in MESHES.items() for how in ("gmm", "block")]
    + [pytest.param("block", EXCHANGED, id="block, experts")],
)
def test_loss_and_gradients(how, mesh, monkeypatch):
    want = reference()
    got = gradients(**install(monkeypatch, how), **mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), got, want)


@pytest.mark.parametrize(("how", "kernels"), [("gmm", 5), ("block", 9)])
def test_lowers_for_a_gpu(how, kernels, monkeypatch):
    mesh = MESHES["ring of experts"]
    options = install(monkeypatch, how) | {"dtype": "bfloat16", "matmul_precision": "default"} | mesh
    loss, variables, x, in_mesh = make(**options)
    with jgg.target(90):
        traced = in_mesh(lambda: jax.jit(jax.grad(loss)).trace(variables, x))
        text = in_mesh(lambda: traced.lower(lowering_platforms=("cuda",)).as_text())
    assert text.count("triton_kernel_call") >= kernels


def test_the_block_multiplies_gate_and_up_at_once(monkeypatch):
    def program(options):
        loss, variables, x, in_mesh = make(**options)
        return str(in_mesh(jax.make_jaxpr(jax.grad(loss)), variables, x))

    rows = 2 * 32 * 24 // 8  # routed to a device
    of_gate_and_up, of_copied_tokens = f"f32[{rows},192]", f"f32[{rows},64]"
    text = program({"megablox": False})
    assert of_gate_and_up not in text
    assert of_copied_tokens in text
    text = program(install(monkeypatch, "block"))
    assert of_gate_and_up in text
    assert "name=mlpwi_0" in text
    assert of_copied_tokens not in text


@pytest.mark.parametrize("names", [(), ("mlpwi_0",), ("moe_mlpwi_0", "moe_mlpwi_1")])
def test_custom_remat_policies_find_the_pre_activation(names, monkeypatch):
    options = install(monkeypatch, "block") | {"remat_policy": "custom"} | dict.fromkeys(names, "device")
    loss, variables, x, in_mesh = make(**options)
    policy = jax.checkpoint_policies.save_only_these_names(*config_of(**options).tensors_on_device)
    saved = in_mesh(saved_residuals, jax.checkpoint(loss, policy=policy), variables, x)
    pre_activations = [aval for aval, source in saved if "argument" not in source and aval.shape[-1:] == (192,)]
    assert len(pre_activations) == min(len(names), 1)


REFUSED = [
    ("block", {"sparse_matmul": False}, "sparse_matmul must be True .*, got False"),
    ("block", {"sparse_matmul": False, "capacity_factor": 1.25}, "sparse_matmul must be True"),
    ("gmm", {"capacity_factor": 1.25}, r"capacity_factor must be -1\.0 .*, got 1\.25"),
    ("gmm", {"megablox": False}, "megablox must be True with jgg's gmm of experts, got False"),
    ("gmm", {"use_tokamax_gmm": True}, "use_tokamax_gmm must be False"),
    ("block", {"quantization": "int8"}, "quantization must be '' .*, got 'int8'"),
    ("gmm", {"quantization": "fp8"}, "quantization must be '' .*, got 'fp8'"),
    ("block", {"routed_bias": True}, "routed_bias must be False"),
    ("block", MESHES["ring of experts"] | {"num_moe_token_chunks": 2}, "num_moe_token_chunks must be 1 .*, got 2"),
    ("block", {"remat_policy": "custom", "moe_x_sorted": "device"}, "moe_x_sorted must be 'remat' .*, got 'device'"),
    ("block", {"remat_policy": "custom", "moe_mlpwi_1": "offload"}, "moe_mlpwi_1 must be as moe_mlpwi_0, 'remat'"),
    ("block", {"model_name": "llama2-7b", "num_experts": 1, "num_experts_per_tok": 1}, "num_experts must be 2 or more"),
]


@pytest.mark.parametrize(
    ("how", "options", "message"), REFUSED, ids=lambda value: "" if isinstance(value, str) else None
)
def test_settings_that_are_refused(how, options, message):
    with pytest.raises(ValueError, match=message):
        check_settings(config_of(**options), how)


@pytest.mark.parametrize("policy", ["full", "minimal", "minimal_offloaded", "save_dot_except_mlpwi", "custom"])
def test_remat_policies_that_are_not_refused(policy):
    check_settings(config_of(remat_policy=policy, moe_mlpwo="device"), "block")


def test_a_layer_is_not_made_with_settings_that_are_refused(monkeypatch):
    install(monkeypatch, "block")
    with pytest.raises(ValueError, match="sparse_matmul must be True with jgg's block of experts, got False"):
        make(sparse_matmul=False)


def test_a_log_line_says_that_jgg_computes(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "jgg"):
        gradients(**install(monkeypatch, "block"), **MESHES["ring of experts"], max_target_length=16)
    said = [record.getMessage() for record in caplog.records if record.name == "jgg"]
    assert said == [
        "jgg computes the experts of MaxText by plain JAX. On each device: x [64, 64] and w_gate_up [4, 64, 192] in "
        "float32, 2 experts for each token."
    ]


def train(module, *options, metrics_file, **settings):
    """Runs a program that trains by MaxText; returns its losses and what it writes to stderr."""
    settings = SIZES | OPTIONS | TRAINING | settings
    settings |= {"base_output_directory": metrics_file.parent, "metrics_file": metrics_file}
    given = [f"{key}={value}" for key, value in settings.items()]
    process = processes.start("-m", module, *options, base_config(), *given, DECOUPLE_GCLOUD="TRUE")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    # without the balancing loss: of several devices MaxText reports the first one's
    return [json.loads(line)["learning/lm_loss"] for line in metrics_file.read_text().splitlines()], errors


TRAINING = {
    "model_name": "qwen3-30b-a3b",
    "hardware": "cpu",
    "steps": 4,
    "jax_cache_dir": "",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_tensorboard": False,
    "per_device_batch_size": 1,
}


@pytest.mark.thorough
def test_the_command_trains_as_maxtext_does(tmp_path):
    want, said = train("maxtext.trainers.pre_train.train", metrics_file=tmp_path / "theirs.jsonl", megablox=False)
    assert len(want) == 4
    assert want[3] < want[0] - 1e-3
    assert "jgg" not in said
    for how, options in (("block", []), ("gmm", ["--experts", "gmm"])):
        file = tmp_path / f"{how}.jsonl"
        got, said = train("jgg.integrations.maxtext", *options, metrics_file=file, **MESHES["ring of experts"])
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert f"jgg computes the {'experts' if how == 'block' else 'grouped GEMMs'} of MaxText by plain JAX." in said


def test_the_command_refuses_before_it_trains(tmp_path):
    settings = OPTIONS | TRAINING | {"quantization": "int8", "base_output_directory": tmp_path}
    given = [f"{key}={value}" for key, value in settings.items()]
    process = processes.start("-m", "jgg.integrations.maxtext", base_config(), *given, DECOUPLE_GCLOUD="TRUE")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "ValueError: quantization must be '' with jgg's block of experts, got 'int8'." in errors
