"""Whole models on several devices, in a process of their own; and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg
import jgg.models
from jgg.models.placement import spec_of
from jgg.sharding import MoESharding
from jgg.train.loop import num_gathering
from tests.support import processes
from tests.support.models import config_of, loaded, logits_of
from tests.support.sharded_cases import SEVERAL_GPUS, need_gpus

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


def abstract_mesh(kind=AUTO):
    return jax.sharding.AbstractMesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["few", pytest.param("others", marks=pytest.mark.sweep)])
def test_every_strategy_on_eight_devices(which):
    assert processes.run_program("run_sharded_models", which, timeout=560).splitlines()[-1] == "all right"


def test_all_but_experts_is_split_along_the_first_axis_that_divides():
    sharding = MoESharding(abstract_mesh(), fsdp="b", expert="a")
    shapes = {
        ("attention", "w_q"): ((32, 48), jax.P(("b", "a"))),
        ("attention", "w_k"): ((42, 32), jax.P(None, ("b", "a"))),
        ("attention", "w_z"): ((42, 36), jax.P(None, "b")),
        ("attention", "w_o"): ((30, 42), jax.P()),
        ("mlp", "w_down"): ((24, 32), jax.P(("b", "a"))),
        ("attention_norm",): ((32,), jax.P()),
        ("moe", "w_router"): ((32, 4), jax.P(("b", "a"))),
        ("moe", "w_down"): ((8, 8, 32), jax.P(("a", "b"), None, None)),
    }
    for path, (shape, expected) in shapes.items():
        assert spec_of(path, shape, sharding) == expected, path


def test_a_mesh_of_one_device_changes_nothing():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AUTO,))
    tokens = np.arange(12).reshape(2, 6)
    got = logits_of(loaded("qwen3_moe", sharding=MoESharding(mesh, fsdp="a")), tokens)
    np.testing.assert_allclose(got, logits_of(loaded("qwen3_moe"), tokens), rtol=0, atol=1e-5)


def test_with_batch_invariant_kernels_compute_each_devices_sequences():
    """All but the attention of the tiny head, where XLA computes all but the experts without."""
    config = jgg.models.model_config(config_of("qwen3_moe"))
    sharding, tokens = MoESharding(abstract_mesh(), data="a", expert="b"), np.zeros((8, 16), np.int32)

    def kernels(**options):
        def create():
            return jgg.models.Decoder(config, sharding=sharding, rngs=nnx.Rngs(0), **options)

        graphdef, state = nnx.split(nnx.eval_shape(create))
        lowered = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens)).trace(state).lower
        return lowered(lowering_platforms=("cuda",)).as_text().count("@triton_kernel_call")

    with jgg.target(90):
        # two norms, queries, keys and values, rotary embedding and output of a layer, the last norm, and logits
        assert kernels(batch_invariant=True) >= kernels() + 7


def test_gathers_of_experts_wait_for_stored_weights_alone():
    """Behind a barrier with x, in the backward or the forward pass, they could not overlap other layers."""
    config = jgg.models.model_config(config_of("qwen3_moe"))
    sharding, tokens = MoESharding(abstract_mesh(), data="a", fsdp="b"), np.zeros((8, 16), np.int32)

    def create():
        return jgg.models.Decoder(config, sharding=sharding, dtype="float32", remat="names", rngs=nnx.Rngs(0))

    graphdef, state = nnx.split(nnx.eval_shape(create))
    gradient = jax.jit(jax.grad(lambda state: nnx.merge(graphdef, state).loss(tokens, tokens)))
    text = gradient.trace(state).lower(lowering_platforms=("cuda",)).as_text()
    experts, *features = state["layers"]["moe"]["w_gate_up"].shape[1:]
    stored, whole = ("x".join(map(str, (count, *features))) for count in (experts // 4, experts))
    assert text.count(f"(tensor<{stored}xf32>) -> tensor<{whole}xf32>") == 2
    barriers = re.findall("optimization_barrier.*", text)
    assert barriers and not any(f"tensor<{stored}x" in line for line in barriers)


@pytest.mark.parametrize(("axes", "expected"), [({"data": "a", "fsdp": "b"}, 4), ({"data": "a", "expert": "b"}, 1)])
def test_a_trainer_knows_which_models_gather_weights(axes, expected):
    config, sharding = jgg.models.model_config(config_of("qwen3_moe")), MoESharding(abstract_mesh(), **axes)
    model = nnx.eval_shape(lambda: jgg.models.Decoder(config, sharding=sharding, rngs=nnx.Rngs(0)))
    assert num_gathering(model) == expected


@pytest.mark.gpu
@SEVERAL_GPUS
@pytest.mark.parametrize("axes", [{"fsdp": "a"}, {"expert": "a"}, {"expert": "a", "exchange": "ragged_all_to_all"}])
def test_a_sequences_bits_depend_on_no_device_and_no_other_sequence(axes):
    need_gpus(2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("a",))
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32, "num_local_experts": 8, "vocab_size": 640}
    config = jgg.models.model_config(config_of("qwen3_moe") | sizes)
    options = {"batch_invariant": True, "sharding": MoESharding(mesh, **axes)}
    model = jgg.models.Decoder(config, **options, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 640, (2, 32, 70))
    losses = nnx.jit(lambda model, *arrays: model.losses(*arrays))
    want = np.asarray(losses(model, tokens, targets))
    for rows in (rng.permutation(32), np.array([9, 30]), np.full(6, 5)):
        np.testing.assert_array_equal(losses(model, tokens[rows], targets[rows]), want[rows])
    np.testing.assert_array_equal(losses(model, tokens[:4, :33], targets[:4, :33]), want[:4, :33])


# message: (kind of axes, what splits what)
WRONG = {
    "sharding.mesh must have Auto axes, axis_types=(jax.sharding.AxisType.Auto,) * 2 of jax.make_mesh": (
        EXPLICIT,
        {"data": "a"},
    ),
    "interleaved must be True with a tensor axis": (AUTO, {"tensor": "a"}),
    "tokens must have a multiple of 4 along axis 0, the devices along 'b' of the mesh, got [2, 6]": (
        AUTO,
        {"data": "b"},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_a_mesh_cannot_split_is_refused(message):
    kind, axes = WRONG[message]
    sharding = MoESharding(abstract_mesh(kind), **axes)

    def run():
        model = jgg.models.Decoder(jgg.models.model_config(config_of("qwen3_moe")), sharding=sharding, rngs=nnx.Rngs(0))
        return model(jnp.zeros((2, 6), jnp.int32))

    with pytest.raises(ValueError, match=re.escape(message)):
        nnx.eval_shape(run)


def test_a_sharding_of_another_type_is_refused():
    with pytest.raises(TypeError, match=r"sharding must be a jgg\.sharding.MoESharding or None, got"):
        jgg.models.Decoder(jgg.models.model_config(config_of("qwen3_moe")), sharding=abstract_mesh(), rngs=nnx.Rngs(0))
