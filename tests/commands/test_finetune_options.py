"""examples/finetune.py says in one line what is wrong with options and folders, before it loads anything."""

import json
import os
import re
import shutil

import finetune
import generate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from arguments import enough_memory
from flax import nnx

import jgg.models
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


class Model(nnx.Module):
    """Its loss is w for each token, its balance w times the number of tokens that count."""

    def __init__(self):
        self.w = nnx.LoRAParam(jnp.float32(3))

    def losses(self, tokens, targets, segments, *, mask):
        self.sow(nnx.Intermediate, "load_balancing_loss", self.w[...] * jnp.sum(mask, dtype=jnp.float32)[None])
        return jnp.broadcast_to(self.w[...], tokens.shape)


def step_of_model(weight):
    """A step of gradient descent, its state and what is frozen."""
    graphdef, adapters, frozen = nnx.split(Model(), nnx.LoRAParam, ...)
    optimizer = optax.sgd(1.0)
    return finetune.make_step(graphdef, optimizer, weight, True), (adapters, optimizer.init(adapters)), frozen


def test_padding_does_not_count_in_the_balancing_loss(optax_promotion):
    data = finetune.pack([(np.arange(9, dtype=np.int32), 0), (np.arange(4, dtype=np.int32), 0)], 16, True)
    step, state, frozen = step_of_model(0.1)
    (adapters, _), loss = step(state, frozen, {name: array[None] for name, array in data.items()})
    assert loss == 3
    np.testing.assert_allclose(adapters["w"].get_value(), 3 - 1 - 0.1 * (8 + 3), rtol=1e-6)


@pytest.mark.parametrize("weight", [jnp.inf, 3e38])  # the gradient is infinite, or only what it leads to
def test_an_adapter_that_is_not_finite_shows_in_the_loss(weight, optax_promotion):
    data = finetune.pack([(np.arange(2, dtype=np.int32), 0)], 16, True)
    step, (adapters, opt_state), frozen = step_of_model(weight)
    adapters = jax.tree.map(lambda w: jnp.full_like(w, -1e38), adapters)
    _, loss = step((adapters, opt_state), frozen, {name: array[None] for name, array in data.items()})
    assert np.isnan(loss)


def run_steps(losses, tmp_path):
    """Trains by steps with these losses, and saves each."""
    arguments = ["model", "--data", "data.jsonl", "--output", "out", "--batch-size", "1"]
    arguments += ["--save-every", "1", "--log-every", "2", "--checkpoints", str(tmp_path / "checkpoints")]
    options = finetune.parse(None, arguments)
    losses = jnp.array(losses)
    step = jax.jit(lambda state, frozen, batch: ({"n": state["n"] + 1}, losses[state["n"]]))
    data, meter = finetune.pack([(np.arange(4, dtype=np.int32), 0)], 8, True), Meter()
    return finetune.run_steps(step, {"n": jnp.int32(0)}, None, data, options, meter, len(losses))


class Meter:
    """Measures nothing."""

    def restart(self): ...

    def add(self, segments): ...


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        run_steps([1.0, 2.0, jnp.inf, 4.0], tmp_path)
    assert str(raised.value).startswith("step 3: the loss or an adapter is inf, so nothing more is written; the last")
    assert str(raised.value).endswith("checkpoint is of step 2")
    assert run_steps([1.0, 2.0, 3.0], tmp_path)["n"] == 3  # goes on from there
    assert re.findall(r"step (\d): loss (\S+),", capsys.readouterr().out) == [
        ("1", "1.0000"),
        ("2", "2.0000"),
        ("3", "3.0000"),
    ]


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


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path):
    run_steps([1.0, 2.0], tmp_path)
    for path in (tmp_path / "checkpoints" / "2").rglob("*"):
        if path.is_file():
            path.write_text("x")
    with pytest.raises(SystemExit, match="--checkpoints must have steps of this model, got"):
        run_steps([1.0, 2.0, 3.0], tmp_path)
