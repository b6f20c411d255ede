"""The small examples run, and do what they print."""

import importlib.util
import json
import re
import shutil

import jax
import pytest

import jgg.models
from tests.support.models import DATA
from tests.support.processes import ROOT, run

LOSSES = r"step \d+: loss ([\d.]+)"


@pytest.fixture(autouse=True)
def promotion():
    """Users have not forbidden it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def main(capsys):
    """Runs an example's main in this process; what it printed."""

    def run_main(name, *arguments):
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main(*arguments)
        return capsys.readouterr().out

    return run_main


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ratio"), [("jit_model", 0.6), ("flax_nnx", 0.01), ("flax_linen", 0.01)])
def test_training(name, ratio, main):
    losses = [float(loss) for loss in re.findall(LOSSES, main(name))]
    assert len(losses) >= 5
    assert losses[-1] < ratio * losses[0]


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("interpret", marks=[pytest.mark.interpret, pytest.mark.thorough])]
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


@pytest.mark.thorough
def test_expert_parallelism():
    printed = run(ROOT / "examples" / "expert_parallelism.py", JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
    rows = re.findall(r"(\w+), (.*): (\d+) of 1024 rows dropped, gradients differ by (\S+)", printed)
    assert "8 devices, experts over 4" in printed
    assert [(exchange, "all" in room) for exchange, room, *_ in rows] == [
        ("all_gather", True), ("ragged_all_to_all", True), ("ragged_all_to_all", False),
    ]  # fmt: skip
    for _, room, dropped, difference in rows:
        assert (int(dropped) == 0) == (float(difference) < 1e-5) == ("all" in room)


@pytest.mark.thorough
@pytest.mark.parametrize("adapter", [[], [str(ROOT / "tests/data/model_adapters/glm4_moe")]], ids=["base", "adapter"])
def test_generate(adapter, main, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the example needs tokenizers")
    folder = shutil.copytree(DATA / "glm4_moe", tmp_path / "model")
    words = tokenizers.models.WordLevel({f"t{token}": token for token in range(64)}, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    model = jgg.models.load(folder, **({"lora_rank": 2, "lora_alpha": 3.0} if adapter else {}))
    if adapter:
        jgg.models.load_adapter(model, adapter[0])
    new = jgg.models.generate(model, [[5, 6, 7]], 5)[0].tolist()
    stop = new[3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    printed = main("generate", [str(folder), *adapter, "--prompt", "t5 t6 t7", "--max-new-tokens", "5"])
    wanted = " ".join(f"t{token}" for token in new[: new.index(stop)])
    assert printed.splitlines()[0] == "t5 t6 t7" + wanted
    assert "prefill: " in printed
