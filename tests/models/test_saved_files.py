"""A folder's other files, such as a tokenizer, are kept on saving, with the usual permissions."""

import json
import os
import shutil
import stat

import jax.numpy as jnp
import pytest
from flax import nnx

import jgg.hf
import jgg.models
from tests.support import tokenizers
from tests.support.models import DATA, loaded

FILES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}',
    "special_tokens_map.json": "{}",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "tokenizer.model": "\0\1",
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [1, 2]}',
    "preprocessor_config.json": "{}",
    "tokenization_own.py": "raise AssertionError  # is copied, not run",
}
OTHERS = ("README.md", "pytorch_model.bin", "training_args.bin", ".tokenizer.json", "optimizer.safetensors.tmp")


def with_files(folder, family="qwen3_moe", **changes):
    """A family's folder with files of a tokenizer and the like, and with others that are not to be copied."""
    shutil.copytree(DATA / family, folder)
    for name, text in {**FILES, **dict.fromkeys(OTHERS, "not copied"), **changes}.items():
        (folder / name).write_text(text)
    (folder / "tokenizer_files").mkdir()
    return folder


def files_of(folder):
    """The texts of a saved folder's files, without the model's."""
    own = {"config.json", "model.safetensors"}
    return {path.name: path.read_text() for path in folder.iterdir() if path.name not in own}


def test_the_files_of_a_tokenizer_are_copied(tmp_path):
    model = jgg.models.load(with_files(tmp_path / "loaded"))
    graphdef, state = nnx.split(model)
    for number, each in enumerate((model, nnx.clone(model), nnx.merge(graphdef, state))):
        jgg.models.save(each, tmp_path / str(number))
        assert files_of(tmp_path / str(number)) == FILES
    again = jgg.models.load(tmp_path / "0", dtype=jnp.float32)
    (tmp_path / "empty").mkdir()
    jgg.models.save(again, tmp_path / "empty")
    assert files_of(tmp_path / "empty") == FILES


def test_a_merged_model_has_the_files_of_its_base(tmp_path):
    base = with_files(tmp_path / "base", "glm4_moe")
    tuned = jgg.models.load(base, lora_rank=2)
    jgg.models.save_adapter(tuned, tmp_path / "adapter")
    tuned.merge_adapters()
    jgg.models.save(tuned, tmp_path / "merged")
    assert files_of(tmp_path / "merged") == FILES


def test_links_to_files_are_followed(tmp_path):
    """As in the Hub's cache, where a snapshot has links alone."""
    blobs, snapshot = with_files(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    jgg.models.save(jgg.models.load(snapshot), tmp_path / "saved")
    assert files_of(tmp_path / "saved") == FILES
    assert not any(path.is_symlink() for path in (tmp_path / "saved").iterdir())


def test_models_of_two_folders_keep_their_own_files_in_a_compiled_function(tmp_path):
    folders = with_files(tmp_path / "one"), with_files(tmp_path / "two", **{"vocab.json": "[]"})

    @nnx.jit
    def update(model):
        model.norm[...] += 0

    for folder in folders:
        model = jgg.models.load(folder)
        update(model)
        jgg.models.save(model, tmp_path / f"saved-{folder.name}")
        assert files_of(tmp_path / f"saved-{folder.name}")["vocab.json"] == (folder / "vocab.json").read_text()


def test_a_warning_names_the_files_that_are_gone(tmp_path):
    folder = with_files(tmp_path / "loaded")
    model = jgg.models.load(folder)
    for name in ("merges.txt", "vocab.json"):
        (folder / name).unlink()
    with pytest.warns(UserWarning, match=rf"writes no merges\.txt, vocab\.json: {folder}, which the model") as warned:
        jgg.models.save(model, tmp_path / "saved")
    assert [os.path.basename(each.filename) for each in warned] == [os.path.basename(__file__)]
    assert files_of(tmp_path / "saved").keys() == FILES.keys() - {"merges.txt", "vocab.json"}


def test_transformers_tokenizes_by_a_saved_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = with_files(tmp_path / "loaded")
    tokenizers.llama().save(str(folder / "tokenizer.json"))
    jgg.models.save(jgg.models.load(folder), tmp_path / "saved")
    one, two = (
        transformers.PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        for path in (folder, tmp_path / "saved")
    )
    assert one("one two")["input_ids"] == two("one two")["input_ids"] != []
    messages = [{"role": "user", "content": "one"}]
    assert two.apply_chat_template(messages, tokenize=False) == str(messages)


def modes_of(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_have_the_permissions_of_new_ones(umask, tmp_path):
    model, before = jgg.models.load(with_files(tmp_path / "loaded"), lora_rank=1), os.umask(umask)
    try:
        jgg.models.save(model, tmp_path / "one")
        jgg.models.save(model, tmp_path / "several", max_shard_bytes=20_000)
        jgg.models.save_adapter(model, tmp_path / "adapter")
        jgg.models.save_adapter(model, tmp_path / "by_expert", by_expert=True)
    finally:
        os.umask(before)
    for folder in ("one", "several", "adapter", "by_expert"):
        modes = modes_of(tmp_path / folder)
        assert modes == dict.fromkeys(modes, 0o666 & ~umask), folder
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o777 & ~umask


def test_the_model_of_an_adapter_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(DATA)
    for options in ({}, {"by_expert": True}):
        jgg.models.save_adapter(jgg.models.load("qwen3_moe", lora_rank=1), tmp_path / "adapter", **options)
        settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == str(DATA / "qwen3_moe")
        assert settings["task_type"] == "CAUSAL_LM"  # AutoPeftModelForCausalLM asks for it


def test_gguf_is_refused_by_name(tmp_path):
    (tmp_path / "model-Q4_K_M.gguf").touch()
    for path in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        with pytest.raises(ValueError, match=r"must have safetensors files, got .*/model-Q4_K_M\.gguf: jgg reads"):
            jgg.models.load(path)
    with pytest.raises(ValueError, match=r"must be a model in safetensors, got 'org/Tiny-GGUF': .*gguf_file"):
        jgg.models.load("org/Tiny-GGUF")
    both = shutil.copytree(DATA / "qwen3_moe", tmp_path / "both")
    shutil.copy(tmp_path / "model-Q4_K_M.gguf", both)
    assert loaded("qwen3_moe").config == jgg.models.load(both).config
