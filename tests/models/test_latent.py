"""Latent attention in company: caches of latents, adapters, segments, remat, published configs, and what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jgg.hf
import jgg.models
from jgg.core.quantized import E4M3, scaled, scales_shape
from jgg.hf.families import FAMILIES as HF_FAMILIES
from tests.models.test_model_config import OF_TRANSFORMERS, SIZES, same
from tests.models.test_model_replay import with_adapters
from tests.support.models import DATA, config_of, copied, loaded, logits_of, reference

LENGTHS = np.array([1, 5, 9])  # of the prompts in the reference data


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("glm4_moe_lite", marks=pytest.mark.sweep)])
def test_absorbed_products_give_what_keys_and_values_by_heads_give(family):
    """Beside adapters, for prompts in chunks and for one token at a time."""
    model, tokens = with_adapters(family), jnp.asarray(reference(family)["tokens"])
    names = {f"w_{name}_lora_{factor}" for name in ("q_a", "q_b", "kv_a", "kv_b", "o") for factor in "ab"}
    assert {str(path[-1]) for path, _ in nnx.to_flat_state(nnx.state(model.layers.latent, nnx.LoRAParam))} == names
    own = model.config.mixers[0]
    caches = model.empty_caches(2, 13)
    assert {cache.latents.shape[2:] for cache in caches} == {(13, 1, own.kv_rank + own.rotated_features)}
    run = jax.jit(
        lambda model, tokens, positions, caches, start: model.run_layers(tokens, positions, caches, start=start)
    )
    parts = []
    for start, end in ((0, 4), (4, 8), (8, 12), (12, 13)):
        positions = jnp.arange(start, end, dtype=jnp.int32)[None]
        x, caches = run(model, tokens[:, start:end], positions, caches, start=jnp.int32(start))
        parts.append(x)
    wanted = logits_of(model, tokens)
    assert np.abs(wanted - reference(family)["logits"]).max() > 1e-2
    np.testing.assert_allclose(model.logits(jnp.concatenate(parts, axis=1)), wanted, rtol=0, atol=1e-4)


@pytest.mark.interpret
@pytest.mark.sweep
def test_the_kernel_decodes_as_transformers_does():
    expected, model = reference("deepseek_v3"), loaded("deepseek_v3", implementation="interpret")
    got = jgg.models.generate(model, expected["prompts"][1:2, :5], 3)
    np.testing.assert_array_equal(got, expected["greedy"][1:2, :3])


@pytest.mark.sweep
def test_prompts_in_chunks_with_several_samples_go_on_as_by_transformers():
    expected, model = reference("deepseek_v3"), loaded("deepseek_v3")
    got = jgg.models.generate(model, expected["prompts"], 6, lengths=LENGTHS, prefill_chunk=4, num_samples=2)
    np.testing.assert_array_equal(got, np.repeat(expected["greedy"], 2, axis=0))


def test_sequences_that_share_a_row_give_what_each_gives_alone():
    model, tokens = loaded("deepseek_v3"), jnp.asarray(reference("deepseek_v3")["tokens"])[:1]
    run = jax.jit(lambda model, tokens, segments: model(tokens, segments=segments))
    got = run(model, tokens, jnp.array([[5] * 4 + [2] * 9]))
    alone = run(model, jnp.roll(tokens, -4), jnp.array([[0] * 9 + [1] * 4]))
    np.testing.assert_allclose(got, jnp.roll(alone, 4, axis=1), rtol=0, atol=1e-4)
    assert np.abs(got[0, 4:] - reference("deepseek_v3")["logits"][0, 4:]).max() > 1e-2


@pytest.mark.sweep
def test_adapters_of_all_projections_learn_beside_what_is_frozen():
    model, tokens = with_adapters("deepseek_v3"), reference("deepseek_v3")["tokens"]
    others = with_adapters("deepseek_v3", remat="attention", unroll=2)

    @jax.jit
    def gradients(model):
        return nnx.grad(
            lambda model: model.loss(tokens[:, :-1], tokens[:, 1:]), argnums=nnx.DiffState(0, nnx.LoRAParam)
        )(model)

    got, wanted = (jax.tree.leaves(gradients(each)) for each in (others, model))
    assert all(np.abs(gradient).max() > 1e-4 for gradient in wanted)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.sweep
def test_a_merged_adapter_computes_the_same():
    model, tokens = with_adapters("deepseek_v3"), reference("deepseek_v3")["tokens"]
    before = logits_of(model, tokens)
    model.merge_adapters()
    np.testing.assert_allclose(logits_of(model, tokens), before, rtol=0, atol=1e-4)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    folder = copied("deepseek_v3", tmp_path / "model", num_nextn_predict_layers=1)
    further = {"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)}
    save_file(dict(jgg.hf.Checkpoint(folder)) | further, folder / "model.safetensors")
    states = (nnx.to_pure_dict(nnx.state(jgg.models.load(each))) for each in (folder, DATA / "deepseek_v3"))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_projections_in_fp8_have_scales_of_blocks_that_are_not_full(tmp_path):
    """DeepSeek-V3's matrices of latents have such blocks: 576 rows in blocks of 128."""
    how = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    folder = copied("deepseek_v3", tmp_path / "model", quantization_config=how)
    tensors, dense = dict(jgg.hf.Checkpoint(folder)), {}
    for name in [name for name in tensors if "_proj" in name and name.endswith("weight")]:
        rng = np.random.default_rng(len(dense))
        shape = tensors[name].shape
        scales = rng.uniform(0.01, 0.02, scales_shape(shape, (8, 8))).astype(np.float32)
        values = rng.normal(size=shape).astype(E4M3)
        dense[name] = scaled(values, scales, (8, 8), np).astype(jnp.bfloat16)
        tensors |= {name: values, f"{name}_scale_inv": scales}
    assert tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 4)
    save_file(tensors, folder / "model.safetensors")
    jgg.models.save(jgg.models.load(folder), tmp_path / "dense")
    got = jgg.hf.Checkpoint(tmp_path / "dense")
    for name, tensor in dense.items():
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


PUBLISHED = {  # of DeepSeek-V3.1 and Kimi-K2, in the words of transformers 4
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}


def test_published_configs_are_taken():
    config = jgg.models.model_config(PUBLISHED | {"model_type": "kimi_k2"})
    own = config.mixers[0]
    assert (own.num_heads, own.q_rank, own.kv_rank, own.head_features, own.value_features) == (64, 1536, 512, 192, 128)
    # YaRN's factor is in the logits, and the rotation has none
    np.testing.assert_allclose(own.scale, 192**-0.5 * (0.1 * np.log(32) + 1) ** 2, rtol=1e-12)
    assert own.rotary.scale == 1 and len(own.rotary.frequencies) == 32
    assert (config.is_dense.count(True), config.is_dense[0], config.dense_features) == (1, True, 18432)
    assert (own.cached_per_token, own.flops_per_pair) == (576, 2 * 64 * 320)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_absent_keys_and_rotary_settings_mean_what_they_do_in_transformers(family):
    known = OF_TRANSFORMERS[family]
    config = jgg.models.model_config({"model_type": family})
    assert same(config, jgg.models.model_config(known["defaults"]))
    assert config.mixers[0].rotated_features == known["heads"]
    sizes = {key: value for key, value in SIZES.items() if key in HF_FAMILIES[family].defaults}
    one = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {"mlp_layer_types": ["sparse"]}
    for case in known["rotary"]:
        got = jgg.models.model_config({"model_type": family} | sizes | one | case["changes"]).mixers[0].rotary
        np.testing.assert_allclose(got.frequencies, case["frequencies"], rtol=1e-5, err_msg=str(case))
        np.testing.assert_allclose(got.scale, case["scale"], rtol=1e-6, err_msg=str(case))


def test_keys_of_transformers_4_and_5_mean_the_same():
    new = config_of("deepseek_v3")
    rope = dict(new["rope_parameters"])
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {("type" if key == "rope_type" else key): value for key, value in rope.items()},
    }
    absent = {key: value for key, value in new.items() if key not in ("num_key_value_heads", "head_dim", "qk_head_dim")}
    for other in (old, absent, new | {"model_type": "kimi_k2"}):
        got, want = (jgg.models.model_config(each) for each in (other, new))
        assert (got.mixers, got.is_dense, got.moe) == (want.mixers, want.is_dense, want.moe)
    lite = config_of("glm4_moe_lite") | {"qk_rope_head_dim": None, "head_dim": 4}
    assert jgg.models.model_config(lite).mixers == jgg.models.model_config(config_of("glm4_moe_lite")).mixers


def test_glm_has_dense_layers_where_its_config_says():
    config = config_of("glm4_moe_lite")
    assert jgg.models.model_config(config).is_dense == (False, True, False)
    usual = config | {"mlp_layer_types": None, "first_k_dense_replace": 1}
    assert jgg.models.model_config(usual).is_dense == (True, False, False)


WRONG = {
    "num_key_value_heads must be num_attention_heads, 4, with a latent, got 2": {"num_key_value_heads": 2},
    "qk_rope_head_dim must be even, as pairs of features are rotated, got 3": {
        "qk_rope_head_dim": 3,
        "head_dim": None,
    },
    "qk_rope_head_dim and head_dim must be equal: they name the same setting, got [4, 12]": {"head_dim": 12},
    "qk_head_dim must be the sum of qk_nope_head_dim and qk_rope_head_dim, got 12": {"qk_head_dim": 12},
    "moe_layer_freq must be 1, got 2": {"moe_layer_freq": 2},
    "topk_method must be 'noaux_tc', got 'greedy'": {"topk_method": "greedy"},
    "scoring_func must be 'sigmoid', got 'softmax'": {"scoring_func": "softmax"},
    "got 'index_topk': 2048": {"index_topk": 2048},
    "mlp_layer_types must be one of ['sparse', 'dense'] for each of 3 layers, got ['dense']": {
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense"],
    },
    "must have experts, got 3 dense layers of 3 by mlp_layer_types": {
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense"] * 3,
    },
    "first_k_dense_replace must be the number of dense layers by mlp_layer_types, 1, got 1": {
        "model_type": "glm4_moe_lite",
        "first_k_dense_replace": 1,
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_what_no_model_of_the_family_has_is_named(message):
    changes = WRONG[message]
    config = config_of(changes.get("model_type", "deepseek_v3")) | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        jgg.models.model_config(config)


@pytest.mark.parametrize("options", [{}, {"remat": "attention"}], ids=str)
def test_with_batch_invariant_training_attends_as_decoding_does(options):
    """To rounding, of packed sequences, with adapters and their gradients; the bits are for GPUs."""
    tokens, segments = jnp.asarray(reference("deepseek_v3")["tokens"]), jnp.array([[0] * 13, [0] * 4 + [1] * 9])

    @jax.jit
    def run(model):
        def loss(model):
            losses = model.losses(tokens[:, :-1], tokens[:, 1:], segments[:, 1:])
            return losses.sum(), losses

        (_, losses), gradients = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam), has_aux=True)(model)
        return losses, gradients

    got, want = (run(with_adapters("deepseek_v3", batch_invariant=is_on, **options)) for is_on in (True, False))
    assert all(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5), got, want)


def test_latents_that_no_kernel_takes_are_refused_with_batch_invariant():
    message = "batch_invariant must be False with latents that no kernel takes, of 512 features in float32, got True."
    config = jgg.models.model_config(config_of("deepseek_v3") | {"kv_lora_rank": 512})
    with pytest.raises(ValueError, match=message):
        jgg.models.Decoder(config, dtype=jnp.float32, batch_invariant=True, rngs=nnx.Rngs(0))
