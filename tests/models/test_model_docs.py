"""The code of the pages on models, generating, saving and fine-tuning runs, and does what they say."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jgg.models
from tests.support.documents import code_of, run_code
from tests.support.models import DATA, folder_with_tokenizer

pytestmark = pytest.mark.usefixtures("as_a_reader_runs_it")


@pytest.mark.thorough
def test_a_model_is_loaded_trained_and_saved(tmp_path):
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    names = run_code("\n".join(code_of("models.md", "Load") + code_of("models.md", "Train")))
    assert names["losses"][-1] < names["losses"][0]
    trained, tokens = jgg.models.load(tmp_path / "trained"), names["tokens"]
    np.testing.assert_array_equal(trained(tokens), names["model"](tokens))
    np.testing.assert_allclose(names["replayed"], names["of_targets"], rtol=0, atol=1e-3)


def names_of_generating(*sections):
    """What the code of sections defines, with the page's first program before it."""
    sections = "In Python", *sections
    return run_code("\n".join(code for section in sections for code in code_of("generate.md", section)))


@pytest.mark.sweep
def test_samples_have_details(tmp_path):
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    names = names_of_generating("Sampling", "Log-probabilities")
    assert names["sampled"].shape == (2, 16)
    assert names["samples"].shape == names["generated"].tokens.shape == (8, 16)
    new = names["rows"].is_new
    np.testing.assert_allclose(-names["losses"][new], names["rows"].log_probabilities[new], atol=0.1)  # bfloat16


@pytest.mark.sweep
def test_text_is_generated(tmp_path, capsys):
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    names = names_of_generating("Streaming")
    assert [len(prompt) for prompt in names["prompts"]] == [4, 4]
    assert names["lengths"] == [4, 1]
    assert names["new"].shape == (2, 16)
    alone = jgg.models.generate(names["model"], [names["prompts"][1][:1]], 16, stop_tokens=[2])
    np.testing.assert_array_equal(names["new"][1:], alone)
    printed = capsys.readouterr().out
    *_, last = printed.splitlines()
    tokens = names["stream"].tokens[0, : names["stream"].lengths[0]]
    assert last.split() == [f"t{token}" for token in tokens if token != 2]  # words of the vocabulary
    assert printed.count("t") >= 2 * 16
    streamed = [json.loads(line) for line in printed.splitlines() if line.startswith("[[")]
    np.testing.assert_array_equal(np.concatenate(streamed, axis=1), names["new"])


@pytest.mark.sweep
def test_text_is_generated_with_an_adapter(tmp_path):
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    model = jgg.models.load("model", lora_rank=16, lora_alpha=32)
    nnx.update(model, jax.tree.map(lambda array: array + 0.1, nnx.state(model, nnx.LoRAParam)))
    jgg.models.save_adapter(model, "adapter")
    names = run_code("\n".join(code_of("generate.md", "In Python") + code_of("generate.md", "With an adapter")))
    prompts, lengths = names["prompts"], names["lengths"]
    np.testing.assert_array_equal(names["new"], jgg.models.generate(model, prompts, 16, lengths=lengths))
    without = jgg.models.generate(jgg.models.load("model"), prompts, 16, lengths=lengths)
    assert np.any(names["new"] != without)


def test_targets_are_scored(tmp_path):
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    (code,) = code_of("evaluate.md", "In Python")
    names = run_code(code)
    losses = names["model"].losses(names["tokens"][:, :-1], names["tokens"][:, 1:])
    np.testing.assert_allclose(names["log_probability"], -losses.sum(), rtol=1e-3)
    np.testing.assert_allclose(names["perplexity"], np.exp(losses.mean()), rtol=1e-3)
    assert not names["is_likeliest"]


@pytest.mark.thorough
def test_a_run_is_saved_and_restored():
    names = run_code("\n".join(code_of("save.md", "A run")))
    own = nnx.state((names["layer"], names["optimizer"]))
    restored = nnx.state((names["restored"], names["restored_optimizer"]))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(restored), nnx.to_pure_dict(own))
    assert names["restored_optimizer"].step[...] == 1


def test_a_model_and_its_adapters_are_saved_and_loaded(tmp_path):
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    names = run_code("\n".join(code_of("save.md", "A whole model") + code_of("save.md", "Adapters")))
    own, copy = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "copy"))
    assert own.keys() == copy.keys()
    assert all(own[name].tobytes() == copy[name].tobytes() for name in own)
    other = jgg.models.load("model", lora_rank=8)
    nnx.update(other, jax.tree.map(lambda array: array + 1, nnx.state(other, nnx.LoRAParam)))
    jgg.models.load_adapter(other, "adapter")
    saved, loaded = (nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)) for model in (names["tuned"], other))
    jax.tree.map(np.testing.assert_array_equal, loaded, saved)


def test_folders_for_servers_are_whole(tmp_path):
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    names = run_code("\n".join(code_of("serve.md", "Serve a model") + code_of("serve.md", "Serve a fine-tuned model")))
    for name in ("served", "merged"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
        assert (tmp_path / name / "tokenizer.json").read_bytes() == (tmp_path / "model/tokenizer.json").read_bytes()
    for name in ("adapter", "adapter-for-servers"):
        jgg.models.load_adapter(names["model"], tmp_path / name)


@pytest.mark.sweep
def test_adapters_are_saved_and_loaded_as_the_page_on_fine_tuning_says(tmp_path):
    folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "t1 t2 t3 t4"}))
    (code,) = code_of("fine-tune.md", "In Python")
    names = run_code(code)
    losses = names["record"].metrics["loss"]
    assert losses[-1] < losses[0]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    own = nnx.state(names["trainer"].model, nnx.LoRAParam), nnx.state(names["model"], nnx.LoRAParam)
    trained, loaded = map(nnx.to_pure_dict, own)
    jax.tree.map(np.testing.assert_array_equal, loaded, trained)


@pytest.mark.sweep
def test_a_model_learns_from_rewards_and_its_weights_go_to_servers(tmp_path, capsys):
    shutil.copytree(DATA / "qwen3_moe", tmp_path / "model")
    names = run_code("\n".join(code_of("reinforcement-learning.md", "In Python")))
    steps, differences = zip(*(line.split() for line in capsys.readouterr().out.splitlines()), strict=True)
    assert steps == ("1", "2", "3") and max(map(float, differences)) < 0.1  # in bfloat16, on a CPU
    rows, advantages = names["batch_of"](4)
    assert rows.tokens.shape == (8, 11) and advantages.shape == (8, 1) and np.any(advantages)
    run_code("\n".join(code_of("reinforcement-learning.md", "Weights to a server")))
    own = load_file(tmp_path / "model" / "model.safetensors")
    printed = {line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()}
    assert printed == own.keys() == load_file(tmp_path / "weights-1" / "model.safetensors").keys()
    modules = {name.partition(".lora_")[0] for name in load_file(tmp_path / "policy-1" / "adapter_model.safetensors")}
    assert {f"{module.removeprefix('base_model.model.')}.weight" for module in modules} < own.keys()
