"""Gemma 4: what its config.json says, in several words, and layers with norms around parts that run side by side."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from jgg.hf.families import FAMILIES
from jgg.models.tensors import stacks
from tests.support.closeness import assert_close
from tests.support.models import DATA, config_of, loaded, reference

FAMILY = "gemma4_text"
LOCAL, FULL = "sliding_attention", "full_attention"


def mixers(**changes):
    config = {key: value for key, value in (config_of(FAMILY) | changes).items() if value is not None}
    return jgg.models.model_config(config).mixers


def test_layers_with_and_without_a_window_have_other_heads_and_rotary_embeddings():
    local, _, full, *_ = mixers()
    assert (local.window, local.head_features, local.num_kv_heads, local.are_keys_values) == (4, 8, 2, False)
    assert (full.window, full.head_features, full.num_kv_heads, full.are_keys_values) == (None, 12, 1, True)
    assert local.scale == full.scale == 1
    assert {*local.shapes(24)} - {*full.shapes(24)} == {"w_v"}
    np.testing.assert_allclose(local.rotary.frequencies, 10000.0 ** -(np.arange(4) / 4))
    np.testing.assert_allclose(full.rotary.frequencies, [1, 0, 0, 0, 0, 0])  # a quarter of 6 pairs, rounded down
    whole = mixers(
        rope_parameters={LOCAL: {"rope_theta": 100.0}, FULL: {"rope_theta": 64.0, "rope_type": "proportional"}}
    )
    np.testing.assert_allclose(whole[2].rotary.frequencies, 64.0 ** -(np.arange(6) / 6))
    assert mixers(attention_k_eq_v=False)[2].shapes(24)["w_v"] == (24, 12)


def test_older_words_for_what_layers_have_of_their_own():
    older = {"per_layer_config": None, "global_head_dim": 12, "num_global_key_value_heads": 1}
    assert mixers(**older) == mixers()
    # the number of heads counts where keys are values
    assert mixers(**older, attention_k_eq_v=False)[2].num_kv_heads == 2
    assert mixers(per_layer_config=None)[2].head_features == 512
    assert [own.head_features for own in mixers(per_layer_config={"01": {"head_dim": 4}})] == [8, 4, 8, 8, 8, 8]


def test_every_sixth_layer_and_the_last_attend_to_all_tokens():
    def windows(**changes):
        return [own.window for own in mixers(**changes)]

    usual = {"layer_types": None, "per_layer_config": None}
    assert windows(**usual, num_hidden_layers=8) == [4] * 5 + [None, 4, None]
    assert windows(layer_types=[LOCAL] * 6) == [4] * 5 + [None]  # as transformers reads it
    config = {**config_of(FAMILY), "num_hidden_layers": 30, "layer_types": [*[LOCAL] * 5, FULL] * 5}
    del config["per_layer_config"]
    model = jgg.models.model_config(config)
    assert [(plan.name, plan.count) for plan in model.plan] == [("layers", 25), ("layers_5", 5)]
    assert [(len(period.names), period.repeats) for period in model.schedule] == [(6, 5)]


REFUSED = {
    "enable_moe_block must be True, got False": {"enable_moe_block": False},
    "hidden_size_per_layer_input must be 0, got 256": {"hidden_size_per_layer_input": None},
    "num_kv_shared_layers must be 0, got 2": {"num_kv_shared_layers": 2},
    "use_double_wide_mlp must be False, got True": {"use_double_wide_mlp": True},
    "use_bidirectional_attention must be null or 'vision', as tokens of text see those before them, got 'all'": {
        "use_bidirectional_attention": "all"
    },
    "final_logit_softcapping must be null or more than 0, got 0.0": {"final_logit_softcapping": 0},
    "per_layer_config must have numbers of the 6 layers as keys, got '06'": {"per_layer_config": {"06": {}}},
    "per_layer_config of layer 2 must have only head_dim, num_key_value_heads, got ['sliding_window']": {
        "per_layer_config": {"2": {"sliding_window": 3}}
    },
    "layer_types must be one of ['sliding_attention', 'full_attention'] for each of 6 layers": {"layer_types": [FULL]},
    "partial_rotary_factor must be from 0 to 1, got 1.5": {
        "rope_parameters": {LOCAL: {}, FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_named(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        mixers(**REFUSED[message])


def test_logits_are_bound_only_where_the_config_says_so():
    config = config_of(FAMILY)
    assert jgg.models.model_config(config).logits_softcap == 3
    assert jgg.models.model_config(config | {"final_logit_softcapping": None}).logits_softcap is None


def in_multimodal(folder):
    """The model in a folder that has towers too."""
    text = config_of(FAMILY)
    outer = {"model_type": "gemma4", "text_config": text, "tie_word_embeddings": True, "eos_token_id": [1, 106]}
    outer |= {"vision_config": {"hidden_size": 8}, "audio_config": None, "vision_soft_tokens_per_image": 280}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {
        name.replace("model.", FAMILIES["gemma4"].prefix, 1): tensor
        for name, tensor in jgg.hf.Checkpoint(DATA / FAMILY).items()
    }
    towers = ("model.vision_tower.patch_embedder.input_proj.weight", "model.embed_vision.embedding_projection.weight")
    save_file(tensors | {name: np.ones((2, 2), np.float32) for name in towers}, folder / "model.safetensors")
    return folder


def test_a_folder_with_towers_gives_the_same_model(tmp_path):
    model, text = jgg.models.load(in_multimodal(tmp_path / "model"), dtype=jnp.float32), loaded(FAMILY)
    for name in ("layers", "layers_2", "w_embedding"):
        got, want = (nnx.to_pure_dict(nnx.state(nnx.Dict(own=getattr(each, name)))) for each in (model, text))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    jgg.models.save(model, tmp_path / "saved")
    assert {*jgg.hf.Checkpoint(tmp_path / "saved")} == {*jgg.hf.Checkpoint(tmp_path / "model")}


def test_experts_alone_are_read_and_written():
    """Their tensors are next to those of attention and norms, in modules of the layer itself."""
    config, tensors = config_of(FAMILY), jgg.hf.Checkpoint(DATA / FAMILY)
    params = jgg.hf.from_hf(config, tensors, 3)
    assert params.keys() == jgg.hf.moe_layer(config).shapes.keys()
    written = jgg.hf.to_hf(config, params, 3)
    assert {name for name in tensors if re.search(r"layers\.3\.(experts|router\.p)", name)} == written.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, tensors[name])
    more = dict(tensors) | {"model.layers.3.experts.bias": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"model\.layers\.3\.experts\.bias"):
        jgg.hf.from_hf(config, more, 3)


@pytest.mark.sweep
@pytest.mark.parametrize("remat", ["names", "attention"])
def test_adapters_of_all_matrices_learn_beside_what_is_frozen(remat):
    """Packed sequences, masked tokens and given experts too, as without rematerialization, adapters and packing."""
    targets = ("w_q", "w_k", "w_v", "w_o", "w_gate_up", "w_down", "w_dense_gate_up", "w_dense_down", "w_router")
    tokens = jnp.asarray(reference(FAMILY)["tokens"])[:, :12]
    segments = jnp.asarray([[0] * 12, [0] * 5 + [1] * 7], jnp.int32)

    def run(model):
        def loss_of(model):
            losses, sown = nnx.capture(model.losses, nnx.Intermediate)(tokens, tokens, segments)
            return losses.sum(), (losses, sown["topk_indices"][0])

        return nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)(model)

    models = [loaded(FAMILY, lora_rank=2, lora_targets=targets, remat=each, unroll=3) for each in (remat, "none")]
    for model in models:
        state = nnx.state(model, nnx.LoRAParam)
        nnx.update(model, jax.tree.map(lambda leaf: 0.1 * jnp.cos(jnp.arange(leaf.size)).reshape(leaf.shape), state))
    ((_, (losses, choices)), got), ((_, (wanted, _)), want) = (nnx.jit(run)(model) for model in models)
    assert_close(losses, wanted, 1e-5)
    assert_close(nnx.to_pure_dict(got), nnx.to_pure_dict(want), 1e-4)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(want))
    model = models[1]
    alone = jax.jit(lambda model, tokens: model.losses(tokens, tokens))(model, tokens[1:, 5:])
    assert_close(losses[1:, 5:], alone, 1e-5)
    mask = jnp.arange(12)[None] < jnp.asarray([[12], [9]])
    masked = jax.jit(lambda model, given: model.losses(tokens, tokens, segments, mask=mask, topk_indices=given))
    assert_close(jnp.where(mask, masked(model, choices), 0), jnp.where(mask, losses, 0), 1e-5)
    assert np.abs(masked(model, (choices + 1) % 4) - losses).max() > 0.01
    model.merge_adapters()
    assert_close(jax.jit(lambda model: model.losses(tokens, tokens, segments))(model), losses, 1e-4)
    scales = [stack.layers.scale for stack in stacks(model)]
    assert not any(isinstance(scale, nnx.Param) for scale in scales)


@pytest.mark.sweep
@pytest.mark.interpret
def test_kernels_give_what_plain_jax_gives():
    """Norms, rotary embeddings, experts and losses, with the gradients of all parameters."""
    tokens = jnp.asarray(reference(FAMILY)["tokens"])[:, :6]

    def run(**options):
        return nnx.jit(nnx.value_and_grad(lambda model: model.loss(tokens, tokens)))(loaded(FAMILY, **options))

    got, want = run(implementation="interpret"), run()
    assert_close(got[0], want[0], 1e-5)
    assert_close(nnx.to_pure_dict(got[1]), nnx.to_pure_dict(want[1]), 1e-3)
