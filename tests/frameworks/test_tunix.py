"""Experts of tunix's Qwen3-MoE by jgg: values, gradients and training against tunix's own, and their LoRA adapters."""

import contextlib
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import pxla

import jgg
import jgg.hf
import jgg.integrations.tunix as ours
from tests.support.closeness import assert_close
from tests.support.documents import code_of, run_code
from tests.support.frameworks import framework

pytestmark = [*framework("tunix"), pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")]
SIZES = {"vocab_size": 64, "embed_dim": 32, "hidden_dim": 24, "num_experts": 8, "num_experts_per_tok": 2}
OTHERS = {"num_layers": 2, "num_heads": 2, "head_dim": 16, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-6}
MESHES = {"none": None, "one": (1, 1), "fsdp": (4, 1), "tp": (1, 2), "both": (4, 2)}


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def constraints(monkeypatch):
    """Makes tunix constrain how arrays are split, as it does on a GPU and not on CPUs."""
    from tunix.models.qwen3 import model

    def shard(x, names):
        mesh = pxla.thread_resources.env.physical_mesh
        return x if mesh.empty else jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*names)))

    monkeypatch.setattr(model, "shard", shard)


@pytest.fixture
def installed(monkeypatch):
    """A function that puts jgg into tunix until the test ends."""
    from tunix.models.qwen3 import model

    for owner, name in ((model.MoELayer, "__call__"), (model.Embedder, "encode")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # to be put back after the test
    return ours.install


def in_mesh(shape):
    if shape is None:
        return contextlib.nullcontext()
    devices = np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape)
    return jax.sharding.Mesh(devices, ("fsdp", "tp"))


def config(**options):
    from tunix.models.qwen3 import model

    return model.ModelConfig(**(SIZES | OTHERS | options))


def make_layer(**options):
    """A layer with experts of a size that shows in its output, and x."""
    from tunix.models.qwen3 import model

    layer = model.MoELayer(config(**options), rngs=nnx.Rngs(0))
    for name in ("gate_proj", "up_proj", "down_proj"):
        weights = getattr(layer, name)
        weights[...] = 20 * weights[...]
    return layer, jax.random.normal(jax.random.key(1), (8, 6, SIZES["embed_dim"]))


def gradients(layer, x, kind=nnx.Param):
    graph, wanted, others = nnx.split(layer, kind, ...)

    @jax.jit
    def loss(wanted, x):
        y = nnx.merge(graph, wanted, others)(x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

    value, (of_layer, of_x) = jax.value_and_grad(loss, argnums=(0, 1))(wanted, x)
    return value, nnx.to_pure_dict(of_layer), of_x


def set_b(layer):
    for name in ("w_gate_up_lora_b", "w_down_lora_b"):
        b = getattr(layer, name)
        b[...] = jax.random.normal(jax.random.key(len(name)), b.shape)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_values_and_gradients(mesh, installed):
    layer, x = make_layer()
    want = gradients(layer, x)
    installed()
    with in_mesh(mesh):
        assert_close(gradients(layer, x), want, 2e-4)


def test_tokens_that_devices_cannot_share_evenly(installed):
    layer, x = make_layer()
    want = gradients(layer, x[:1, :3])
    installed()
    with in_mesh(MESHES["both"]):
        assert_close(gradients(layer, x[:1, :3]), want, 2e-4)


@pytest.mark.parametrize("sequences", [2, 3])
def test_a_model_of_fewer_sequences_than_devices(sequences, installed):
    from tunix.models.qwen3 import model as qwen3

    graph, state = nnx.split(qwen3.Qwen3(config(num_layers=1), rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (sequences, 6)).astype(np.int32)

    @jax.jit
    def loss(state, tokens):
        positions = jnp.broadcast_to(jnp.arange(6), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (sequences, 6, 6))
        logits, _ = nnx.merge(graph, state)(tokens, positions, None, mask)
        return jnp.sum(jnp.square(logits))

    want = jax.value_and_grad(loss)(state, tokens)
    installed()
    with in_mesh(MESHES["both"]):
        assert_close(jax.value_and_grad(loss)(state, tokens), want, 2e-4)


def test_adapters_beside_those_of_qwix(installed):
    import qwix
    from tunix.models.qwen3 import model as qwen3

    installed()
    with in_mesh((2, 2)):  # qwix runs the model with two sequences, not jitted
        model = qwen3.Qwen3(config(), rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(module_path=".*(q|k|v|o|gate|up|down)_proj", rank=4, alpha=4.0)
        model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
        ours.add_lora(model, rank=4, targets=("w_down",), rngs=nnx.Rngs(2))
    paths = {path[2:] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}
    assert {path for path in paths if path[0] == "mlp"} == {("mlp", "w_down_lora_a"), ("mlp", "w_down_lora_b")}
    assert len({path[1] for path in paths if path[0] == "attn"}) == 4
    assert model.layers[0].mlp.w_down_lora_a[...].sharding.spec == jax.P("fsdp", "tp", None)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_adapters_of_experts(mesh, installed):
    layer, x = make_layer()
    model = nnx.List([layer])
    with in_mesh(mesh):
        ours.add_lora(model, rank=4, alpha=6.0, rngs=nnx.Rngs(2))
    terms = ours.adapters_of(layer)
    assert not terms["w_gate_up"].b.any()
    assert not terms["w_down"].b.any()
    set_b(layer)
    terms = ours.adapters_of(layer)

    merged, _ = make_layer()
    gate_up = jnp.concatenate([layer.gate_proj[...], layer.up_proj[...]], axis=-1)
    gate_up = terms["w_gate_up"].merge(gate_up, "ekn")
    merged.gate_proj[...], merged.up_proj[...] = jnp.split(np.asarray(gate_up), 2, axis=-1)
    merged.down_proj[...] = np.asarray(terms["w_down"].merge(layer.down_proj[...], "ekn"))
    want_y, want_dw, want_dx = gradients(merged, x)  # by tunix
    dw_gate_up = np.concatenate([want_dw["gate_proj"], want_dw["up_proj"]], axis=-1)

    installed()
    with in_mesh(mesh):
        y, got, dx = gradients(layer, x, nnx.LoRAParam)
    assert_close((y, dx), (want_y, want_dx), 2e-4)
    for name, dw in (("w_gate_up", dw_gate_up), ("w_down", want_dw["down_proj"])):
        a, b = (np.asarray(part) for part in (terms[name].a, terms[name].b))
        assert_close(got[f"{name}_lora_a"], 1.5 * dw @ b.swapaxes(1, 2), 2e-4)
        assert_close(got[f"{name}_lora_b"], 1.5 * a.swapaxes(1, 2) @ dw, 2e-4)


def test_a_model_without_experts_gets_no_adapters():
    with pytest.raises(ValueError, match=r"model must have layers of .*MoELayer, got none"):
        ours.add_lora(nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0))]), rank=4, rngs=nnx.Rngs(0))


def test_a_log_line_says_that_jgg_computes(installed, caplog):
    installed()
    layer, x = make_layer(hidden_dim=40)
    with caplog.at_level(logging.INFO, "jgg"), in_mesh(MESHES["both"]):
        gradients(layer, x)
    assert [record.getMessage() for record in caplog.records if record.name == "jgg"] == [
        "jgg computes the experts of tunix by plain JAX. On each device: x [12, 32] and w_gate_up [2, 32, 40] in "
        "float32, 2 experts for each token."
    ]


@pytest.mark.parametrize("mesh", ["none", "both"])
def test_lowers_for_a_gpu(mesh, installed):
    installed()
    layer, x = make_layer(dtype=jnp.bfloat16)
    graph, state = nnx.split(layer)
    gradient = jax.jit(jax.grad(lambda state, x: jnp.sum(nnx.merge(graph, state)(x))))
    with jgg.target(90), in_mesh(MESHES[mesh]):
        text = gradient.trace(state, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") >= 7


def train(adapted):
    """Losses of a few steps of tunix's trainer, and the parameters that it did not change."""
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer

    model = qwen3.Qwen3(config(), rngs=nnx.Rngs(0))
    if adapted:
        ours.add_lora(model, rank=4, rngs=nnx.Rngs(1))
    before = nnx.to_flat_state(jax.tree.map(np.asarray, nnx.state(model, nnx.Param)))
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (8, 16)).astype(np.int32)
    losses = []

    class Trainer(peft_trainer.PeftTrainer):
        def _log_metrics(self, loss, step=None, additional_metrics=None):
            losses.append(float(loss))

    def loss(model, input_tokens, input_mask, positions, attention_mask):
        logits, _ = model(input_tokens, positions, None, attention_mask)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_tokens[:, 1:]))

    def model_input(example):
        shape = example.input_tokens.shape
        return {
            "input_tokens": example.input_tokens,
            "input_mask": example.input_mask,
            "positions": jnp.broadcast_to(jnp.arange(shape[1]), shape),
            "attention_mask": jnp.broadcast_to(jnp.tril(jnp.ones(shape[1:] * 2, bool)), (*shape, shape[1])),
        }

    settings = peft_trainer.TrainingConfig(eval_every_n_steps=100, max_steps=5, max_inflight_computations=1)
    trainer = Trainer(model, optax.adamw(1e-2), settings).with_gen_model_input_fn(model_input).with_loss_fn(loss)
    trainer.train([peft_trainer.TrainingInput(tokens, np.ones_like(tokens))] * 5)
    after = nnx.to_flat_state(nnx.state(model, nnx.Param))
    pairs = zip(before, after, strict=True)
    return losses, {path for (path, old), (_, new) in pairs if np.array_equal(old[...], new[...])}


def test_trains_as_tunix_does(installed):
    want, _ = train(adapted=False)
    installed()
    got, unchanged = train(adapted=False)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got[4] < got[0] - 0.1
    assert not unchanged


def test_only_adapters_are_trained(installed):
    installed()
    losses, unchanged = train(adapted=True)
    assert losses[4] < losses[0]
    assert {path[-1] for path in unchanged} >= {"gate_proj", "up_proj", "down_proj"}
    assert not [path for path in unchanged if "lora" in path[-1]]


def test_the_recipe(tmp_path, installed):
    from tunix.models.qwen3 import model as qwen3

    install, adapters = code_of("integrations.md", "tunix")
    run_code(install)
    assert qwen3.MoELayer.__call__ is ours.moe_layer
    settings = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 8}
    settings |= {"num_experts_per_tok": 2, "num_hidden_layers": 2, "norm_topk_prob": True, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model = qwen3.Qwen3(config(), rngs=nnx.Rngs(0))
    recipe = run_code(adapters)
    recipe["add_adapters"](model)
    for layer in model.layers:
        set_b(layer.mlp)
    recipe["save_adapters"](model, tmp_path, tmp_path / "saved")
    loaded = jgg.hf.load_adapter(tmp_path / "saved", settings).layers
    assert loaded.keys() == {0, 1}
    for index, terms in loaded.items():
        for name, term in terms.items():
            want = ours.adapters_of(model.layers[index].mlp)[name].delta("ekn")
            np.testing.assert_allclose(term.delta("ekn"), want, rtol=1e-5, atol=1e-5)


class Words:
    """Token 5 is the word "t5"; 0 pads, 1 ends and 2 begins a text."""

    def encode(self, text, **_):
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(f"t{int(token)}" for token in ids)

    def bos_id(self):
        return 2

    def eos_id(self):
        return 1

    def pad_id(self):
        return 0


@pytest.fixture
def promotion_everywhere():
    """Also in the threads of tunix, which those of a context do not reach."""
    options = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in options}
    for own in (options, before):
        for name, value in own.items():
            jax.config.update(name, value)
        if own is options:
            yield


@pytest.mark.usefixtures("promotion_everywhere")
def test_tunix_s_grpo_learns_with_these_experts(installed, monkeypatch):
    from tunix.models.qwen3 import model
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
    from tunix.rl.rollout.base_rollout import RolloutConfig

    installed()
    rewards, computed = [], []
    experts = model.MoELayer.__call__
    monkeypatch.setattr(model.MoELayer, "__call__", lambda *args: (computed.append(0), experts(*args))[1])

    def odd(prompts, completions, **_):
        own = [float(np.mean([int(word[1:]) % 2 for word in text.split()] or [0])) for text in completions]
        rewards.append(np.mean(own))
        return own

    with in_mesh((1, 1)) as mesh:
        actor, reference = (model.Qwen3(config(vocab_size=32), rngs=nnx.Rngs(0)) for _ in range(2))
    rollout = RolloutConfig(max_tokens_to_generate=4, max_prompt_length=4, kv_cache_size=16, temperature=1.0, top_p=1.0)
    training = {"eval_every_n_steps": 100, "max_steps": 8, "mini_batch_size": 2, "train_micro_batch_size": 2}
    cluster = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        training_config=RLTrainingConfig(actor_optimizer=optax.adam(3e-2), **training),
        rollout_config=rollout,
    )
    cluster = RLCluster(actor=actor, reference=reference, tokenizer=Words(), cluster_config=cluster)
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=16, beta=0.0), odd)
    learner.train([{"prompts": np.array(["t5 t6", "t7 t8"])} for _ in range(8)])
    assert len(rewards) == 8 and computed
    assert rewards[0] < 0.6 and rewards[-1] > 0.9
