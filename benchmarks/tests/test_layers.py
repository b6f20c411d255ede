"""Whole layers, LoRA and models: what is measured, how results are judged, what is printed and drawn."""

import dataclasses
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from benchmarks import layer as measuring
from benchmarks import layer_roofline, layers, lora, models, plots
from jgg.cli.console import number
from jgg.tuning import ways
from jgg.tuning.timing import Timing
from jgg.tuning.workloads import Layer

TINY = Layer("tiny", tokens=12, hidden=16, expert_intermediate=8, experts=4, topk=2)
OWN = ["--m=24", "--k=16", "--n=16", "--experts=4", "--topk=2", "--dtype=float32"]  # the same sizes


memories, references = {}, {}  # of the one layer that is measured again and again; slow to compile


def memory_of(problem, arrays):
    if problem not in memories:
        memories[problem] = measuring.measure_memory(problem, arrays)
    return memories[problem]


class CachedReference:
    @staticmethod
    def of(problem, which, arrays, topk_indices):
        key = problem, which, *np.asarray(topk_indices).flat
        if key not in references:
            references[key] = measuring.LayerReference.of(problem, which, arrays, topk_indices)
        return references[key]


@pytest.fixture
def run_layers(tmp_path, no_timing, monkeypatch, capsys):
    """Measures a layer without timing anything; returns the exit code, what it printed and its JSON."""
    dense = SimpleNamespace(measure=lambda: Timing(1e-4, None))
    monkeypatch.setattr(layer_roofline, "dense", lambda *_: dense)
    monkeypatch.setattr(layers, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(layers, "measure_memory", memory_of)
    monkeypatch.setattr(layers, "LayerReference", CachedReference)

    def run():
        out = tmp_path / "result"
        code = layers.main(["--quiet", "--out", str(out), *OWN])
        plots.main([f"{out}.json"])
        assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        return code, capsys.readouterr().out, json.loads(out.with_suffix(".json").read_text())

    return run


def test_a_layer_is_right_and_its_numbers_agree(run_layers):
    code, output, result = run_layers()
    assert code == 0
    (row,) = result["layers"]
    assert row["problem"]["layer"] == dataclasses.asdict(TINY) | {"name": "own"}
    assert row["flops"] == {"forward": 6 * 24 * 16 * 8, "forward + backward": 18 * 24 * 16 * 8}
    for which, measurement in row["passes"].items():
        assert measurement["status"] == "right"
        assert measurement["error"] <= measurement["allowed_error"] < 1e-3
        assert row["tflops"][which] == pytest.approx(row["flops"][which] / 2e-3 / 1e12)
    # up and down forward; and their dX and dW
    assert row["dense_seconds"] == pytest.approx({"forward": 2e-4, "forward + backward": 6e-4})
    assert row["percent_of_dense"] == pytest.approx({"forward": 10, "forward + backward": 30})
    assert row["used_experts"]["passes"] == 4
    least = max(1e-4, 4 * (192 + 1024 + 192) / 1e9) + max(1e-4, 4 * (192 + 512 + 384) / 1e9)  # of up and of down
    least += (4 * (192 + 64) + 8 * 24 + 4 * (384 + 192)) / 1e9  # of the router and the sum by token
    assert row["percent_of_roofline"]["forward"] == pytest.approx(100 * least / 2e-3)
    assert row["percent_of_roofline_in_flax"]["forward"] == pytest.approx(100 * least / 2e-3)
    assert row["route_seconds"] == 2e-3
    assert row["group_sizes"][0] <= row["group_sizes"][1] <= row["group_sizes"][2]
    for text in ("own", "12, 16, 8, 4, 2", "30.0", "routing and sorting 2,000 us", "aimed at"):
        assert text in output


def test_memory_is_the_compilers(run_layers):
    _, output, result = run_layers()
    memory = result["layers"][0]["memory"]
    arguments = 4 * (2 * 12 * 16 + 16 * 4 + 4 * 3 * 8 * 16)  # x, dy, the router, gate, up and down
    assert memory["arguments"] == arguments
    results = 4 * (2 * 12 * 16 + 16 * 4 + 4 * 3 * 8 * 16) + 4 * 24  # y, the gradients, the choices
    assert results <= memory["results"] <= results + 256  # and the pointers of a tuple
    assert memory["temporaries"] > 0
    assert f"temporaries {number(memory['temporaries'] / 1e6)} MB" in output


def test_the_memory_aimed_at():
    x, weights, pre_activation = 4 * 12 * 16, 4 * (16 * 4 + 4 * 3 * 8 * 16), 4 * 24 * 16
    kept = x + pre_activation + 32 * 24 + 12 * 4  # a schedule of at most 4 tiles, of three numbers each
    assert measuring.LayerProblem(TINY, "float32").memory_limit == 2 * (2 * x + weights) + 1.5 * kept


def changed(name, change):
    """`layer_function` with one of its results changed."""
    right = measuring.layer_function

    def layer_function(problem, which):
        def run(arrays):
            results = right(problem, which)(arrays)
            return results | ({name: change(results[name])} if name in results else {})

        return run

    return layer_function


@pytest.mark.parametrize("name", ["d w_router", "y"])
def test_a_wrong_result_is_reported_and_not_timed(name, run_layers, monkeypatch):
    wrong_function = changed(name, lambda array: array.at[1, 1].add(0.5))
    monkeypatch.setattr(layers, "layer_function", wrong_function)
    code, output, result = run_layers()
    assert code == 1
    passes = result["layers"][0]["passes"]
    wrong = passes["forward + backward"]
    assert (wrong["status"], wrong["seconds"], wrong["variant"]) == ("WRONG", None, name)
    assert passes["forward"]["status"] == ("WRONG" if name == "y" else "right")
    assert f"own forward + backward: WRONG: error {wrong['error']:.3g}" in output


def test_a_result_that_turns_wrong_while_it_is_timed_is_caught(run_layers, monkeypatch):
    monkeypatch.setattr(
        ways,
        "measure",
        lambda function, arrays, *_, **__: Timing(
            1e-3, jax.tree.map(lambda a: 2 * a if a.dtype == jnp.float32 else a, jax.jit(function)(arrays))
        ),
    )
    code, _, result = run_layers()
    assert code == 1
    assert {m["status"] for m in result["layers"][0]["passes"].values()} == {"WRONG"}


def test_what_raises_is_a_failure_and_ends_nothing(run_layers, monkeypatch):
    def too_much(*_):
        raise RuntimeError("out of memory\nwith a long trace")

    monkeypatch.setattr(layers, "measure_memory", too_much)
    code, output, result = run_layers()
    assert code == 1
    assert result["layers"][0]["failures"] == {"memory": "RuntimeError: out of memory"}
    assert "own memory: failed: RuntimeError: out of memory" in output
    assert result["layers"][0]["passes"]["forward"]["status"] == "right"


def test_wrong_choices_are_told_from_close_ones():
    logits = jnp.asarray([[0.0, 1.0, 2.0, 4.0], [4.0, 3.0, 3.0, 0.0]])
    judge = lambda *choices: float(measuring._choice_error(logits, jnp.asarray(choices)))  # noqa: E731
    assert judge([3, 2], [0, 1]) == judge([2, 3], [2, 0]) == 0  # of equals either; the other token leaves a margin
    assert judge([3, 1], [0, 1]) == 0.25
    assert judge([3, 3], [0, 1]) == judge([3, 4], [0, 1]) == judge([3, -1], [0, 1]) == np.inf
    assert judge([0, 1, 2, 3], [3, 2, 1, 0]) == -np.inf


def test_a_wrong_choice_is_reported(run_layers, monkeypatch):
    monkeypatch.setattr(layers, "layer_function", changed("topk_indices", lambda chosen: 3 - chosen))
    code, output, _ = run_layers()
    assert code == 1
    assert "WRONG: an expert left out beats one chosen by" in output


def test_bfloat16_stays_within_the_bounds():
    layer = Layer("narrow", tokens=64, hidden=256, expert_intermediate=128, experts=8, topk=4)
    problem = measuring.LayerProblem(layer, "bfloat16", "ekn")
    arrays = problem.operands()
    results = jax.jit(measuring.layer_function(problem, measuring.FORWARD_BACKWARD))(arrays)
    reference = measuring.LayerReference.of(problem, measuring.FORWARD_BACKWARD, arrays, results["topk_indices"])
    assert reference.check(results).status == "right"
    assert max(part.bound for part in reference.parts.values()) < 0.05


def test_odd_features_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with pytest.raises(SystemExit) as exit_info:
        layers.main([*OWN, "--n=7"])
    assert exit_info.value.code == 2
    assert "--n must be even: gate and up, got 7" in capsys.readouterr().err


def test_layers_in_fp8_are_quantized():
    args = layers.make_parser().parse_args(["--dtype=fp8", "--layer=olmoe-1b-7b"])
    (problem,) = layers.problems_of(args)
    assert (problem.dtype, problem.quantization) == ("bfloat16", jgg.Fp8())


def test_layers_are_scaled_down_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    measured = []
    monkeypatch.setattr(layers, "measure_layer", lambda row, *_: measured.append(row.problem.layer))
    monkeypatch.setattr(layers.layers_report, "as_json", lambda *_: "{}")
    monkeypatch.setattr(layers.Output, "write", lambda *_: None)
    assert layers.main(["--quiet"]) == 0
    assert [layer.tokens for layer in measured] == [256, 256]
    assert capsys.readouterr().out.startswith("scaled down: no GPU")


def no_dense_in_fp8(problem, seed, is_in_fp8):
    if is_in_fp8:
        raise RuntimeError("no FP8")
    return dict.fromkeys(("up forward", "down forward", "up dx", "down dx"), 1e-9)


def test_adapters_without_dense_products_have_a_reason(monkeypatch):
    monkeypatch.setattr(lora, "dense_times", no_dense_in_fp8)
    missing = []
    times = lora.dense_times_of([lora.LoraProblem(TINY), lora.LoraProblem(TINY, in_fp8=True)], 0, missing)
    assert (times[False]["up dx"], times[True]) == (1e-9, {})
    assert missing == ["tiny dense in FP8: failed: RuntimeError: no FP8"]


@pytest.mark.usefixtures("no_timing")
def test_lora(monkeypatch, capsys):
    monkeypatch.setattr(lora, "problems_of", lambda _, ranks: [lora.LoraProblem(TINY), lora.LoraProblem(TINY, *ranks)])
    monkeypatch.setattr(lora, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(lora, "dense_times", no_dense_in_fp8)
    assert lora.main(["--quiet", "--rank=2"]) == 0
    printed = capsys.readouterr().out
    least = sum(part.num_bytes for part in lora.LoraProblem(TINY, 2).parts()) / 1e9
    assert re.search(rf"tiny +rank 2 +2.00 +1.000 +{100 * least / 2e-3:.1f} ", printed)
    compute = lora.moe_mlp

    def wrong_in_what_is_measured(*args, **options):
        y = compute(*args, **options)
        return y * 1.5 if options.get("low_rank_down") and options["implementation"] is None else y

    monkeypatch.setattr(lora, "moe_mlp", wrong_in_what_is_measured)
    lora.lora_function.cache_clear()
    assert lora.main(["--quiet", "--rank=2"]) == 1
    lora.lora_function.cache_clear()
    assert "rank 2: WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "experts", "runs"),
    [
        ("qwen3-30b-a3b", "bfloat16", "train"),
        ("qwen3-30b-a3b", "fp8", "lora"),
        ("gpt-oss-20b", "as-stored", "generate"),
    ],
)
def test_models(model, experts, runs, capsys, tmp_path):
    """Small ones train, all of them or adapters, and generate."""
    sizes = ["--batch=2", "--steps=1", "--sequence=16", "--prompt=4", "--new-tokens=2", "--batches=2"]
    file = tmp_path / "models.json"
    with jax.numpy_dtype_promotion("standard"):
        assert models.main([f"--model={model}", f"--experts={experts}", f"--run={runs}", *sizes, f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    expected = ("prefill 2 x 4", "decode 2") if runs == "generate" else (runs,)
    assert all(row in printed for row in expected)
    assert [row["run"] for row in json.loads(file.read_text())["rows"]] == [*expected]
