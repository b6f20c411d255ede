"""Checkpoints of Hugging Face that are damaged, absent or lead elsewhere: errors name file, key and what came."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jgg.hf
from tests.support.hf import load

INDEX = "model.safetensors.index.json"
TENSORS = {"a": np.arange(6, dtype=np.float32), "b": np.ones((2, 3), ml_dtypes.float8_e4m3fn)}


def write(folder, weight_map, file="model-1.safetensors"):
    """A checkpoint of one shard, with an index of that weight_map."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


DAMAGES = {
    "truncated": lambda content: content[:-3],
    "empty": lambda content: b"",
    "garbage": lambda content: b"\xff" * len(content),
    "text": lambda content: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["model.safetensors", "model-1.safetensors"])
def test_a_damaged_file_is_named(name, damage, tmp_path):
    write(tmp_path, {"a": name, "b": name}, name)
    if name == "model.safetensors":
        (tmp_path / INDEX).unlink()
    assert jgg.hf.Checkpoint(tmp_path)["b"].dtype == ml_dtypes.float8_e4m3fn
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"/{name} must be a whole safetensors file .*: Error while"):
        jgg.hf.Checkpoint(tmp_path)["a"]


def test_a_shard_that_is_missing_or_lacks_a_tensor_is_named(tmp_path):
    checkpoint = jgg.hf.Checkpoint(write(tmp_path, {"a": "model-1.safetensors", "c": "model-1.safetensors", "d": "2"}))
    np.testing.assert_array_equal(checkpoint["a"], TENSORS["a"])
    with pytest.raises(ValueError, match=r"/model-1\.safetensors must be .* does not contain tensor c"):
        checkpoint["c"]
    with pytest.raises(FileNotFoundError, match=r"/2 must be a file of the checkpoint, got none"):
        checkpoint["d"]
    (tmp_path / "2").mkdir()
    with pytest.raises(ValueError, match=r"/2 must be a regular file, got a folder"):
        checkpoint["d"]
    with pytest.raises(KeyError, match="absent"):
        checkpoint["absent"]


def test_a_dtype_that_numpy_lacks_is_named(tmp_path):
    header = json.dumps({"a": {"dtype": "F8_E4M3FNUZ", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(ValueError, match=r"a of .*/model\.safetensors must have .* F8_E4M3, .*, got F8_E4M3FNUZ"):
        jgg.hf.Checkpoint(tmp_path)["a"]


INDEXES = {
    "no JSON": ('{"weight_map": ', r"must be a JSON file: Expecting value"),
    "no text": (b"\xff\xfe", r"must be a JSON file: 'utf-8' codec"),
    "endless": ("[" * 100_000, r"must be a JSON file: maximum recursion"),
    "a list": ("[]", r"must hold a JSON object, got a list"),
    "no key": ("{}", r'must have a "weight_map" .*, got None'),
    "a list of files": ('{"weight_map": ["a"]}', r"""must have a "weight_map" .*, got \['a'\]"""),
    "a number": ('{"weight_map": {"a": 1}}', r"must name a file inside its folder for 'a', got 1"),
}


@pytest.mark.parametrize(("text", "message"), INDEXES.values(), ids=INDEXES)
def test_what_is_wrong_with_an_index_is_named(text, message, tmp_path):
    write(tmp_path, {})
    (tmp_path / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"/{INDEX} {message}"):
        jgg.hf.Checkpoint(tmp_path)


@pytest.mark.parametrize("weight_map", [{"a": "x" * 300}, {"a": "\ud800"}, {"\ud800": "model-1.safetensors"}])
def test_names_that_no_file_or_tensor_can_have_are_named(weight_map, tmp_path):
    write(tmp_path, weight_map)
    with pytest.raises(ValueError) as error:
        jgg.hf.Checkpoint(tmp_path).headers()
    (file,) = weight_map.values()
    assert f"{tmp_path / file} must be a whole safetensors file" in str(error.value)


@pytest.mark.parametrize("name", ["../other/{}", "x/../../other/{}", "{folder}/other/{}", "..", ".", "", "/"])
def test_files_outside_of_the_folder_are_not_read(name, tmp_path):
    write(tmp_path / "other", {})
    outside = name.format("model-1.safetensors", folder=tmp_path)
    folder = write(tmp_path / "own", {"b": "model-1.safetensors", "a": outside})
    (folder / "x").mkdir()
    with pytest.raises(ValueError) as error:
        jgg.hf.Checkpoint(folder)
    assert f"{INDEX} must name a file inside its folder for 'a', got {outside!r}" in str(error.value)


@pytest.mark.parametrize("name", ["model-1.safetensors", "part/model-1.safetensors", "..model-1.safetensors"])
def test_links_of_the_cache_of_the_hub_are_followed(name, tmp_path):
    blob = write(tmp_path / "blobs", {}) / "model-1.safetensors"
    folder = write(tmp_path / "snapshots" / "main", {"a": name})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(blob)
    np.testing.assert_array_equal(jgg.hf.Checkpoint(folder)["a"], TENSORS["a"])


@pytest.mark.parametrize("read", [jgg.hf.read_config, jgg.hf.Checkpoint])
def test_the_name_of_a_model_on_the_hub_is_no_folder(read, tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        read("Qwen/Qwen3-30B-A3B")
    assert "path must be a folder" in str(error.value)
    assert "got Qwen/Qwen3-30B-A3B" in str(error.value)
    assert "jgg.hf.download" in str(error.value)
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} must have (config\.json|model\.safetensors or {INDEX})"):
        read(tmp_path)


def test_a_file_is_no_folder_of_a_checkpoint(tmp_path):
    path = write(tmp_path, {}) / "model-1.safetensors"
    with pytest.raises(FileNotFoundError, match=rf"path must be a folder .*, got {path}"):
        jgg.hf.Checkpoint(path)


@pytest.mark.parametrize(("text", "message"), list(INDEXES.values())[:4], ids=list(INDEXES)[:4])
def test_what_is_wrong_with_a_config_file_is_named(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for given in (path, tmp_path):
        with pytest.raises(ValueError, match=rf"/config\.json {message}"):
            jgg.hf.read_config(given)


# family, change, message
WRONG_CONFIGS = [
    ("mixtral", {"model_type": ["mixtral"]}, r"model_type must be one of .*, got \['mixtral'\]"),
    ("qwen3_moe", {"model_type": "bert"}, r"model_type must be one of .*'mixtral'.*got 'bert'"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "'qwen3_moe' must have no null in 'moe_intermediate_size', got nul"),
    ("qwen3_moe", {"hidden_act": "tanh"}, r"hidden_act must be one of .*got 'tanh'"),
    ("mixtral", {"hidden_act": ["silu"]}, r"hidden_act must be one of .*, got \['silu'\]"),
    ("mixtral", {"text_config": [1]}, r"text_config must be an object, got \[1\]"),
    ("mixtral", {"text_config": "text"}, r"text_config must be an object, got 'text'"),
    ("mixtral", {"hidden_size": "4096"}, r"hidden_size must be a positive int, got '4096'"),
    ("mixtral", {"intermediate_size": 14336.0}, r"intermediate_size must be a positive int, got 14336\.0"),
    ("mixtral", {"num_local_experts": 0}, r"num_local_experts must be a positive int, got 0"),
    ("mixtral", {"num_experts_per_tok": True}, r"num_experts_per_tok must be a positive int, got True"),
    ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok must be at most num_local_experts, 8, got 9"),
    ("qwen3_moe", {"norm_topk_prob": "yes"}, r"norm_topk_prob must be True or False, got 'yes'"),
    ("qwen3_moe", {"moe_intermediate_size": []}, r"moe_intermediate_size must be a positive int, got \[\]"),
    ("qwen3_next", {"shared_expert_intermediate_size": -1}, r"shared_expert_intermediate_size must .*got -1"),
    ("olmoe", {"norm_topk_prob": 1}, r"norm_topk_prob must be True or False, got 1"),
    ("deepseek_v3", {"n_shared_experts": "2"}, r"n_shared_experts must be an int of at least 0, got '2'"),
    ("deepseek_v3", {"n_group": 3}, r"n_group must divide n_routed_experts, \d+, got 3"),
    ("deepseek_v3", {"topk_group": "2"}, r"topk_group must be a positive int, got '2'"),
    ("deepseek_v3", {"routed_scaling_factor": "2.5"}, r"routed_scaling_factor must be a number, got '2\.5'"),
    ("deepseek_v3", {"routed_scaling_factor": float("nan")}, r"routed_scaling_factor must be a finite number, got nan"),
    ("gpt_oss", {"swiglu_limit": "7"}, r"swiglu_limit must be a number, got '7'"),
    ("gpt_oss", {"swiglu_alpha": [1]}, r"swiglu_alpha must be a number, got \[1\]"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG_CONFIGS)
def test_what_is_wrong_in_a_config_is_named(name, change, message):
    config, _, _, _ = load(name)
    with pytest.raises((TypeError, ValueError), match=message):
        jgg.hf.moe_layer(config | change)


@pytest.mark.parametrize("config", ["Qwen/Qwen3-30B-A3B", None, [1]])
def test_a_config_is_a_mapping(config):
    with pytest.raises(TypeError, match="config must be a mapping, as read_config returns it, got"):
        jgg.hf.moe_layer(config)


FP8 = {"quant_method": "fp8"}
WRONG_QUANTIZATIONS = ["fp8", ["fp8"], 8, {"quant_method": ["fp8"]}]
WRONG_BLOCKS = [None, 8, "ab", [128], [0, 128], [128, -1], ["128", 128], [128.0, 128], [True, 1]]


@pytest.mark.parametrize("how", WRONG_QUANTIZATIONS, ids=str)
def test_what_is_wrong_in_a_quantization_is_shown(how):
    config, weights, _, _ = load("mixtral")
    with pytest.raises(ValueError) as error:
        jgg.hf.from_hf(config | {"quantization_config": how}, weights, 0)
    assert "quantization_config must have quant_method 'fp8' with a weight_block_size" in str(error.value)
    assert str(error.value).endswith(f", got {how!r}.")


@pytest.mark.parametrize("block", WRONG_BLOCKS, ids=str)
def test_blocks_have_positive_sizes(block):
    config, weights, _, _ = load("mixtral")
    with pytest.raises(ValueError) as error:
        jgg.hf.from_hf(config | {"quantization_config": FP8 | {"weight_block_size": block}}, weights, 0)
    assert f"weight_block_size of quantization_config must be two positive ints, got {block!r}" in str(error.value)
