"""What goes wrong around jgg: files, folders, users without a home, GPUs. The next way serves, or an error helps.

`test_tuned_files` has what a file of tuned configurations may not hold, `test_compiling` kept kernels that are damaged
and folders in which none can be kept.
"""

import errno
import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.cli import info, main
from jgg.core import files
from jgg.core.gpu_target import Target
from jgg.launching import choice, tuned_files
from jgg.launching.heuristic import heuristic_config
from jgg.tuning import search as tuning
from jgg.tuning.workloads import gemm
from tests.support.tuned_entries import HOPPER, PROBLEM, SIZES, UNUSUAL, chosen, entry


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    path = tmp_path / "tuned.json"
    monkeypatch.setenv("JGG_TUNED", str(path))
    monkeypatch.setattr(tuned_files, "shipped_files", lambda: [])
    return path


@pytest.fixture
def no_home(monkeypatch):
    """There is no home folder, as in a container whose user has no entry in its list of users."""

    def getpwuid(uid):
        raise KeyError(f"uid not found: {uid}")

    for name in ("HOME", "XDG_CACHE_HOME", "JGG_TUNED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", getpwuid)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`jgg tune` takes a GPU for granted, and no search begins."""

    def run_all(*arguments):
        raise AssertionError("it begins to tune")

    monkeypatch.setattr("jgg.cli.tune.device_target", lambda: HOPPER)
    monkeypatch.setattr("jgg.cli.tune.run_all", run_all)


@pytest.mark.usefixtures("no_home", "on_a_gpu")
def test_without_a_home_nothing_is_looked_up_or_written(tmp_path, capsys):
    assert tuned_files.user_file() is None
    assert chosen().block_m  # from a file that comes with jgg, or by the heuristic
    assert all(file.path for file in info.gather().tuned_files)
    with pytest.raises(SystemExit, match="2"):
        main(["tune"])
    assert "--out must be a file where there is no folder for caches: set it, $JGG_TUNED" in capsys.readouterr().err
    assert tuning.output_file(tmp_path / "own.json") == tmp_path / "own.json"


def test_what_is_tuned_at_once_is_all_kept(own_file):
    """Threads are as two containers' processes of one process id, and a lock of one keeps the other out as well."""
    problems = [gemm(**SIZES | {"in_features": 16 * n}) for n in range(1, 33)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda problem: tuned_files.merge(own_file, entry(problem)), problems))
    assert {each.problem for each in tuned_files.parse(own_file)} == set(problems)


def test_what_is_written_at_once_is_whole_at_any_time(tmp_path):
    """Several writers replace one file, like processes that compile the same kernel; a reader never sees a mixture."""
    path = files.replace_text(tmp_path / "kernel", "0" * 100_000)

    def write_and_read(writer):
        files.replace_text(path, str(writer) * 100_000)
        return path.read_text()

    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(write_and_read, [1, 2, 3, 4] * 10))
    assert {(len(text), len(set(text))) for text in texts} == {(100_000, 1)}
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_utf_8_in_any_locale(tmp_path):
    program = f"from jgg.core import files; files.replace_text(files.Path({str(tmp_path)!a}) / 'a', '\\u00fc')"
    environment = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)
    assert (tmp_path / "a").read_bytes() == b"\xc3\xbc"


def test_without_locks_a_file_is_written_all_the_same(own_file, monkeypatch, caplog):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    for milliseconds in (2.0, 1.0):
        tuned_files.merge(own_file, entry(milliseconds=milliseconds))
    assert chosen() == UNUSUAL
    (record,) = caplog.records
    assert f"{own_file} is written without a lock" in record.message


def test_an_unreadable_file_is_named_and_ignored(own_file):
    own_file.mkdir()  # which no one, root neither, reads as a file
    with pytest.warns(UserWarning, match=r"tuned\.json is no file of tuned configurations: .*got a folder"):
        assert chosen() == heuristic_config(jgg.KernelConfigForward, PROBLEM, HOPPER)
    with pytest.raises(ValueError, match=r"tuned\.json is no file"):
        tuning.output_file(None)


@pytest.mark.parametrize("where", ["/proc/tuned.json", "/dev/null/tuned.json", "{folder}/damaged.json"])
@pytest.mark.usefixtures("on_a_gpu")
def test_where_nothing_can_be_written_tuning_does_not_begin(where, tmp_path, capsys):
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--out", where.format(folder=tmp_path)])
    error = capsys.readouterr().err
    assert "--out must be in a folder that can be written to" in error or "damaged.json is no file" in error


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = files.replace_text(tmp_path / "text", "old")
    monkeypatch.setattr("jgg.core.files.open", OpenOnFullDisk, raising=False)
    with pytest.raises(OSError, match="No space left"):
        files.replace_text(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("text", "old")]


class OpenOnFullDisk:
    """A file that is made but takes no text."""

    def __init__(self, path, mode, **_):
        path.touch()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def of_another_user(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


def a_link(path, monkeypatch):
    path.symlink_to(path.rename(path.with_name("elsewhere")))


# what a file has become: part of the error
NOT_OWN = {
    "another user's": (of_another_user, "belongs to another user"),
    "group's": (lambda path, _: path.chmod(0o664), "may be written by other users"),
    "everyone's": (lambda path, _: path.chmod(0o646), "may be written by other users"),
    "a link": (a_link, "symbolic links"),
}


@pytest.mark.parametrize(("change", "message"), NOT_OWN.values(), ids=NOT_OWN)
def test_what_others_can_have_written_is_not_read(change, message, tmp_path, monkeypatch):
    path = files.replace_text(tmp_path / "kernel", "machine code", mode=0o644)
    assert files.read_own_text(path) == "machine code"
    change(path, monkeypatch)
    with pytest.raises(OSError, match=message):
        files.read_own_text(path)


def test_on_a_gpu_too_old_xla_computes(monkeypatch):
    old = Target(70, 80, "Tesla V100")
    monkeypatch.setattr(choice, "device_target", lambda: old)
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((2, 3, 4)), jnp.array([3, 5], jnp.int32)
    np.testing.assert_array_equal(jgg.grouped_gemm(x, w, sizes), np.full((8, 3), 4))
    assert " forward[" not in str(jax.make_jaxpr(jgg.grouped_gemm)(x, w, sizes))  # but plain JAX
    with pytest.raises(ValueError, match=r"must be 'xla' on Tesla V100, whose compute capability is below 8\.0"):
        jgg.grouped_gemm(x, w, sizes, implementation="triton")


@pytest.mark.gpu
def test_out_of_memory_is_said_by_xla_and_leaves_the_process_able():
    x, w, sizes = jnp.ones((2**20, 16), "bfloat16"), jnp.ones((1, 2**20, 16), "bfloat16"), jnp.array([2**20])
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):  # y has 2 TB
        jax.block_until_ready(jgg.grouped_gemm(x, w, sizes))
    y = jgg.grouped_gemm(x[:64], w[:, :32], jnp.array([64]))
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((64, 32), 16))
