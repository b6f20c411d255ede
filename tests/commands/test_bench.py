"""The command `jgg bench`: what it measures, checks, prints and refuses."""

import dataclasses
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgg.cli import bench, main, options
from jgg.cli.console import number
from jgg.cli.parsing import parse
from jgg.tuning import timing, ways, workloads

pytestmark = pytest.mark.xdist_group("bench")  # one worker compiles what they share
OWN = ["--m=24", "--k=8", "--n=6", "--experts=4", "--topk=2", "--dtype=float32"]


@pytest.fixture
def no_timing(monkeypatch):
    """A call takes 1 ms, whatever it computes, so that only results are measured."""
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(ways, "measure", lambda function, arrays, *_, **__: timing.Timing(1e-3, function(arrays)))


def run_bench(capsys, *arguments):
    """Runs `jgg bench --json`; returns the exit code and what it printed."""
    code = main(["bench", "--quiet", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def arguments_of(*arguments):
    return parse(["bench", "--quiet", *arguments])


def test_every_product_is_right_and_its_numbers_agree(capsys):
    code, result = run_bench(capsys, *OWN, "--op=fwd")
    assert (code, result["interrupted"], result["left_out"]) == (0, False, [])
    assert result["copy_bytes_per_second"] > 0
    assert set(result) >= {"command", "date", "versions", "device", "settings"}
    (row,) = result["rows"]
    assert (row["op"], row["flops"]) == ("forward", 2 * 24 * 8 * 6)
    assert row["bytes"] == 4 * (24 * 8 + 4 * 6 * 8 + 24 * 6)
    assert set(row["measurements"]) == {"jgg", "dense", "ragged_dot"}
    dense = row["measurements"]["dense"]["seconds"]
    for name, measurement in row["measurements"].items():
        seconds = measurement["seconds"]
        num_bytes = 4 * (24 * 8 + 6 * 8 + 24 * 6) if name == "dense" else row["bytes"]
        least = max(dense, num_bytes / result["copy_bytes_per_second"])
        assert measurement["status"] == "right"
        assert measurement["error"] <= measurement["allowed_error"] < 1e-3
        assert measurement["percent_of_roofline"] == pytest.approx(100 * least / seconds)
        assert measurement["tflops"] == pytest.approx(row["flops"] / seconds / 1e12)
        assert measurement["gbytes_per_second"] == pytest.approx(num_bytes / seconds / 1e9)
        assert measurement["percent_of_dense"] == pytest.approx(100 * dense / seconds)


@pytest.mark.usefixtures("no_timing")
def test_the_table_has_a_line_for_each_product(capsys):
    assert main(["bench", "--quiet", *OWN, "--op=forward,gather"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "float32" in lines[0] and "Plain copy: 1.00 GB/s" in lines[1]
    words = [line.split() for line in lines if line.startswith("own gemm")]
    assert [line[6] for line in words] == ["forward", "gather"]
    assert words[0][2:6] == ["24,", "8,", "6,", "4"]
    assert words[0][7:] == ["1.00", "0.00000", "100", "100", "0.00000"]


def expected(op, problem, arrays):
    """The product in float64, by a loop over groups."""
    x, w, dy = (np.asarray(arrays[name], np.float64) for name in ("x", "w", "dy"))
    w = w if problem.w_layout == "enk" else w.swapaxes(1, 2)
    if problem.permute_x:
        x = x[np.asarray(arrays["gather_indices"]) // problem.topk]
    ends = np.cumsum(arrays["group_sizes"])
    y, dx, dw = np.zeros(problem.y_shape), np.zeros_like(x), np.zeros_like(w)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[expert] = x[rows] @ w[expert].T, dy[rows] @ w[expert], dy[rows].T @ x[rows]
    dw = dw if problem.w_layout == "enk" else dw.swapaxes(1, 2)
    return {"forward": y, "dx": dx, "dw": dw}[op]


@pytest.mark.parametrize("op", bench.OPS)
@pytest.mark.parametrize(
    ("prepare", "groups", "w_layout"),
    [(ways.dense, "one", "enk"), (ways.dense, "one", "ekn"), (ways.ragged_dot, "some-empty", "enk")],
    ids=["dense enk", "dense ekn", "ragged_dot"],
)
def test_what_stands_beside_jgg_computes_the_same(prepare, groups, w_layout, op):
    op, permute_x = ("forward", True) if op == "gather" else (op, False)
    sizes = {"num_rows": 24, "in_features": 8, "out_features": 6, "num_experts": 4, "topk": 2}
    problem = workloads.gemm(**sizes, dtype="float32", w_layout=w_layout, permute_x=permute_x)
    arrays = workloads.operands(problem, groups)
    result = prepare(op, problem, arrays).compute()
    np.testing.assert_allclose(result, expected(op, problem, arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
@pytest.mark.usefixtures("no_timing")
def test_fp8_is_beside_bfloat16_and_a_dense_product_in_fp8(capsys):
    sizes = ["--m=24", "--k=16", "--n=8", "--experts=4", "--topk=2"]
    code, result = run_bench(capsys, *sizes, "--dtype=fp8", "--op=dx,dw,gather")
    assert code == 0
    for op, row in zip(("dx", "gather"), result["rows"], strict=True):
        assert (row["op"], row["in_features"], row["dtype"]) == (op, 16, "float8_e4m3fn")
        assert {name: each["status"] for name, each in row["measurements"].items()} == dict.fromkeys(
            ("jgg", "dense", "bfloat16"), "right"
        )
        assert row["measurements"]["bfloat16"]["error"] is not None
        assert row["measurements"]["dense"]["error"] is None


def test_defaults_without_a_gpu_are_one_layer_scaled_down(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    args = arguments_of("--op=forward,gather")
    rows = bench.rows_of(args)
    first = next(iter(workloads.load_layers().values()))
    assert args.dtype == "float32" and bench.is_scaled_down(args)
    assert [str(row) for row in rows] == [f"{first.name} {each}" for each in ("up forward", "up gather")] + [
        f"{first.name} {each}" for each in ("down forward", "down gather")
    ]
    up, gathered, *_ = (row.problem for row in rows)
    assert (up.num_rows, up.in_features, up.num_experts) == (256 * first.topk, first.hidden // 16, 16)
    assert up.out_features == 2 * first.expert_intermediate // 16
    assert (up.permute_x, gathered.permute_x) == (False, True)


def test_defaults_with_a_gpu_are_one_layer_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = arguments_of()
    assert {row.layer for row in bench.rows_of(args)} == {"qwen3-30b-a3b"}
    assert args.dtype == "bfloat16" and bench.is_first_look(args) and not bench.is_scaled_down(args)
    assert bench.TIME_LIMIT < 120
    named = arguments_of("--layer=mixtral-8x7b")
    assert {row.layer for row in bench.rows_of(named)} == {"mixtral-8x7b"} and not bench.is_first_look(named)
    every = {row.layer: None for row in bench.rows_of(arguments_of("--layer=all"))}
    assert list(every) == list(workloads.load_layers())


def test_layers_come_from_a_file(tmp_path):
    layer = {"name": "tiny", "tokens": 6, "hidden": 8, "expert_intermediate": 4, "experts": 3, "topk": 2}
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"layers": [layer]}))
    args = arguments_of(f"--shapes={shapes}", "--op=dw")
    _, down = bench.rows_of(args)
    assert (str(down), down.problem.y_shape) == ("tiny down dw", (12, 8))
    assert not bench.is_scaled_down(args)


@pytest.mark.usefixtures("no_timing")
def test_what_there_is_no_time_for_is_named(monkeypatch, capsys):
    ticks = itertools.count()  # a look at the clock takes a second
    monkeypatch.setattr(bench, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(bench, "TIME_LIMIT", 3)
    monkeypatch.setattr(bench, "is_first_look", lambda args: True)
    args = arguments_of(*OWN, "--op=forward,dx")
    rows = bench.rows_of(args)
    own = bench.in_one_way(ways.own)
    result = bench.measure(rows, bench.plan_of("uneven", own, bench.peers_of(args)), args)
    assert [(row.op, list(row.measurements)) for row in result.measured] == [("forward", ["dense", "jgg"])]
    assert (result.left_out, result.interrupted) == (["own gemm forward", "own gemm dx"], False)
    bench.show(result)
    assert "Not all was measured, for lack of time, of own gemm forward, own gemm dx: name" in capsys.readouterr().out


def test_a_table_of_all_layers_fits_a_terminal(capsys):
    rows = bench.rows_of(arguments_of("--layer=all", "--op=forward,gather", "--dtype=bfloat16"))
    names = ("jgg", "dense", "ragged_dot")
    for row in rows:
        row.measurements = dict.fromkeys(names, timing.Measurement("right", seconds=12.3456e-3))
        row.num_bytes = dict.fromkeys(names, 10**9)
    settings = {"implementation": None, "dtype": "bfloat16", "w_layout": "enk", "groups": "uneven", "scaled_down": True}
    bench.show(bench.Result(settings, rows, 2.5e12, interrupted=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("scaled down: no GPU")
    assert sum("granite-3.1-3b-a800m down" in line for line in lines) == 2
    assert max(len(line) for line in lines) <= 110


@pytest.mark.usefixtures("no_timing")
def test_what_is_wrong_is_reported_and_not_timed(monkeypatch, capsys):
    def wrong(*arguments):
        way = ways.dense(*arguments)
        return dataclasses.replace(way, function=lambda arrays: way.function(arrays) + jnp.ones((), jnp.float32))

    def wrong_product(*arguments):
        return lambda arrays: product(*arguments)(arrays).at[3, 2].set(jnp.nan)

    product = timing.product
    monkeypatch.setattr(bench.ways, "ragged_dot", wrong)
    code, result = run_bench(capsys, *OWN, "--op=forward")
    assert code == 1
    measurements = result["rows"][0]["measurements"]
    assert {name: each["status"] for name, each in measurements.items()} == {
        "jgg": "right",
        "dense": "right",
        "ragged_dot": "WRONG",
    }
    assert measurements["ragged_dot"]["seconds"] is measurements["ragged_dot"]["tflops"] is None
    monkeypatch.setattr(timing, "product", wrong_product)
    assert main(["bench", "--quiet", *OWN, "--op=forward"]) == 1
    assert "jgg, own gemm forward: WRONG: error nan" in capsys.readouterr().out


@pytest.mark.usefixtures("no_timing")
def test_a_result_that_turns_wrong_while_it_is_timed_is_caught(monkeypatch, capsys):
    monkeypatch.setattr(ways, "measure", lambda function, arrays, *_, **__: timing.Timing(1e-3, 2 * function(arrays)))
    code, result = run_bench(capsys, *OWN, "--op=dw")
    assert code == 1
    jgg = result["rows"][0]["measurements"]["jgg"]
    assert (jgg["status"], jgg["seconds"]) == ("WRONG", None)


@pytest.mark.usefixtures("no_timing")
@pytest.mark.parametrize(("name", "code"), [("ragged_dot", 0), ("own", 1)])
def test_what_raises_ends_nothing(name, code, monkeypatch, capsys):
    """It is jgg's failure if jgg raised."""

    def out_of_memory(*_, **__):
        raise RuntimeError("out of memory\nwith a long trace")

    monkeypatch.setattr(bench.ways, name, out_of_memory)
    assert main(["bench", "--quiet", *OWN, "--op=forward,dx"]) == code
    lines = capsys.readouterr().out.splitlines()
    who = {"own": "jgg"}.get(name, name)
    assert f"{who}, own gemm forward; own gemm dx: failed: RuntimeError: out of memory" in lines


@pytest.mark.usefixtures("no_timing")
def test_an_interrupt_keeps_what_was_measured(monkeypatch, capsys):
    calls = []

    def measure(function, arrays, *_, **__):
        calls.append(function)
        if len(calls) == 6:  # the second row's third
            raise KeyboardInterrupt
        return timing.Timing(1e-3, function(arrays))

    monkeypatch.setattr(ways, "measure", measure)
    code, result = run_bench(capsys, *OWN, "--op=forward,dx,dw")
    assert (code, result["interrupted"]) == (130, True)
    measured = {row["op"]: set(row["measurements"]) for row in result["rows"]}
    assert measured == {"forward": {"jgg", "dense", "ragged_dot"}, "dx": {"dense", "jgg"}}
    calls[:] = range(5)
    assert main(["bench", "--quiet", *OWN]) == 130  # before anything was measured
    assert capsys.readouterr().err == "Interrupted.\n"


def test_products_are_not_moved_out_of_the_loop_that_times_them():
    problem = workloads.gemm(num_rows=8, in_features=4, out_features=4, num_experts=2, dtype="float32")
    with jax.default_device(jax.devices("cpu")[0]):
        way = ways.dense("forward", problem, workloads.operands(problem, "one"))
        text = timing._repeated(way.function, 3, False).lower(way.arrays).compile().as_text()
    entry = text[text.index("\nENTRY ") :]
    assert " dot(" in text
    assert "while(" in entry
    assert " dot(" not in entry and "kCustom" not in entry


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer=gpt-9"], "got 'gpt-9'"),
        (["--topk=2"], "got --topk and no --m, --k, --n, --experts"),
        ([*OWN, "--experts=1"], "--topk must be at most --experts 1, got 2"),
        (["--m=0"], "--m: must be 1 or more, got 0"),
        ([*OWN, "--op=forward,backward"], "--op must be of forward, dx, dw, gather; got 'backward'"),
        ([*OWN, "--op=dw", "--dtype=fp8"], "--op must name more than dw with --dtype fp8"),
        ([*OWN, "--groups=odd"], "--groups: invalid choice: 'odd'"),
        ([*OWN, "--implementation=triton"], "--implementation triton needs a GPU that JAX can use"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(options, "device_target", lambda: None)
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_numbers_have_three_digits():
    values = [None, 0, 0.01234, 1.2345, 12.345, 123.45, 12345.6]
    assert list(map(number, values)) == ["-", "0", "0.0123", "1.23", "12.3", "123", "12,346"]
    assert number(np.float64(2)) == "2.00"
