"""Recurrent layers: packed and padded sequences, states between chunks, adapters, FP8 folders, and what is refused."""

import functools
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
from jgg.models.delta_net import States, _convolved
from tests.support.models import DATA, config_of, loaded, logits_of, reference

FAMILY = "qwen3_5_moe_text"
LENGTHS = np.array([1, 5, 9])
TARGETS = ("w_qkv", "w_z", "w_b", "w_a", "w_out", "w_q")
NO_TOKEN = 64  # gives NaN where a program reads it


@functools.cache
def model():
    """The model in float32, whose parameters stay unchanged."""
    return loaded(FAMILY)


@functools.partial(jax.jit, static_argnums=1)
def gradients(params, graphdef, tokens, segments, weights):
    """The gradients of the weighted sum of logits, and the logits."""

    def total(params):
        logits = nnx.merge(graphdef, params)(tokens, segments)
        return jnp.sum(logits * weights), logits

    return jax.grad(total, has_aux=True)(params)


@pytest.mark.sweep
def test_packed_sequences_compute_and_learn_as_each_alone():
    """In one program, of as many rows: the last two are whole, and give what transformers gives.

    The model has adapters that add nothing yet; their b learns what a makes of its matrix's gradient.
    """
    rng, pieces = np.random.default_rng(0), [(0, 0, 5), (0, 5, 6), (0, 6, 13), (1, 0, 2), (1, 2, 13)]
    tokens, alone, segments = np.zeros((3, 7, 13), np.int32)
    weights, own_weights = np.zeros((2, 7, 13, 64), np.float32)
    tokens[:2], weights[:2] = reference(FAMILY)["tokens"], rng.standard_normal((2, 13, 64))
    alone[5:] = tokens[:2]
    for number, (row, first, last) in enumerate(pieces):
        segments[row, first:last] = number
        alone[number, : last - first] = tokens[row, first:last]
        own_weights[number, : last - first] = weights[row, first:last]
    graphdef, params = nnx.split(loaded(FAMILY, lora_rank=2, lora_alpha=3.0, lora_targets=TARGETS))
    packed, logits = gradients(params, graphdef, tokens, segments, weights)
    each, own_logits = gradients(params, graphdef, alone, np.zeros_like(segments), own_weights)
    params, packed, each = jax.device_get((params, packed, each))  # JAX would compile each operation for each shape
    np.testing.assert_allclose(own_logits[5:], reference(FAMILY)["logits"], rtol=0, atol=1e-4)
    for number, (row, first, last) in enumerate(pieces):
        np.testing.assert_allclose(logits[row, first:last], own_logits[number, : last - first], rtol=0, atol=1e-4)
    for got, wanted in zip(jax.tree.leaves(packed), jax.tree.leaves(each), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(np.abs(wanted).max()))
    own, learned = ({path: leaf[...] for path, leaf in nnx.to_flat_state(state)} for state in (params, packed))
    adapted = [path for path in own if (*path[:-1], f"{path[-1]}_lora_b") in own]
    assert {path[-1] for path in adapted} == set(TARGETS)
    for *place, name in adapted:
        a, b = own[*place, f"{name}_lora_a"], learned[*place, f"{name}_lora_b"]
        wanted = 1.5 * a.mT @ learned[*place, name]
        assert np.any(wanted)
        np.testing.assert_allclose(b, wanted, rtol=1e-3, atol=1e-4 * float(np.abs(wanted).max()), err_msg=name)


@jax.jit
def run(model, tokens, caches, start, lengths):
    """The last features and the caches after tokens [B, S] from `start` on."""
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    place = {} if lengths is None else {"lengths": lengths, "mask": positions < lengths[:, None], "start": start}
    return model.run_layers(tokens, jnp.broadcast_to(positions, tokens.shape), caches, **place)


@pytest.mark.sweep
def test_padding_changes_no_state_and_chunks_go_on_from_it():
    prompts = np.where(np.arange(9) < LENGTHS[:, None], reference(FAMILY)["prompts"], NO_TOKEN)
    _, padded = run(model(), prompts, model().empty_caches(3, 9), 0, LENGTHS)
    chunks = model().empty_caches(3, 9)
    for start in (0, 3, 6):
        _, chunks = run(model(), prompts[:, start : start + 3], chunks, start, LENGTHS)
    single, one_by_one = model().empty_caches(3, 9), [None] * 3
    for position in range(9):
        _, single = run(model(), prompts[:, position : position + 1], single, position, None)
        for row in np.flatnonzero(position + 1 == LENGTHS):
            one_by_one[row] = single
    assert sum(isinstance(cache, States) for cache in padded) == 1
    for index, cache in enumerate(padded):
        for name in cache._fields if isinstance(cache, States) else ():
            assert np.isfinite(getattr(cache, name)).all() and np.any(getattr(cache, name))
            for row in range(3):
                wanted = getattr(one_by_one[row][index], name)[:, row]
                for got in (padded, chunks):
                    own = getattr(got[index], name)[:, row]
                    np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.sweep
def test_prompts_in_chunks_are_continued_by_each_sample():
    expected = reference(FAMILY)
    got = jgg.models.generate(
        model(), expected["prompts"], 6, lengths=LENGTHS, prefill_chunk=4, num_samples=2, temperature=0.0
    )
    np.testing.assert_array_equal(got, np.repeat(expected["greedy"], 2, axis=0))


def with_adapters(**options):
    """The model with random adapters of all projections."""
    adapted, rng = loaded(FAMILY, lora_rank=2, lora_targets=TARGETS, **options), np.random.default_rng(3)
    state = nnx.state(adapted, nnx.LoRAParam)
    nnx.update(adapted, jax.tree.map(lambda old: jnp.asarray(0.1 * rng.normal(size=old.shape), old.dtype), state))
    return adapted


@pytest.mark.sweep
def test_adapters_of_all_projections_learn_with_what_attention_keeps():
    tokens = reference(FAMILY)["tokens"]
    loss_of = nnx.value_and_grad(lambda model: model.loss(tokens, tokens), argnums=nnx.DiffState(0, nnx.LoRAParam))
    loss, gradient = nnx.jit(loss_of)(with_adapters())
    other, same = nnx.jit(loss_of)(with_adapters(remat="attention"))
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    for got, wanted in zip(jax.tree.leaves(same), jax.tree.leaves(gradient), strict=True):
        assert np.any(wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4 * float(jnp.abs(wanted).max()))


@pytest.mark.sweep
def test_adapters_of_all_projections_are_merged():
    tokens, adapted = reference(FAMILY)["tokens"], with_adapters()
    names = {str(path[-1]) for path, _ in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam))}
    assert names == {f"{target}_lora_{factor}" for target in TARGETS for factor in "ab"}
    logits = logits_of(adapted, tokens)
    assert np.abs(logits - reference(FAMILY)["logits"]).max() > 1e-3
    adapted.merge_adapters()
    np.testing.assert_allclose(logits_of(adapted, tokens), logits, rtol=0, atol=1e-4)


@pytest.mark.sweep
def test_new_models_have_adapters_of_large_projections_and_norms_that_multiply_by_one():
    new = nnx.eval_shape(lambda: loaded("qwen3_next", lora_rank=1))
    names = {str(path[-1]).partition("_lora_")[0] for path, _ in nnx.to_flat_state(nnx.state(new, nnx.LoRAParam))}
    assert names == {"w_qkvz", "w_out", "w_q", "w_k", "w_v", "w_o", "w_gate_up", "w_down"}
    config = jgg.models.model_config(config_of(FAMILY))
    fresh = nnx.jit(lambda: jgg.models.Decoder(config, rngs=nnx.Rngs(0)))()
    for norms in (fresh.norm, fresh.layers.attention_norm, fresh.layers_2.attention.q_norm):
        assert not np.any(norms[...])
    delta = fresh.layers.delta
    assert np.all(delta.norm[...] == 1) and np.all(delta.dt_bias[...] == 1)
    rates = np.exp(delta.log_a[...])
    assert rates.min() >= 0.01 and rates.max() <= 16 and len(np.unique(rates)) > 1
    assert config.mixers[0].flops_per_token == 6 * 4 * 8 * 12


# as Qwen publishes its FP8 folders: all matrices but these
DENSE = re.compile(r"conv1d|in_proj_[ab]\.|mlp\.gate\.|shared_expert_gate|norm|embed_tokens|lm_head|A_log|dt_bias")


def test_an_fp8_folder_is_dequantized(tmp_path):
    tensors, wanted = {}, {}
    for name, tensor in jgg.hf.Checkpoint(DATA / FAMILY).items():
        if DENSE.search(name):
            tensors[name] = wanted[name] = tensor
            continue
        scale = np.float32(np.abs(tensor.astype(np.float32)).max() / 448)
        tensors[name] = (tensor.astype(np.float32) / scale).astype(jnp.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.full((1, 1), scale)
        wanted[name] = (tensors[name].astype(np.float32) * scale).astype(jnp.bfloat16)
    modules = [name.removesuffix(".weight") for name in wanted if DENSE.search(name)]
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": modules}
    config = config_of(FAMILY) | {"quantization_config": how | {"activation_scheme": "dynamic", "fmt": "e4m3"}}
    for name, own in (("fp8", tensors), ("dense", wanted)):
        (tmp_path / name).mkdir()
        save_file(
            {key: np.ascontiguousarray(array) for key, array in own.items()}, tmp_path / name / "model.safetensors"
        )
        (tmp_path / name / "config.json").write_text(json.dumps(config if name == "fp8" else config_of(FAMILY)))
    got, dense = (nnx.state(jgg.models.load(tmp_path / name)) for name in ("fp8", "dense"))
    for (path, own), other in zip(nnx.to_flat_state(got), jax.tree.leaves(dense), strict=True):
        np.testing.assert_array_equal(own[...], other, err_msg=str(path))


QWEN3_NEXT = {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"hidden_act": "gelu"}, {"use_sliding_window": True}
WRONG = {
    "decoder_sparse_step must be 1, got 2": ("qwen3_next", QWEN3_NEXT[0]),
    "mlp_only_layers must be none, as all layers have experts, got [0]": ("qwen3_next", QWEN3_NEXT[1]),
    "hidden_act must be 'silu', got 'gelu'": ("qwen3_next", QWEN3_NEXT[2]),
    "use_sliding_window must be False, got True": ("qwen3_next", QWEN3_NEXT[3]),
    "linear_num_key_heads must divide linear_num_value_heads, 4, got 3": (FAMILY, {"linear_num_key_heads": 3}),
    "layer_types must be one of ['linear_attention', 'full_attention'] for each of 4 layers": (
        FAMILY,
        {"layer_types": ["linear_attention"] * 3},
    ),
    "attn_output_gate must be True, got False": (FAMILY, {"attn_output_gate": False}),
    "mamba_ssm_dtype must be 'float32', got 'bfloat16'": (FAMILY, {"mamba_ssm_dtype": "bfloat16"}),
    "full_attention_interval must be a positive int, got 0": (
        FAMILY,
        {"layer_types": None, "full_attention_interval": 0},
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_named(message):
    family, changes = WRONG[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        jgg.models.model_config(config_of(family) | changes)


def test_published_configs_are_taken():
    """With the keys of Qwen's own configs, those that transformers does not read included."""
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": 99,
        "num_experts": 16,
        "full_attention_interval": 4,
    }
    own = {"use_sliding_window": False, "rope_scaling": None, "rope_theta": 1e7, "mlp_only_layers": []}
    older = jgg.models.model_config({"model_type": "qwen3_next", "partial_rotary_factor": 0.25} | sizes | own)
    rotary = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rotary |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    own = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "rope_parameters": rotary}
    own |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "model_type": "qwen3_5_moe_text"}
    text = sizes | own | {"tie_word_embeddings": True}
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 27}, "image_token_id": 5}
    newer = jgg.models.model_config(outer | {"tie_word_embeddings": False})
    assert not newer.is_tied
    for config in (older, newer):
        assert [own.kind for own in config.mixers] == (["delta"] * 3 + ["attention"]) * 2
        assert len(config.mixers[3].rotary.frequencies) == 32
    assert older.mixers[3] == newer.mixers[3]


def in_multimodal(tensors):
    """The tensors of a text folder as Qwen's multimodal folders have them: fused experts, a tower, further layers."""
    new = {"model.visual.pos_embed.weight": np.ones((4, 8)), "mtp.fc.weight": np.ones((2, 2))}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            new[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."

        def stacked(*parts, experts=experts):
            own = ([tensors[f"{experts}{e}.{part}_proj.weight"] for part in parts] for e in range(4))
            return np.stack([np.concatenate(matrices) for matrices in own])

        fused = experts.replace("model.", "model.language_model.", 1)
        new |= {f"{fused}gate_up_proj": stacked("gate", "up"), f"{fused}down_proj": stacked("down")}
    return new


@pytest.mark.parametrize("is_text", [False, True])
def test_a_multimodal_folder_has_the_parameters_of_its_language_model(is_text, tmp_path):
    """With is_text, the folder is what transformers writes when it opens only the language model."""
    text = config_of(FAMILY)
    config = {"model_type": "qwen3_5_moe", "text_config": text, "tie_word_embeddings": True, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(text if is_text else config))
    tensors = in_multimodal(dict(jgg.hf.Checkpoint(DATA / FAMILY)))
    kept = {name: array for name, array in tensors.items() if not is_text or "visual" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    got, wanted = nnx.state(jgg.models.load(tmp_path, dtype=jnp.float32)), nnx.state(model())
    for own, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(own, other)


def test_float32_masters_of_the_convolution_get_gradients_that_are_not_rounded():
    """Which would overflow in float16; with batch_invariant too, where the product takes rounded weights."""
    x, w = jnp.full((4, 4000, 2), 6, jnp.float16), jnp.full((2, 1, 4), 0.01, jnp.float32)

    def gradient(is_invariant):
        y, pull_back = jax.vjp(lambda w: _convolved(x, w, None, None, is_invariant), w)
        return pull_back(jnp.full_like(y, 2))[0]

    want = gradient(False)
    assert np.all(want > 1e5)
    np.testing.assert_allclose(gradient(True), want, rtol=1e-3)
