"""LoRA adapters in PEFT's format: merged and trained as by PEFT (data/peft), written bit for bit, and errors."""

import dataclasses
import functools
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jgg.hf
from tests.support.closeness import assert_close
from tests.support.hf import BLOCKS, assert_same_tensors, load
from tests.support.peft import DATA, DIFFERENTIATED, FUSED, OF_MODULES, load_passes, load_weights

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def load_case(case):
    return jgg.hf.load_adapter(DATA / case, jgg.hf.read_config(DATA / case))


@pytest.mark.parametrize("case", FUSED + OF_MODULES)
def test_merged_weights_are_those_that_peft_merges(case):
    config, base, merged = load_weights(case)
    adapter = load_case(case)
    assert sorted(adapter.layers) == [0, 1]
    for layer, terms in adapter.layers.items():
        before, after = (jgg.hf.from_hf(config, weights, layer) for weights in (base, merged))
        for name, want in after.items():
            got = terms[name].merge(before[name], "ekn") if name in terms else before[name]
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6, err_msg=f"{name} of layer {layer}")
            assert (name in terms) == np.any(want != before[name])


@pytest.mark.parametrize("case", DIFFERENTIATED)
def test_gradients_are_those_that_peft_computes(case, edited):
    """y of each MoE block too. The gradients are read as an adapter is, so that each has the shape of its factor."""
    config, base, _ = load_weights(case)
    passes, gradients = load_passes(case)
    wanted = edited(case, tensors=lambda tensors: tensors | gradients)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def run(terms, params):
        rank = next(iter(terms.values())).a.shape[2]
        function = dataclasses.replace(jgg.hf.moe_layer(config), lora_rank=rank, lora_targets=tuple(terms))
        for name, term in terms.items():  # whose scales differ within a layer
            params = params | {f"{name}_lora_a": term.a, f"{name}_lora_b": term.b * jnp.float32(term.scale)}
        y, _ = function.apply(params, passes["x"], precision="highest")
        return jnp.sum(y * passes["dy"]), y

    for layer, terms in load_case(case).layers.items():
        got, y = run(terms, jgg.hf.from_hf(config, base, layer))
        assert_close(y, passes[f"y/{layer}"], 1e-4)
        for name, term in wanted.layers[layer].items():
            assert_close((got[name].a, got[name].b), (term.a, term.b), 1e-4, name=f"{name} of layer {layer}")


@pytest.mark.parametrize("case", FUSED)
def test_fused_adapters_are_written_bit_for_bit(case, tmp_path):
    jgg.hf.save_adapter(tmp_path / "new", jgg.hf.read_config(DATA / case), load_case(case))
    assert_same_tensors(load_file(tmp_path / "new" / TENSORS), load_file(DATA / case / TENSORS))
    got, want = (json.loads((folder / SETTINGS).read_text()) for folder in (tmp_path / "new", DATA / case))
    assert got == want
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [SETTINGS, TENSORS]


@pytest.mark.parametrize("case", OF_MODULES)
def test_adapters_of_modules_are_written_fused(case, tmp_path):
    config, adapter = jgg.hf.read_config(DATA / case), load_case(case)
    jgg.hf.save_adapter(tmp_path, config, adapter)
    again = jgg.hf.load_adapter(tmp_path, config)
    assert_same_terms(again, adapter)
    assert_same_tensors(again.others, adapter.others)
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in adapter.others}
    assert set(again.settings["target_modules"]) == modules
    assert len(again.settings["target_parameters"]) == 4
    assert again.settings["lora_dropout"] == 0
    rank = adapter.settings["r"]
    for terms in adapter.layers.values():
        assert terms["w_down"].a.shape[2] == rank
        assert terms["w_gate_up"].a.shape[2] == 2 * rank
        blocks = terms["w_gate_up"].b.reshape(4, 2, rank, 2, 6)  # [E, part, r, part, N of a part]
        np.testing.assert_array_equal(np.any(blocks, axis=(0, 2, 4)), np.eye(2))


def assert_same_terms(got, want):
    assert got.layers.keys() == want.layers.keys()
    for layer, terms in want.layers.items():
        assert got.layers[layer].keys() == terms.keys()
        for name, term in terms.items():
            own = got.layers[layer][name]
            np.testing.assert_allclose(own.scale, term.scale, rtol=1e-15)
            for part in "ab":
                assert getattr(own, part).dtype == getattr(term, part).dtype
                np.testing.assert_array_equal(getattr(own, part), getattr(term, part), err_msg=f"{part} of {name}")


def test_other_tensors_are_kept():
    want = {name: array for name, array in load_file(DATA / "qwen3_moe" / TENSORS).items() if "experts" not in name}
    assert len(want) == 4
    assert_same_tensors(load_case("qwen3_moe").others, want)
    assert not load_case("mixtral").others


def make_adapter(name, ranks, dtype=np.float32, settings=()):
    """A new adapter of a family, of {layer: {parameter: (rank, scale)}}."""
    config, *_ = load(name)
    shapes, rng = jgg.hf.moe_layer(config).shapes, np.random.default_rng(0)

    def term(param, rank, scale):
        experts, rows, columns = shapes[param]
        a, b = rng.standard_normal((experts, rows, rank)), rng.standard_normal((experts, rank, columns))
        return jgg.LowRank(a.astype(dtype), b.astype(dtype), scale)

    layers = {layer: {param: term(param, *own) for param, own in of.items()} for layer, of in ranks.items()}
    return config, jgg.hf.Adapter(layers, settings=dict(settings))


RANKS = {3: {"w_gate_up": (2, 1.5), "w_down": (2, 1.5)}, 12: {"w_down": (3, 0.3)}}


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", BLOCKS)
def test_new_adapters_of_every_family(name, dtype, tmp_path):
    config, adapter = make_adapter(name, RANKS, dtype)
    jgg.hf.save_adapter(tmp_path, config, adapter)
    again = jgg.hf.load_adapter(tmp_path, config)
    assert_same_terms(again, adapter)
    assert (again.settings["r"], again.settings["lora_alpha"]) == (2, 3)
    assert len(again.settings["target_parameters"]) == 3
    jgg.hf.save_adapter(tmp_path / "again", config, again)
    assert json.loads((tmp_path / "again" / SETTINGS).read_text()) == again.settings


@pytest.mark.parametrize(("use_rslora", "alpha"), [(False, 6), (True, 3)])
def test_new_adapters_with_settings(use_rslora, alpha, tmp_path):
    own = {"r": 4, "lora_alpha": alpha, "use_rslora": use_rslora, "target_parameters": ["mlp.experts.down_proj"]}
    config, adapter = make_adapter("qwen3_moe", {0: {"w_down": (4, 1.5)}, 1: {"w_down": (4, 1.5)}}, settings=own)
    jgg.hf.save_adapter(tmp_path, config, adapter)
    again = jgg.hf.load_adapter(tmp_path, config)
    assert_same_terms(again, adapter)
    assert {key: again.settings[key] for key in own} == own
    assert not again.settings["rank_pattern"] | again.settings["alpha_pattern"]


def test_an_adapter_without_experts(tmp_path):
    config, _ = make_adapter("mixtral", {})
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    settings = {"r": 2, "lora_alpha": 2, "target_modules": ["q_proj"], "lora_dropout": 0.1}
    jgg.hf.save_adapter(tmp_path, config, jgg.hf.Adapter({}, {name: np.ones((2, 3), np.float32)}, settings))
    again = jgg.hf.load_adapter(tmp_path, config)
    assert (again.layers, list(again.others)) == ({}, [name])
    assert again.settings["lora_dropout"] == 0.1


@pytest.fixture
def edited(tmp_path):
    """A function that copies a case, with changes of its settings and tensors, and reads it."""

    def read(case, settings=None, tensors=None, **options):
        folder = tmp_path / case
        shutil.copytree(DATA / case, folder, dirs_exist_ok=True)
        if settings is not None:
            own = json.loads((folder / SETTINGS).read_text())
            (folder / SETTINGS).write_text(json.dumps(settings(own) if callable(settings) else own | settings))
        if tensors is not None:
            own = tensors(load_file(folder / TENSORS))
            save_file({name: np.ascontiguousarray(array) for name, array in own.items()}, folder / TENSORS)
        return jgg.hf.load_adapter(folder, jgg.hf.read_config(folder), **options)

    return read


def test_modules_of_gate_without_up(edited):
    def gate_alone(tensors):
        return {name: array for name, array in tensors.items() if ".w3." not in name}

    adapter = edited("mixtral_modules", {"target_modules": ["w1", "w2"]}, gate_alone)
    whole = load_case("mixtral_modules")
    for layer, terms in adapter.layers.items():
        delta, want = (np.asarray(each["w_gate_up"].delta("ekn")) for each in (terms, whole.layers[layer]))
        np.testing.assert_allclose(delta[..., :6], want[..., :6], rtol=1e-6, atol=1e-7)
        assert not delta[..., 6:].any()
        assert terms["w_gate_up"].a.shape[2] == 2


# settings, message after "... of <file> must be"
WRONG_SETTINGS = [
    ({"peft_type": "IA3"}, "peft_type of {} must be 'LORA', got 'IA3'"),
    ({"use_dora": True}, "use_dora of {} must be absent, null or false, got True"),
    ({"bias": "all"}, "bias of {} must be 'none', got 'all'"),
    ({"lora_bias": True}, "lora_bias of {} must be absent, null or false, got True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save of {} must be absent, null or false, got ['lm_head']"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights of {} must be in (True, False, 'gaussian', "),
    ({"r": "2"}, "r of model.layers.0.mlp.experts.gate_up_proj in {} must be a positive int, got '2'"),
    ({"r": None}, "r of model.layers.0.mlp.experts.gate_up_proj in {} must be a positive int, got None"),
    ({"lora_alpha": "3"}, "lora_alpha of model.layers.0.mlp.experts.gate_up_proj in {} must be a number, got '3'"),
    ({"lora_alpha": 1e300}, "lora_alpha of model.layers.0.mlp.experts.gate_up_proj in {} must be less than 1e+38, got"),
    ({"use_rslora": 1}, "use_rslora of {} must be True or False, got 1"),
    ({"rank_pattern": [1]}, "rank_pattern of {} must be null or an object, got list"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern of {} must be regular expressions, got '('"),
    ({"target_modules": "("}, "target_modules of {} must be regular expressions, got '('"),
    ({"target_parameters": "experts"}, "target_parameters of {} must be a list of names, got 'experts'"),
    ({"alpha_pattern": {"(a": 1}}, "alpha_pattern of {} must be regular expressions, got '(a': missing )"),
    ({"exclude_modules": 3}, "exclude_modules of {} must be a list of names, got 3"),
    ({"layers_to_transform": [1.5]}, "layers_to_transform of {} must be null, an int or a list of ints, got [1.5]"),
    ({"lora_alpha": 10**400}, "lora_alpha of model.layers.0.mlp.experts.gate_up_proj in {} must be a finite number"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_SETTINGS, ids=str)
def test_what_is_wrong_in_settings_is_named(settings, message, edited, tmp_path):
    with pytest.raises((TypeError, ValueError)) as error:
        edited("qwen3_moe", settings)
    assert str(error.value).startswith(message.format(tmp_path / "qwen3_moe" / SETTINGS))


def test_settings_that_change_no_term(edited):
    for settings in (
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": ["q_proj", "v_proj", "no_proj"]},
        {"exclude_modules": r".*\.k_proj", "layers_to_transform": [0, 1]},
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"]},
        {"lora_dropout": 0.1, "init_lora_weights": "gaussian"},
        {"init_lora_weights": "mica"},
    ):
        assert_same_terms(edited("qwen3_moe", settings), load_case("qwen3_moe"))


def test_absent_keys_have_the_defaults_of_peft(edited):
    def without(values, **alpha):
        rest = {key: value for key, value in values.items() if key not in ("r", "lora_alpha")}
        return rest | {"rank_pattern": {".*": values["r"]}, "alpha_pattern": {}} | alpha

    assert_same_terms(edited("qwen3_moe", without), edited("qwen3_moe", functools.partial(without, lora_alpha=8)))


def test_the_adapter_of_another_parameter_is_kept(edited):
    name = "base_model.model.model.layers.0.mlp.router.lora_A.weight"
    targets = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "router.weight"]}
    adapter = edited("qwen3_moe", targets, lambda tensors: tensors | {name: np.ones((2, 10), np.float32)})
    assert name in adapter.others


LAYER = "base_model.model.model.layers.1.mlp.experts."
GATE = "base_model.model.model.layers.1.block_sparse_moe.experts.2.w1."
# case, tensor, what becomes of it, message
WRONG_TENSORS = [
    ("qwen3_moe", LAYER + "lora_B.weight", None, r"lora_B\.weight is missing among the experts' tensors of layer 1 in"),
    ("qwen3_moe", LAYER + "base_layer.lora_A.weight", None, r"base_layer\.lora_A\.weight is missing among"),
    ("olmoe", LAYER + "base_layer.lora_A.weight", (12, 10), r"base_layer\.lora_A\.weight is not expected among"),
    ("qwen3_moe", LAYER + "0.up_proj.lora_A.weight", (2, 10), r"up_proj\.lora_A\.weight is not expected among"),
    ("qwen3_moe", LAYER + "lora_A.weight", (8, 7), r"lora_A\.weight of .* must have shape \[8, 6\], got \[8, 7\]"),
    ("qwen3_moe", LAYER + "lora_B.weight", (10, 12), r"lora_B\.weight of .* must have shape \[10, 8\], got \[10, 12\]"),
    ("mixtral_modules", GATE + "lora_A.weight", None, r"experts\.2\.w1\.lora_A\.weight is missing among the experts'"),
    ("mixtral_modules", GATE + "lora_A.weight", (1, 10), r"w1\.lora_A\.weight of .* \[2, 10\], got \[1, 10\]"),
    ("mixtral_modules", GATE + "lora_magnitude_vector", (6,), r"lora_magnitude_vector is not expected among"),
]


@pytest.mark.parametrize(("case", "name", "shape", "message"), WRONG_TENSORS)
def test_what_is_wrong_with_tensors_is_named(case, name, shape, message, edited):
    def edit(tensors):
        others = {key: array for key, array in tensors.items() if key != name}
        return others if shape is None else others | {name: np.zeros(shape, np.float32)}

    with pytest.raises(ValueError, match=message):
        edited(case, tensors=edit)


def test_adapters_of_another_architecture_are_not_taken_for_other_tensors(edited):
    def in_text_model(tensors):
        return {name.replace("language_model.model", "model"): array for name, array in tensors.items()}

    with pytest.raises(ValueError) as error:
        edited("llama4", tensors=in_text_model)
    assert "model.model.layers.0.feed_forward.experts.base_layer.lora_A.weight is not expected in" in str(error.value)
    assert str(error.value).endswith("model has its experts in language_model.model.layers.0.feed_forward.experts.")


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_settings_that_do_not_fit_the_tensors_are_named(key, edited):
    with pytest.raises(ValueError, match=r"target_parameters of .* got 'mlp\.experts\.down_proj', without one"):
        edited("qwen3_moe_modules", {"target_parameters": ["mlp.experts.down_proj"]})
    with pytest.raises(ValueError, match=r"experts\.0\.w3 and the same module of all other experts must have one rank"):
        edited("mixtral_modules", {key: {r"experts\.1\.w3": 4}})


def test_parts_of_one_term_may_differ_in_rank_and_scale(edited):
    """Gate of rank 2 and up of rank 1, with the same alpha: b of up makes up for the scale."""

    def up_of_rank_1(tensors):
        cut = {"lora_A": lambda array: array[:1], "lora_B": lambda array: array[:, :1]}
        return {name: cut[name.split(".")[-2]](array) if ".w3." in name else array for name, array in tensors.items()}

    whole, adapter = load_case("mixtral_modules"), edited("mixtral_modules", {"rank_pattern": {"w3": 1}}, up_of_rank_1)
    for layer, terms in adapter.layers.items():
        term, old = terms["w_gate_up"], whole.layers[layer]["w_gate_up"]
        assert (term.a.shape[2], term.scale) == (3, old.scale)
        up = 3 * np.matmul(old.a[..., 2:3], old.b[:, 2:3, 6:])  # scaled by alpha / 1
        np.testing.assert_allclose(term.delta("ekn")[..., 6:], up, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(term.delta("ekn")[..., :6], old.delta("ekn")[..., :6], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", ["gpt_oss", "llama4"])
def test_the_order_in_which_unsloth_had_experts(case, edited, tmp_path):
    def slowest(tensors):
        for name, array in tensors.items():
            if "experts" in name and "lora_B" in name:
                by_rank = array.reshape(len(array), -1, 4)  # [out, r, E]
                tensors[name] = by_rank.swapaxes(1, 2).reshape(array.shape)
        return tensors

    adapter = edited(case, tensors=slowest, is_expert_slowest=True)
    assert_same_terms(adapter, load_case(case))
    jgg.hf.save_adapter(tmp_path / "new", jgg.hf.read_config(DATA / case), adapter)
    assert_same_tensors(load_file(tmp_path / "new" / TENSORS), load_file(DATA / case / TENSORS))


@pytest.mark.parametrize("dtype", [np.int8, bool, np.complex64])
def test_tensors_that_are_no_floats_of_16_bits_or_more_are_named(dtype, edited):
    name = LAYER + "lora_A.weight"
    with pytest.raises(ValueError, match=rf"{re.escape(name)} of .* must have one of the dtypes float16, .*, got"):
        edited("olmoe", tensors=lambda tensors: tensors | {name: tensors[name].astype(dtype)})


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern"])
def test_patterns_do_not_take_exponential_time(key, edited):
    endless = r"(([a-z]+|\.|\d)+)+!"
    edited("qwen3_moe_modules", {key: {endless: 2} if key == "rank_pattern" else endless})


def in_float8(path):
    """Writes a file that safetensors cannot write from NumPy."""
    header = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))


# what becomes of a file, the error, and its message
DAMAGES = [
    (SETTINGS, lambda path: shutil.rmtree(path.parent), FileNotFoundError, f"folder must be a folder with {SETTINGS}"),
    (SETTINGS, lambda path: path.unlink(), FileNotFoundError, f"olmoe must have {SETTINGS}, got none"),
    (SETTINGS, lambda path: path.write_text("[]"), ValueError, f"{SETTINGS} must hold a JSON object, got a list"),
    (TENSORS, lambda path: path.write_bytes(path.read_bytes()[:-3]), ValueError, "must be a whole safetensors file"),
    (TENSORS, lambda path: path.unlink(), FileNotFoundError, f"{TENSORS} must be a file of the checkpoint, got none"),
    (TENSORS, in_float8, ValueError, "must have one of the dtypes float16, bfloat16, float32, float64, got float8"),
    *(
        (file, lambda path: (path.unlink(), os.mkfifo(path)), ValueError, f"{file} must be a regular file, got a pipe")
        for file in (SETTINGS, TENSORS)  # which nobody writes into
    ),
]


@pytest.mark.parametrize(("file", "damage", "error", "message"), DAMAGES, ids=[message for *_, message in DAMAGES])
def test_files_that_are_damaged_or_missing_are_named(file, damage, error, message, tmp_path):
    shutil.copytree(DATA / "olmoe", tmp_path / "olmoe")
    damage(tmp_path / "olmoe" / file)
    with pytest.raises(error, match=re.escape(message)):
        jgg.hf.load_adapter(tmp_path / "olmoe", jgg.hf.read_config(DATA / "olmoe"))


CONFIG, ADAPTER = make_adapter("mixtral", RANKS)
TERM = ADAPTER.layers[12]["w_down"]
WRONG_ADAPTERS = [
    (ADAPTER.layers, r"adapter must be an Adapter, got dict"),
    (jgg.hf.Adapter({-1: {"w_down": TERM}}), r"layers of adapter must be an int of at least 0, got -1"),
    (jgg.hf.Adapter({0: [TERM]}), r"layer 0 of adapter must be a mapping from parameters to LowRanks, got list"),
    (jgg.hf.Adapter({0: {"w_router": TERM}}), r"layer 0 of adapter must have terms of .*, got \['w_router'\]"),
    (jgg.hf.Adapter({0: {"w_gate_up": TERM}}), r"w_gate_up of layer 0 for w \[8, 32, 48\] .* must have"),
    (jgg.hf.Adapter({0: {"w_down": TERM.a}}), r"w_down of layer 0 must be a LowRank, got ndarray"),
    (
        jgg.hf.Adapter({}, {"base_model.model.model.layers.0.mlp.experts.lora_A.weight": TERM.a}),
        r"others of adapter must be tensors of modules other than experts, got base_model.*lora_A\.weight",
    ),
    (jgg.hf.Adapter({0: {"w_down": TERM}}, settings={"bias": "all"}), r"bias of settings of adapter must be 'none'"),
    (jgg.hf.Adapter({0: {"w_down": TERM}}, settings=[1]), r"settings of adapter must be a mapping, .*, got list"),
]


@pytest.mark.parametrize(("adapter", "message"), WRONG_ADAPTERS, ids=[message for _, message in WRONG_ADAPTERS])
def test_what_cannot_be_saved_is_named_and_nothing_is_written(adapter, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        jgg.hf.save_adapter(tmp_path / "new", CONFIG, adapter)
    assert not (tmp_path / "new").exists()


def test_an_adapter_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    jgg.hf.save_adapter(tmp_path, CONFIG, ADAPTER)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    _, other = make_adapter("mixtral", {0: {"w_down": (1, 1.0)}})

    def full(tensors, path, metadata):
        from safetensors import SafetensorError

        path.write_bytes(b"half")
        raise SafetensorError("no space left")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with pytest.raises(OSError, match=rf"{TENSORS} could not be written: no space left"):
        jgg.hf.save_adapter(tmp_path, CONFIG, other)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
