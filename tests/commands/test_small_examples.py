"""The small examples run, and do what they print."""

import argparse
import importlib.util
import json
import re
import shutil

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jgg.models
from tests.support.models import folder_with_tokenizer
from tests.support.processes import ROOT, run

LOSSES = r"step \d+: loss ([\d.]+)"


@pytest.fixture(autouse=True)
def promotion():
    """Users have not forbidden it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def example(name):
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def main(capsys):
    """Runs an example's main in this process; what it printed."""

    def run_main(name, *arguments):
        example(name).main(*arguments)
        return capsys.readouterr().out

    return run_main


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ratio"), [("jit_model", 0.6), ("flax_nnx", 0.01), ("flax_linen", 0.01)])
def test_training(name, ratio, main):
    losses = [float(loss) for loss in re.findall(LOSSES, main(name))]
    assert len(losses) >= 5
    assert losses[-1] < ratio * losses[0]


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("interpret", marks=[pytest.mark.interpret, pytest.mark.sweep])]
)
def test_gradient_checks(implementation, main):
    printed = main("gradient_checks", ["--implementation", implementation])
    assert "finite differences agree" in printed
    assert printed.count("largest error") == 5


@pytest.mark.thorough
def test_export(main, tmp_path):
    pytest.importorskip("jax_cuda12_plugin", reason="lowering for CUDA needs JAX's plugin")
    path = str(tmp_path / "step.jax")
    printed = main("export_for_gpu", ["--out", path, "--load", path])
    assert "for cpu and cuda" in printed
    losses = [float(loss) for loss in re.findall(LOSSES, printed)]
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.sweep
def test_expert_parallelism():
    printed = run(ROOT / "examples" / "expert_parallelism.py", JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    rows = re.findall(r"(\w+), (.*): (\d+) of 1024 rows dropped, gradients differ by (\S+)", printed)
    assert "8 devices, experts over 4" in printed
    assert [(exchange, "all" in room) for exchange, room, *_ in rows] == [
        ("all_gather", True),
        ("ragged_all_to_all", True),
        ("ragged_all_to_all", False),
    ]
    for _, room, dropped, difference in rows:
        assert (int(dropped) == 0) == (float(difference) < 1e-5) == ("all" in room)


@pytest.mark.thorough
def test_generate(main, tmp_path):
    folder = folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    adapter, model = str(ROOT / "tests/data/model_adapters/qwen3_moe"), jgg.models.load(folder)
    jgg.models.load_adapter(model, adapter)
    new = jgg.models.generate(model, [[5, 6, 7]], 5)[0].tolist()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": new[3]}))
    printed = main("generate", [str(folder), "t5 t6 t7", "--adapter", adapter, "--max-new-tokens", "5"])
    assert printed == words([5, 6, 7, *new[: new.index(new[3])]]) + "\n"


PAIRS = [([5, 6, 7], [8, 9, 10, 11]), ([12], [13, 14]), ([15, 16, 17, 18, 19, 20], [21])]


def words(tokens):
    return " ".join(f"t{token}" for token in tokens)


def tuning_arguments(family, tmp_path, rows, *options):
    """The arguments of examples/finetune.py for a family and rows of data; token 1 ends a text."""
    folder = tmp_path / family
    if not folder.exists():
        folder_with_tokenizer(family, folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    arguments = [folder, "--data", tmp_path / "data.jsonl", "--lora-rank", 2, "--log-every", 1, *options]
    return list(map(str, arguments))


def losses_by_step(printed):
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}


@pytest.mark.thorough
def test_fine_tuning_goes_on_from_a_checkpoint_and_generates(main, tmp_path):
    rows = [{"prompt": words(prompt), "completion": " " + words(completion)} for prompt, completion in PAIRS]
    shared = "--steps", 24, "--save-every", 12, "--checkpoints", tmp_path / "checkpoints"
    shared += "--sequence-length", 12, "--batch-size", 1, "--accumulate", 2, "--learning-rate", 2e-2

    def tune(output):
        arguments = tuning_arguments("qwen3_moe", tmp_path, rows, *shared, "--output", output)
        return losses_by_step(main("finetune", arguments))

    unbroken = tune(tmp_path / "unbroken")
    assert list(unbroken) == list(range(1, 25))
    shutil.rmtree(tmp_path / "checkpoints" / "24")
    assert tune(tmp_path / "resumed") == {step: unbroken[step] for step in range(13, 25)}
    adapters = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("unbroken", "resumed")]
    assert adapters[0] == adapters[1]
    prompt, completion = PAIRS[0]
    arguments = [str(tmp_path / "qwen3_moe"), words(prompt), "--adapter", str(tmp_path / "resumed")]
    printed = main("generate", [*arguments, "--max-new-tokens", "8"])
    assert printed.splitlines()[0] == words([*prompt, *completion])  # and ended by token 1
    with pytest.raises(SystemExit, match=r"checkpoints has a run with seed 0, got 1"):
        main("finetune", tuning_arguments("qwen3_moe", tmp_path, rows, *shared, "--output", "x", "--seed", 1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        (["--batch-size", 2], 2),
        pytest.param(["--no-packing", "--batch-size", 2, "--accumulate", 2], 4, marks=pytest.mark.sweep),
    ],
)
def test_the_first_loss_of_fine_tuning_is_the_model_s_for_completions_alone(options, sequences, main, tmp_path):
    rows = [{"prompt": words(prompt), "completion": " " + words(completion)} for prompt, completion in PAIRS]
    rows.append({"text": words(range(30, 40))})
    options = [*options, "--steps", 1, "--sequence-length", 14, "--output", tmp_path / "adapter"]
    printed = main("finetune", tuning_arguments("qwen3_moe", tmp_path, rows, *options))
    assert f"{sequences} sequences" in printed
    examples = [(prompt, [*prompt, *completion, 1]) for prompt, completion in [*PAIRS, ([], list(range(30, 40)))]]
    padded = np.array([tokens + [0] * (11 - len(tokens)) for _, tokens in examples])
    logits = nnx.jit(lambda model, tokens: model(tokens))(jgg.models.load(tmp_path / "qwen3_moe"), padded[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, padded[:, 1:])
    total, count = 0.0, 0
    for own, (prompt, tokens) in zip(np.asarray(losses), examples, strict=True):
        own = own[max(len(prompt) - 1, 0) : len(tokens) - 1]
        total, count = total + float(np.sum(own)), count + len(own)
    assert float(losses_by_step(printed)[1]) == pytest.approx(total / count, abs=5e-3)  # in bfloat16


@pytest.mark.sweep
def test_fine_tuning_of_some_matrices_beside_experts_in_fp8(main, tmp_path):
    messages = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t6 t7"}]
    options = "--experts", "fp8", "--targets", "w_q", "w_down", "--steps", 8, "--learning-rate", 2e-2
    options += "--sequence-length", 16, "--batch-size", 1, "--output", tmp_path / "adapter"
    arguments = tuning_arguments("qwen3_moe", tmp_path, [{"messages": messages}], *options)
    template = (
        "{{ bos_token }}{% for message in messages %} {{ 't2' if message.role == 'user' else 't3' }} "
        "{{ message.content }} t1{% endfor %}{% if add_generation_prompt %} t3 {% endif %}"
    )
    settings = {"chat_template": template, "bos_token": "t4"}
    (tmp_path / "qwen3_moe" / "tokenizer_config.json").write_text(json.dumps(settings))
    losses = list(map(float, losses_by_step(main("finetune", arguments)).values()))
    assert losses[-1] < losses[0] / 2
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {name.rpartition(".")[2] for name in settings["target_modules"]} == {"q_proj"}
    examples = example("finetune").read_examples(
        argparse.Namespace(folder=tmp_path / "qwen3_moe", data=tmp_path / "data.jsonl", sequence_length=16)
    )
    ((tokens, first),) = examples
    assert tokens.tolist() == [4, 2, 5, 1, 3, 6, 7, 1]
    assert first == 5
