"""`jgg finetune` and `jgg train`: what they learn, measure, write, and that a run goes on as if it was not stopped."""

import json
import math
import os
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg.data
import jgg.models
from jgg.cli import main
from tests.support.models import config_of, folder_with_tokenizer

PAIRS = [([5, 6, 7], [8, 9, 10, 11]), ([12], [13, 14]), ([15, 16, 17, 18, 19, 20], [21])]


@pytest.fixture(autouse=True)
def promotion():
    """Users have not forbidden it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def words(tokens):
    return " ".join(f"t{token}" for token in tokens)


ROWS = [{"prompt": words(prompt), "completion": " " + words(completion)} for prompt, completion in PAIRS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder in the working folder, and data, whose texts token 1 ends."""
    monkeypatch.chdir(tmp_path)
    write("data.jsonl", ROWS)
    folder = folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "top_k": 3}))
    return folder


def write(name, rows):
    with open(name, "w") as file:
        file.write("\n".join(map(json.dumps, rows)) + "\n")


def run(command, *arguments):
    """Runs a command; the lines of its log."""
    values = [*map(str, arguments)]
    assert main([command, "model", "--data", "data.jsonl", "--log-every", "1", *values]) == 0
    with open(f"{values[values.index('--output') + 1]}.jsonl") as file:
        return [json.loads(line) for line in file]


def losses(lines):
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.thorough
def test_fine_tuning_goes_on_from_a_checkpoint(folder, capsys):
    options = "--steps", 24, "--save-every", 12, "--checkpoints", "run", "--lora-rank", 2
    options += "--sequence-length", 12, "--batch-size", 1, "--accumulate", 2, "--learning-rate", 2e-2
    unbroken = losses(run("finetune", *options, "--output", "out"))
    assert list(unbroken) == list(range(1, 25))
    adapter = (folder.parent / "out/adapter_model.safetensors").read_bytes()
    shutil.rmtree(folder.parent / "run" / "24")
    # in its own log too
    assert losses(run("finetune", *options, "--output", "out")) == unbroken
    assert (folder.parent / "out/adapter_model.safetensors").read_bytes() == adapter
    model = jgg.models.load(folder)
    jgg.models.load_adapter(model, "out")
    prompt, completion = PAIRS[0]
    assert jgg.models.generate(model, [prompt], len(completion) + 1).tolist() == [[*completion, 1]]
    assert json.loads((folder.parent / "out/generation_config.json").read_text()) == {"eos_token_id": [1, 2]}
    with pytest.raises(SystemExit):
        run("finetune", *options, "--output", "x", "--seed", 1)
    assert "run has a run with other options: seed is 1, was 0" in capsys.readouterr().err


@pytest.mark.sweep
def test_rows_that_are_skipped_are_told_and_logged(folder, capsys):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no chats') }}")
    write("data.jsonl", [*ROWS, {"messages": [{"role": role, "content": "t3"} for role in ("user", "assistant")]}])
    options = "--steps", 1, "--lora-rank", 2, "--sequence-length", 12, "--batch-size", 1, "--skip-unmarked"
    (line,) = run("finetune", *options, "--output", "out")
    assert line["skipped_rows"] == 1 and "eval_skipped_rows" not in line
    assert "3 examples, 1 row of --data skipped that the chat template cannot mark: " in capsys.readouterr().out


@pytest.mark.sweep
@pytest.mark.usefixtures("folder")
def test_a_run_that_sigterm_stops_says_so_and_goes_on(capsys, monkeypatch):
    options = "--steps", 6, "--lora-rank", 2, "--sequence-length", 12, "--batch-size", 1, "--checkpoints"
    unbroken = losses(run("finetune", *options, "unbroken-run", "--output", "unbroken"))
    of_step = jgg.data.Batches.of_step

    def terminated(batches, step):
        if step == 4:
            signal.raise_signal(signal.SIGTERM)
        return of_step(batches, step)

    capsys.readouterr()
    own = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nothing handled SIGTERM"))
    try:
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(jgg.data.Batches, "of_step", terminated)
            run("finetune", *options, "run", "--output", "stopped")
    finally:
        signal.signal(signal.SIGTERM, own)
    printed = capsys.readouterr()
    assert ended.value.code == 143
    assert printed.err == "jgg: stopped by SIGTERM after step 4; run the same command again to go on\n"
    assert "step 4: loss" in printed.out and "wrote" not in printed.out and not os.path.exists("stopped")
    assert losses(run("finetune", *options, "run", "--output", "stopped")) == unbroken
    assert "goes on from step 4, " in capsys.readouterr().out
    adapters = [Path(name, "adapter_model.safetensors").read_bytes() for name in ("unbroken", "stopped")]
    assert adapters[0] == adapters[1]


def mean_loss(rows, folder="model"):
    """The mean loss of the tokens that are learned, by whole logits."""
    examples = [(prompt, [*prompt, *completion, 1]) for prompt, completion in rows]
    padded = np.zeros((4, 11), np.int32)  # one shape for one program
    for row, (_, tokens) in enumerate(examples):
        padded[row, : len(tokens)] = tokens
    logits = nnx.jit(lambda model, tokens: model(tokens))(jgg.models.load(folder), padded[:, :-1])
    losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, padded[:, 1:]))
    own = [
        row[max(len(prompt) - 1, 0) : len(tokens) - 1] for row, (prompt, tokens) in zip(losses, examples, strict=False)
    ]
    return float(np.mean(np.concatenate(own)))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [["--batch-size", 2], ["--no-packing", "--batch-size", 2, "--accumulate", 2]])
def test_the_first_loss_of_fine_tuning_is_the_model_s_for_completions_alone(options, folder):
    write("data.jsonl", [*ROWS, {"text": words(range(30, 40))}])
    write("held.jsonl", ROWS)
    arguments = "--steps", 1, "--sequence-length", 14, "--eval-data", "held.jsonl", "--learning-rate", 1e-9
    (line,) = run("finetune", *options, *arguments, "--output", "adapter")
    assert line["loss"] == pytest.approx(mean_loss([*PAIRS, ([], list(range(30, 40)))]), abs=5e-3)  # in bfloat16
    assert line["eval_loss"] == pytest.approx(mean_loss(PAIRS), abs=5e-3)
    assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    assert line["tokens_per_second"] > 0 and 1 <= line["expert_load"] <= 4 and line["learning_rate"] > 0


@pytest.mark.sweep
def test_fine_tuning_of_some_matrices_beside_experts_in_fp8(folder):
    messages = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t6 t7"}]
    write("data.jsonl", [{"messages": messages}])
    template = (
        "{{ bos_token }}{% for message in messages %} {{ 't2' if message.role == 'user' else 't3' }} "
        "{{ message.content }} t1{% endfor %}{% if add_generation_prompt %} t3 {% endif %}"
    )
    settings = {"chat_template": template, "bos_token": "t4"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    options = "--experts", "fp8", "--targets", "w_q", "w_down", "--steps", 8, "--learning-rate", 2e-2
    options += "--sequence-length", 16, "--batch-size", 1, "--output", "out"
    found = list(losses(run("finetune", *options)).values())
    assert found[-1] < found[0] / 2
    settings = json.loads((folder.parent / "out/adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in settings["target_modules"]} == {"q_proj"}


SIZES = "--sequence-length", 16, "--batch-size", 2, "--learning-rate", 1e-2


@pytest.mark.sweep
def test_a_whole_model_is_fine_tuned_and_saved_with_its_tokenizer(folder):
    before = jgg.models.load(folder, dtype=jnp.float32)
    found = losses(run("finetune", "--full", "--steps", 12, *SIZES, "--output", "out"))
    assert found[12] < found[1] / 2
    after = jgg.models.load("out", dtype=jnp.float32)
    assert all(
        bool(jnp.any(a != b)) for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (before, after)), strict=True)
    )
    assert (folder.parent / "out/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    generation = json.loads((folder.parent / "out/generation_config.json").read_text())
    assert generation == {"eos_token_id": [1, 2], "top_k": 3}


SMALL_TRAINING = ("--tokenizer", "tokenizer", "--dtype", "float32", *SIZES)


def leave_a_config_alone(folder):
    """Leaves no model but the config of a smaller one; the tokenizer's folder."""
    shutil.rmtree(folder.parent / "model")
    tokenizer = folder_with_tokenizer("qwen3_moe", folder.parent / "tokenizer")
    for path in tokenizer.glob("*.safetensors"):
        path.unlink()
    (folder.parent / "model").mkdir()
    config = config_of("qwen3_moe") | {"num_hidden_layers": 1, "initializer_range": 0.2, "vocab_size": 64}
    (folder.parent / "model/config.json").write_text(json.dumps(config))
    write("data.jsonl", [{"text": words([5 + n % 20 for n in range(start, start + 100)])} for start in range(3)])
    return tokenizer


@pytest.mark.sweep
def test_a_new_model_is_trained_and_saved_with_its_tokenizer(folder):
    """From the config alone; long texts are divided."""
    tokenizer, evaluated = leave_a_config_alone(folder), ("--eval-data", "data.jsonl", "--eval-every", 10)
    lines = run("train", *SMALL_TRAINING, *evaluated, "--steps", 30, "--output", "out")
    assert lines[0]["loss"] > 3 and lines[-1]["loss"] < lines[0]["loss"] / 3
    assert [line["step"] for line in lines if "eval_loss" in line] == [10, 20, 30]
    assert lines[-1]["eval_loss"] < lines[-1]["loss"] * 1.5
    # 3 texts of 101 tokens are 18 sequences of 16 and one of what is left of each
    assert lines[-1]["epoch"] == pytest.approx(30 * 2 / 19)
    model = jgg.models.load("out", dtype=jnp.float32)
    assert jgg.models.generate(model, [[5, 6, 7]], 5).tolist() == [[8, 9, 10, 11, 12]]
    assert (folder.parent / "out/tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


@pytest.mark.sweep
def test_muon_trains_a_new_model_with_the_options_of_a_file(folder):
    leave_a_config_alone(folder)
    lines = run("train", *SMALL_TRAINING, "--steps", 1, "--output", "out")
    by_muon = "--config", "out.toml", "--optimizer", "muon", "--steps", "30", "--output", "by_muon", "--quiet"
    assert main(["train", *by_muon]) == 0
    with open("by_muon.jsonl") as file:
        first, *_, last = (json.loads(line)["loss"] for line in file)
    assert first == pytest.approx(lines[0]["loss"], rel=1e-6) and last < first / 2


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.sweep)])
def test_layers_are_updated_in_the_backward_pass(optimizer, folder):
    leave_a_config_alone(folder)
    options = *SMALL_TRAINING, "--remat", "all", "--optimizer", optimizer, "--steps", 12
    wanted = losses(run("train", *options, "--output", "out"))
    got = losses(run("train", *options, "--output", "in_backward", "--optimizer-in-backward"))
    assert got[1] == pytest.approx(wanted[1], rel=1e-6)
    assert got[12] < 0.4 * got[1]


@pytest.mark.gpu
def test_a_gpu_learns_the_same_and_its_memory_is_known(folder):
    options = "--steps", 4, *SIZES, "--batch-size", 2 * jax.device_count(), "--eval-data", "data.jsonl"
    lines = run("finetune", *options, "--learning-rate", 1e-9, "--output", "out")
    assert lines[-1]["eval_loss"] == pytest.approx(mean_loss(PAIRS), abs=1e-2)  # in bfloat16
    assert lines[-1]["peak_memory_bytes"] > 0
