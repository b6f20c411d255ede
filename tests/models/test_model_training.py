"""Whole models learn as those of transformers do, with every option of training."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg
import jgg.hf
import jgg.models
from jgg.nnx import Frozen
from tests.support import digests
from tests.support.closeness import assert_close
from tests.support.marks import thorough_but
from tests.support.models import FAMILIES, FEW_FAMILIES, config_of, loaded, logits_of, reference


def loss_of(model, tokens):
    """The mean loss of each next token."""
    tokens = jnp.asarray(tokens)
    return model.loss(tokens[:, :-1], tokens[:, 1:])


def loss_and_gradients(model, tokens, kind=nnx.Param):
    graphdef, trained, rest = nnx.split(model, kind, ...)
    run = jax.jit(jax.value_and_grad(lambda trained, rest: loss_of(nnx.merge(graphdef, trained, rest), tokens)))
    return run(trained, rest)


@functools.cache
def plain_gradients(family):
    return loss_and_gradients(loaded(family), reference(family)["tokens"])


@pytest.mark.parametrize("family", thorough_but(("gpt_oss", "glm4_moe"), FAMILIES, pytest.mark.sweep))
def test_the_loss_and_all_gradients_are_those_of_transformers(family, tmp_path):
    expected, model = reference(family), loaded(family)
    loss, gradients = plain_gradients(family)
    np.testing.assert_allclose(loss, expected["loss"], rtol=0, atol=1e-4)
    nnx.update(model, gradients)
    jgg.models.save(model, tmp_path / "gradients")  # by the names of the folder's tensors
    named = {name: array for name, array in jgg.hf.Checkpoint(tmp_path / "gradients").items() if "e_score" not in name}
    digests.assert_close(named, expected["gradients"])


@pytest.mark.sweep
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_steps_of_adamw_are_those_of_transformers(family):
    model, expected = loaded(family), reference(family)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        gradients = nnx.grad(loss_of)(model, expected["tokens"])
        with jax.numpy_dtype_promotion("standard"):  # of optax
            optimizer.update(model, gradients)
        return loss_of(model, expected["tokens"])

    losses = [step(model, optimizer) for _ in expected["losses"]]
    assert losses[-1] < expected["loss"] - 0.01
    np.testing.assert_allclose(losses, expected["losses"], rtol=0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", [pytest.param("names", marks=pytest.mark.sweep), "all"])
@pytest.mark.parametrize("family", ["glm4_moe"])
def test_frozen_experts_and_rematerialization_change_no_gradient(family, remat):
    """Experts are frozen in the program before, from which the next one must take nothing but what is the same."""
    tokens, wanted = reference(family)["tokens"], plain_gradients(family)
    beside_experts = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("w_gate_up")))
    for kind in [beside_experts] * (remat == "all") + [nnx.Param]:
        loss, gradients = loss_and_gradients(loaded(family, remat=remat if kind is nnx.Param else "none"), tokens, kind)
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-6)
        flat = dict(nnx.to_flat_state(wanted[1]))
        for path, gradient in nnx.to_flat_state(gradients):
            np.testing.assert_allclose(gradient[...], flat[path][...], rtol=0, atol=1e-5, err_msg=str(path))


def test_an_unrolled_scan_computes_the_same():
    expected = reference("gpt_oss")  # whose layers have windows of their own
    logits = logits_of(loaded("gpt_oss", unroll=2), expected["tokens"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize(("unroll", "remat"), [(2, "all"), (9, "none")])
def test_an_unrolled_scan_learns_the_same(unroll, remat):
    family = "gpt_oss"
    model, expected = loaded(family, unroll=unroll, remat=remat), reference(family)
    loss, gradients = loss_and_gradients(model, expected["tokens"])
    wanted = plain_gradients(family)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), gradients, wanted[1])


def test_rematerialization_keeps_less():
    tokens = reference("qwen3_moe")["tokens"]

    def kept(remat):
        graphdef, state = nnx.split(loaded("qwen3_moe", remat=remat))
        of_state = lambda state: loss_of(nnx.merge(graphdef, state), tokens)  # noqa: E731
        _, pull_back = jax.eval_shape(functools.partial(jax.vjp, of_state), state)
        return sum(leaf.size for leaf in jax.tree.leaves(pull_back))

    assert kept("all") < kept("names") < kept("attention") < kept("none")


def gradients_of_adapters(graphdef, tokens, own, rest):
    return jax.grad(lambda own: loss_of(nnx.merge(graphdef, own, rest), tokens))(own)


def test_what_a_layer_takes_is_kept_on_the_host():
    """With the gradients of remat="all", bit for bit."""
    tokens, programs = reference("qwen3_moe")["tokens"], {}
    for remat in ("all", "offload"):
        graphdef, *states = nnx.split(loaded("qwen3_moe", remat=remat, lora_rank=2), nnx.LoRAParam, ...)
        compute = functools.partial(gradients_of_adapters, graphdef, tokens)
        programs[remat] = jax.jit(compute).trace(*states)
    jax.tree.map(np.testing.assert_array_equal, *(own.lower().compile()(*states) for own in programs.values()))
    batch, length = tokens.shape
    kept = {remat: re.findall(r"f32<host>\[([\d,]+)\] = scan", str(own.jaxpr)) for remat, own in programs.items()}
    assert kept == {"all": [], "offload": [f"2,{batch},{length - 1},32"]}


@pytest.mark.parametrize(("family", "waits"), [("qwen3_next", True), ("qwen3_moe", False)])
def test_layers_of_a_period_are_computed_again_one_after_the_other(family, waits):
    graphdef, state = nnx.split(loaded(family, remat="all"))
    program = jax.make_jaxpr(lambda state: loss_of(nnx.merge(graphdef, state), reference(family)["tokens"]))(state)
    assert ("prevent_cse=False" not in str(program)) == waits  # as the programs of other parts never are


@pytest.mark.sweep
def test_rematerialization_saves_memory_without_a_loop_too():
    tokens, sizes = jnp.zeros((4, 256), jnp.int32), {"num_hidden_layers": 4, "hidden_size": 128, "head_dim": 64}
    config = jgg.models.model_config(config_of("qwen3_moe") | sizes)

    def temporaries(remat):
        model = jgg.models.Decoder(config, dtype=jnp.float32, remat=remat, unroll=4, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(model)
        step = jax.jit(jax.grad(lambda state: loss_of(nnx.merge(graphdef, state), tokens)))
        return step.lower(state).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("all") < 0.7 * temporaries("none")


def test_what_the_experts_sow_is_stacked_over_their_layers():
    model, tokens = loaded("glm4_moe"), reference("glm4_moe")["tokens"]
    _, sown = nnx.capture(model, nnx.Intermediate)(tokens)
    values = {name: value[0] for name, value in nnx.to_pure_dict(sown).items()}
    assert values["load_balancing_loss"].shape == values["router_z_loss"].shape == (2,)
    assert values["topk_indices"].shape == (2, *tokens.shape, 2)
    np.testing.assert_array_equal(values["group_sizes"].sum(axis=1), 2 * tokens.size)
    assert "load_balancing_loss" not in vars(model)


@functools.partial(jax.jit, static_argnums=1)
def losses_of_routers(state, graphdef, tokens, segments, mask):
    """(the sum of all routers' losses, the losses of the tokens as targets), and the gradient of the sum."""

    def run(state):
        model = nnx.merge(graphdef, state)
        losses, sown = nnx.capture(model.losses, nnx.Intermediate)(tokens, tokens, segments, mask=mask)
        return sown["load_balancing_loss"][0].sum() + sown["router_z_loss"][0].sum(), losses

    return jax.value_and_grad(run, has_aux=True)(state)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["none", pytest.param("all", marks=pytest.mark.sweep)])
def test_masked_tokens_count_in_no_loss_of_the_routers(remat):
    graphdef, state = nnx.split(loaded("glm4_moe", remat=remat))
    tokens = reference("glm4_moe")["tokens"]
    # the second row has 4 tokens and 9 of padding, which are a segment of their own; a row has both without padding
    segments, mask = np.array([[1] * 13, [1] * 4 + [0] * 9]), np.array([[1] * 13, [1] * 4 + [0] * 9])
    packed = np.concatenate([tokens[0], tokens[1, :4]])[None]
    of_packed = np.array([[1] * 13 + [2] * 4])
    (got, losses), gradients = losses_of_routers(state, graphdef, tokens, segments, mask)
    (want, of_targets), wanted = losses_of_routers(state, graphdef, packed, of_packed, None)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(losses[mask > 0], of_targets[0], rtol=1e-4)
    assert_close(gradients, wanted, 1e-4)
    all_count = losses_of_routers(state, graphdef, tokens, segments, np.ones_like(mask))
    assert abs(all_count[0][0] - want) > 1e-2 * want


@pytest.mark.thorough
def test_adapters_of_attention_and_experts_learn_and_merge(tmp_path):
    model, tokens = loaded("glm4_moe", lora_rank=2, lora_alpha=3.0), reference("glm4_moe")["tokens"]
    np.testing.assert_allclose(logits_of(model, tokens), reference("glm4_moe")["logits"], rtol=0, atol=1e-4)
    loss, gradients = loss_and_gradients(model, tokens, nnx.LoRAParam)
    names = {".".join(path) for path, _ in nnx.to_flat_state(gradients)}
    attention = {f"attention.w_{name}_lora_{part}" for name in "qkvo" for part in "ab"}
    down = {f"w_{name}_lora_{part}" for name in ("gate_up", "down") for part in "ab"}
    of_layers = {"dense_layers": {f"mlp.{name}" for name in down}, "layers": {f"moe.{name}" for name in down}}
    assert names == {f"{stack}.{name}" for stack, own in of_layers.items() for name in attention | own}
    nnx.update(model, jax.tree.map(lambda b, gradient: b - 0.5 * gradient, nnx.state(model, nnx.LoRAParam), gradients))
    learned = logits_of(model, tokens)
    assert -np.take_along_axis(jax.nn.log_softmax(learned[:, :-1]), tokens[:, 1:, None], -1).mean() < loss - 1e-3
    with pytest.raises(ValueError, match=r"lora_b must be zero, as merge_adapters\(\) leaves it, to be saved"):
        jgg.models.save(model, tmp_path / "merged")
    model.merge_adapters()
    np.testing.assert_allclose(logits_of(model, tokens), learned, rtol=0, atol=1e-4)
    jgg.models.save(model, tmp_path / "merged")
    merged = jgg.models.load(tmp_path / "merged", dtype=jnp.float32)
    np.testing.assert_allclose(logits_of(merged, tokens), learned, rtol=0, atol=1e-4)


def test_only_the_matrices_that_are_asked_for_have_adapters():
    model = loaded("qwen3_moe", lora_rank=2, lora_targets=("w_q", "w_v"))
    names = {path[-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    assert names == {"w_q_lora_a", "w_q_lora_b", "w_v_lora_a", "w_v_lora_b"}


def test_programs_do_not_grow_with_the_number_of_layers():
    def equations(layers):
        changes = {"num_hidden_layers": layers, "layer_types": None}
        config = jgg.models.model_config(config_of("gpt_oss") | changes)
        model = nnx.eval_shape(lambda: jgg.models.Decoder(config, rngs=nnx.Rngs(0)))
        return len(str(jax.make_jaxpr(lambda model: model(jnp.zeros((1, 4), jnp.int32)))(model)).splitlines())

    assert equations(24) <= equations(4) + 2


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("computed", "implementation"),
    [("logits", "xla"), ("loss", "xla"), pytest.param("losses", "interpret", marks=pytest.mark.interpret)],
)
def test_gradients_inside_shard_map(computed, implementation):
    """A model whose weights all devices share, in a shard_map over tokens; one device has the same types as several."""
    graphdef, state = nnx.split(loaded("glm4_moe", implementation=implementation))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 3)), jnp.int32)

    def run(state, tokens):
        model = nnx.merge(graphdef, state)
        if computed == "logits":
            return jnp.sum(model(tokens) ** 2)
        return jnp.sum(getattr(model, computed)(tokens, tokens))

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P(), jax.P("data")
    own = jax.shard_map(lambda *own: jax.lax.psum(run(*own), "data"), mesh=mesh, in_specs=specs, out_specs=jax.P())
    got, want = (jax.jit(jax.grad(function, allow_int=True))(state, tokens) for function in (own, run))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if other.dtype == jnp.float32:
            assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "layers_copied"), [("dense", 0.5), ("fp8", 1.5)]
)  # FP8: transposed, a layer at a time
def test_a_gpu_copies_no_experts_out_of_the_stack(experts, layers_copied):
    sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_local_experts": 64, "num_hidden_layers": 8}
    config = jgg.models.model_config(config_of("qwen3_moe") | sizes)
    quantization = jgg.Fp8() if experts == "fp8" else None
    options = {"param_dtype": jnp.bfloat16, "lora_rank": 2, "remat": "all", "quantization": quantization}
    model = jgg.models.Decoder(config, **options, rngs=nnx.Rngs(0))
    if experts == "fp8":
        for name in ("w_gate_up", "w_down"):
            w = getattr(model.layers.moe, name)[...]
            setattr(model.layers.moe, name, Frozen(jax.jit(functools.partial(jax.lax.map, jgg.quantize_weights))(w)))
    weights = [model.layers.moe.w_gate_up.get_value(), model.layers.moe.w_down.get_value()]
    of_layer = sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / config.num_layers
    tokens = jnp.zeros((1, 64), jnp.int32)
    graphdef, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
    step = jax.jit(jax.grad(lambda own, frozen: nnx.merge(graphdef, own, frozen).loss(tokens, tokens)))
    with jax.numpy_dtype_promotion("standard"):  # of the gradient of JAX's dot_product_attention
        temporaries = step.lower(adapters, frozen).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < layers_copied * of_layer
