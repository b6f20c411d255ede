"""MaxText's routed experts by jgg's gmm and as a whole block: loss and every gradient against MaxText's own."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support.documents import code_of, run_code
from tests.support.frameworks import framework

pytestmark = [*framework("maxtext"), pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")]
SIZES = {
    "base_emb_dim": 64, "base_mlp_dim": 96, "base_moe_mlp_dim": 96, "base_num_query_heads": 2, "base_num_kv_heads": 2,
    "head_dim": 32, "base_num_decoder_layers": 1, "vocab_size": 128, "per_device_batch_size": 4,
    "max_target_length": 24, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
OPTIONS = {
    "run_name": "test", "enable_checkpointing": False, "model_name": "mixtral-8x7b", "override_model_config": True,
    "dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest", "float32_gate_logits": True,
    "skip_jax_distributed_system": True, "log_config": False, "sparse_matmul": True, "load_balance_loss_weight": 0.01,
}  # fmt: skip
MESHES = {
    "data": {},
    "fsdp": {"ici_fsdp_parallelism": 4, "ici_data_parallelism": 2},
    "tensor": {"ici_tensor_parallelism": 2},
    "ring of experts": {"ici_expert_parallelism": 2, "use_ring_of_experts": True},
    "ring of experts, tensor": {
        "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2, "use_ring_of_experts": True,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make(**options):
    """The function of (variables, x) that gives the loss, and these two."""
    import flax.linen as nn
    import maxtext
    from flax.linen import partitioning
    from maxtext.configs import pyconfig
    from maxtext.layers import moe
    from maxtext.layers.initializers import nd_dense_init
    from maxtext.utils import maxtext_utils

    base = Path(maxtext.__path__[0]) / "configs" / "base.yml"
    config = pyconfig.initialize([None, str(base)], **(SIZES | OPTIONS | options))
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    block = moe.get_routed_moe(
        name="block", config=config, num_experts=8, num_experts_per_tok=2, mesh=mesh, dtype=config.dtype,
        kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"), kernel_axes=("embed", "mlp"),
        intermediate_dim=config.mlp_dim,
    )  # fmt: skip
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


def replace(monkeypatch, how):
    """Puts jgg into MaxText, with the code of docs/integrations.md; returns the MaxText option that it needs."""
    from maxtext.kernels import megablox
    from maxtext.layers import moe

    for place, name in ((megablox, "gmm"), (moe.RoutedMoE, "sparse_matmul")):
        monkeypatch.setattr(place, name, getattr(place, name))  # to be put back after the test
    gmm, block = code_of("integrations.md", "MaxText")
    run_code(gmm if how == "gmm" else block)
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
    got = gradients(**replace(monkeypatch, how), **mesh)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3), got, want)


@pytest.mark.parametrize(("how", "kernels"), [("gmm", 5), ("block", 9)])
def test_lowers_for_a_gpu(how, kernels, monkeypatch):
    mesh = MESHES["ring of experts"]
    options = replace(monkeypatch, how) | {"dtype": "bfloat16", "matmul_precision": "default"} | mesh
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
    text = program(replace(monkeypatch, "block"))
    assert of_gate_and_up in text
    assert "name=mlpwi_0" in text
    assert of_copied_tokens not in text
