"""Whole jobs in processes of their own: which GPUs they get, and what becomes of a job that fails."""

import json
import subprocess
import sys

import jax
import pytest

from benchmarks import rows, whole, whole_jobs


def test_jobs_run_on_the_gpus_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert whole.visible_gpus() == ["2", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "")
    assert whole.visible_gpus() == [""]


def in_place_of_a_job(monkeypatch, program):
    """Has `run_job` run a program instead of a job."""
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([sys.executable, "-c", program], **options))


def test_a_job_that_fails_keeps_what_it_measured_and_says_why(monkeypatch):
    line = whole._SEPARATOR + json.dumps(["1 sequences", "2.0", "500", "3.0", "OK"])
    in_place_of_a_job(monkeypatch, f"print({line!r}); raise SystemExit('out of memory')")
    measured, failed = whole.run_job("generate", "0", 60)
    assert measured[:-1] == ["generate", "1 sequences", "2.0", "500", "3.0", "OK"]
    assert failed[:-1] == ["generate", "", "-", "-", "-", "exit code 1: out of memory"]


def test_a_job_that_takes_too_long_is_ended(monkeypatch):
    in_place_of_a_job(monkeypatch, "import time; print('compiling', flush=True); time.sleep(60)")
    ((*_, result, _),) = whole.run_job("generate", "", 5)
    assert result == "took more than 5 s: compiling"


def test_a_failed_job_is_the_exit_code(monkeypatch, capsys, tmp_path):
    found = {name: [[name, "", "1", "1", "-", "OK, difference 0.0", "9"]] for name in whole_jobs.JOBS}
    monkeypatch.setattr(whole, "run_job", lambda name, gpu, limit: found[name])
    assert whole.main(["--json", str(tmp_path / "table.json")]) == 0
    assert len(json.loads((tmp_path / "table.json").read_text())["rows"]) == len(whole_jobs.JOBS)
    name = "train qwen3-30b-a3b 8 layers"
    found[name] = [[name, "", "1", "1", "-", "loss nan", "9"]]
    assert whole.main(["--only", "train"]) == 1
    assert "failed: 1" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["train qwen3-30b-a3b 8 layers", "generate gpt-oss-20b as-stored"])
def test_a_small_job_runs_on_a_cpu(name, monkeypatch):
    monkeypatch.setattr(whole_jobs, "BATCHES", (2,))
    job = whole_jobs.JOBS[name]
    with jax.numpy_dtype_promotion("standard"):  # of optax
        assert {line.result for line in job.run(job)} == {"OK"}


def test_growth_is_of_time_over_tokens():
    assert rows.largest_growth({1: 1.0, 2: 1.5, 4: 6.0}) == (2.0, 2, 4)
