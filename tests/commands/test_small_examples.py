"""The small examples run, and do what they print."""

import importlib.util
import json
import re

import jax
import pytest

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
@pytest.mark.parametrize(
    ("name", "ratio"),
    [("jit_model", 0.6), *(pytest.param(name, 0.01, marks=pytest.mark.sweep) for name in ("flax_nnx", "flax_linen"))],
)
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


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_fine_tuning_goes_on_from_a_checkpoint(main, tmp_path):
    folder = folder_with_tokenizer("qwen3_moe", tmp_path / "model")
    rows = [{"prompt": words(prompt), "completion": " " + words(completion)} for prompt, completion in PAIRS]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [str(folder), "--data", str(tmp_path / "data.jsonl"), "--checkpoints", str(tmp_path / "run")]
    arguments += "--sequence-length", "16", "--batch-size", "1", "--learning-rate", "1e-2", "--steps"
    first = [main("finetune", [*arguments, str(steps), "--output", str(tmp_path / "adapter")]) for steps in (10, 40)]
    losses = [dict(re.findall(r"step (\d+): loss ([\d.]+)", printed)) for printed in first]
    assert [list(own) for own in losses] == [["1", "10"], ["11", "20", "30", "40"]]
    assert float(losses[1]["40"]) < float(losses[0]["1"]) / 4
    model = jgg.models.load(folder)
    jgg.models.load_adapter(model, tmp_path / "adapter")
    prompt, completion = PAIRS[0]
    assert jgg.models.generate(model, [prompt], len(completion)).tolist() == [completion]
