"""examples/finetune.py says in one line what is wrong with options and folders, before it loads anything."""

import json
import os
import shutil

import finetune
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arguments import enough_memory
from flax import nnx

import jgg.models
import jgg.train
from tests.support.models import config_of, folder_with_tokenizer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "t1 t2", "completion": " t3"}\n' * 4)
    (tmp_path / "file").write_text("x")
    return folder_with_tokenizer("qwen3_moe", tmp_path / "model")


@pytest.fixture
def error(folder, monkeypatch, capsys):
    """Runs an example until it ends, before the model is loaded; its one line."""

    def load(*_, **__):
        raise AssertionError("the model is loaded")

    def run(program, *arguments):
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as raised:
            patch.setattr(jgg.models, "load", load)
            program.main([str(argument) for argument in arguments])
        lines = raised.value.code if isinstance(raised.value.code, str) else capsys.readouterr().err.rstrip()
        assert lines and "\n" not in lines
        return lines

    return run


OPTIONS = {
    "--steps": ["0", "-1", "1.5", "2147483648"],
    "--epochs": ["0", "-1", "nan", "inf", "1e300"],
    "--batch-size": ["0", "1000000000"],
    "--accumulate": ["0", "1000000"],
    "--sequence-length": ["0", "1000000000"],
    "--save-every": ["0"],
    "--log-every": ["0"],
    "--lora-rank": ["0", "x", "1000000"],
    "--lora-alpha": ["0", "nan"],
    "--learning-rate": ["0", "-1", "inf"],
    "--seed": ["-1"],
    "--targets": ["w_x"],
    "--output": ["file", "file/adapter", "model", "/dev/null", "/proc/adapter", "x" * 300],
    "--checkpoints": ["file", "model", "out", "/proc/run"],
    "--data": ["model", "missing.jsonl", "pipe", "/dev/zero"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_a_wrong_option_is_named(option, error):
    os.mkfifo("pipe")
    for value in OPTIONS[option]:
        assert option in error(finetune, "model", "--data", "data.jsonl", "--output", "out", option, value)
    assert not os.path.lexists("out")


OPTIONS_OF_GENERATE = {
    "--prompt": ["", " "],
    "--max-new-tokens": ["0", "-1", "1.5", "2147483648"],
    "--temperature": ["-1", "nan", "inf", "x"],
    "--top-p": ["0", "2", "nan"],
    "--top-k": ["0", "x"],
    "--samples": ["0"],
    "--stop": [""],
    "--prefill-chunk": ["0"],
    "--seed": ["-1", str(2**64)],
    "--experts": ["int4"],
}


@pytest.mark.parametrize("option", OPTIONS_OF_GENERATE)
def test_a_wrong_option_of_generate_is_named(option, error):
    for value in OPTIONS_OF_GENERATE[option]:
        assert option in error(generate, "model", "--prompt", "t1", option, value)


def test_an_adapter_may_follow_the_options():
    assert generate.parse(["model", "--prompt", "t1", "--seed", "1", "adapter"]).adapter.name == "adapter"


@pytest.mark.parametrize("kind", [MemoryError("32 GiB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 32\nGiB")])
def test_too_little_memory_is_one_line(kind):
    with pytest.raises(SystemExit, match="memory runs out: take less of --x"), enough_memory("--x"):
        raise kind
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), enough_memory("--x"):
        raise jax.errors.JaxRuntimeError("INTERNAL: other")


CONFIGS = {
    "missing": ("config.json", None, "model must have config.json, got none"),
    "damaged": ("config.json", "{", "config.json must be"),
    "another family": ("config.json", '{"model_type": "bert"}', "model_type must be one of"),
    "no tokenizer": ("tokenizer.json", None, "model must be a folder with tokenizer.json, got none"),
    "ends": ("generation_config.json", '{"eos_token_id": "t1"}', "eos_token_id of model/generation_config.json"),
    "not JSON": ("generation_config.json", "{", "model/generation_config.json must be a JSON file"),
    "a list": ("generation_config.json", "[2]", "model/generation_config.json must hold a JSON object, got a list"),
    "balance": ("config.json", {"router_aux_loss_coef": "much"}, "router_aux_loss_coef must be a number of at least 0"),
    "vocabulary": ("config.json", {"vocab_size": 3}, "data.jsonl must have tokens below the model's vocab_size, 3"),
    "end": ("generation_config.json", '{"eos_token_id": 64}', "below the model's vocab_size, 64, got 64"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_folder_is_named(name, folder, error):
    file, content, message = CONFIGS[name]
    if content is None:
        (folder / file).unlink()
    else:
        content = content if isinstance(content, str) else json.dumps(config_of("qwen3_moe") | content)
        (folder / file).write_text(content)
    assert message in error(finetune, "model", "--data", "data.jsonl", "--output", "out")


def test_no_folder_is_named(error):
    for program, more in ((finetune, ["--data", "data.jsonl", "--output", "out"]), (generate, ["--prompt", "t1"])):
        for folder in ("missing", "file", "."):
            assert folder in error(program, folder, *more)


def test_a_prompt_beyond_the_vocabulary_is_named(folder, error):
    (folder / "config.json").write_text(json.dumps(config_of("qwen3_moe") | {"vocab_size": 9}))
    assert "--prompt must have tokens below the model's vocab_size, 9, got 11, 't11'" in error(
        generate, "model", "--prompt", "t1 t11"
    )
    assert "'utf-8' codec can't encode character '\\udc80'" in error(generate, "model", "--prompt", "t1 \udc80")


@pytest.mark.parametrize(("coefficient", "weight"), [(None, 0), (0.5, 1.0), (1, 2)])
def test_a_balance_of_null_is_none(coefficient, weight):
    config = jgg.models.model_config(config_of("qwen3_moe") | {"router_aux_loss_coef": coefficient})
    assert finetune.balance_weight(config) == weight  # two experts for each token


def test_the_balance_of_a_folder_with_towers_is_that_of_its_language_model():
    config = config_of("qwen3_vl_moe")
    config["text_config"] |= {"router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
    assert finetune.balance_weight(jgg.models.model_config(config)) == 1.0


class Model(nnx.Module):
    """Its loss is w for each token, its balance w times the number of tokens that count."""

    def __init__(self):
        self.w = nnx.LoRAParam(jnp.float32(3))

    def loss(self, tokens, targets, segments, *, weights, mask):
        self.sow(nnx.Intermediate, "load_balancing_loss", self.w[...] * jnp.sum(mask, dtype=jnp.float32)[None])
        return jnp.sum(self.w[...] * weights)


def test_what_counts_in_the_loss(folder):
    """Each token that is learned counts alike, in whatever part of the batch, and padding not even in the balance."""
    arguments = ["model", "--data", "data.jsonl", "--output", "out", "--batch-size", "1", "--accumulate", "2"]
    options = finetune.parse(None, arguments)
    examples = [(np.arange(size, dtype=np.int32), first) for size, first in ((17, 0), (9, 6), (4, 2))]
    batch = finetune.batch_of(finetune.pack(examples, 16, True), 1, options)
    assert sorted(finetune.lengths_of(batch)) == [3, 8, 16]
    np.testing.assert_allclose(np.unique(batch["weights"]), [0, 2 / (16 + 3 + 2)], rtol=1e-6)
    assert np.count_nonzero(batch["weights"]) == 21
    loss, model = finetune.loss_of(options, 0.1), Model()
    totals, learned = zip(*(loss(model, {name: a[n] for name, a in batch.items()}) for n in range(2)), strict=True)
    np.testing.assert_allclose(sum(learned), 2 * 3, rtol=1e-6)
    np.testing.assert_allclose(sum(totals), 2 * 3 + 0.1 * 3 * (16 + 11), rtol=1e-6)


def test_training_that_cannot_go_on_writes_no_adapter(error, monkeypatch):
    def fail(*_):
        raise jgg.train.TrainingError("step 3: the loss is nan")

    monkeypatch.setattr(finetune, "make_trainer", lambda *_: None)
    monkeypatch.setattr(finetune, "run_steps", fail)
    assert error(finetune, "model", "--data", "data.jsonl", "--output", "out") == "step 3: the loss is nan"
    assert not os.path.lexists("out")


def test_other_options_are_named_where_a_run_goes_on(folder, error):
    arguments = "model", "--data", "data.jsonl", "--output", "out", "--checkpoints", "run", "--steps", "3"
    finetune.check_same_run(finetune.parse(None, list(arguments)), 3)
    (folder.parent / "run" / "2").mkdir()
    changes = {
        "--lora-rank": 4,
        "--lora-alpha": 1.5,
        "--targets": "w_q",
        "--experts": "fp8",
        "--sequence-length": 9,
        "--batch-size": 2,
        "--accumulate": 3,
        "--steps": 7,
        "--learning-rate": 1e-3,
        "--seed": 1,
    }
    for option, value in changes.items():
        name = option.strip("-").replace("-", "_")
        assert f"--checkpoints run has a run with {name} " in error(finetune, *arguments, option, value)
    assert "has a run with packing True, got False" in error(finetune, *arguments, "--no-packing")
    shutil.copytree("model", "other")
    assert "has a run with folder" in error(finetune, "other", *arguments[1:])
    (folder.parent / "data.jsonl").write_text('{"text": "t1 t2"}')
    assert "has a run with data" in error(finetune, *arguments)
    (folder.parent / "run" / "options.json").write_text("{")
    assert "run/options.json must be a JSON file" in error(finetune, *arguments)
