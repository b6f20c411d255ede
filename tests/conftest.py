"""Makes implicit promotion of dtypes and ranks an error, names hypothesis's profiles, divides tests among workers."""

import gc
import itertools

import jax
import jax.numpy as jnp
import pytest

from jgg.launching import triton
from jgg.primitives.operation import Operation
from tests.support import generated, interpreting, workers

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
generated.register_profiles()
workers.one_thread_of_blas()
workers.compile_quickly()
workers.share_programs()
workers.share_gpus()
_torn_down = itertools.count(1)


def pytest_xdist_auto_num_workers(config):
    """Decides what -n auto, the default, means: one process; for GPU tests, as many workers as the GPU has room for."""
    if config.option.numprocesses != "auto":
        return None
    expression = config.option.markexpr
    return workers.num_workers() if "gpu" in expression and "not gpu" not in expression else 0


def pytest_xdist_make_scheduler(config, log):
    return workers.Scheduler(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What takes longest comes first: thorough tests, and groups; a large one goes to a worker that has the memory."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("thorough", "xdist_group"))))
    for item in items:
        if large := item.get_closest_marker("large"):
            worker = workers.worker_of_large_test(*large.args)
            item.add_marker(pytest.mark.xdist_group(worker) if worker else pytest.mark.skip("needs a larger GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session):
    """Writes the groups; and Python looks for garbage less often, and not among what was imported."""
    workers.write_groups(session.items)
    gc.freeze()
    gc.set_threshold(20_000)  # tracing makes many objects; the default takes a twelfth of the time


def pytest_runtest_setup(item):
    if item.get_closest_marker("interpret"):
        interpreting.quickly()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """After each fiftieth test, since to look takes milliseconds."""
    if next(_torn_down) % 50 == 0:
        workers.drop_programs()


@pytest.fixture(autouse=True)
def alone(request, monkeypatch):
    """No thread compiles what a test has traced: it would launch kernels that the test would count.

    Large tests count none, and their kernels take longest to compile.
    """
    if not request.node.get_closest_marker("large"):
        monkeypatch.setattr(Operation.ahead, "num_threads", 0)


@pytest.fixture
def launched(monkeypatch):
    """(name, Launch) of each kernel that would be launched; none is compiled."""
    launches = []

    def call(compute_capability, kernel, launch):
        launches.append((kernel.__name__, launch))
        return {key: jnp.zeros(result.shape, result.dtype) for key, result in launch.result_types.items()}

    monkeypatch.setattr(triton, "call", call)
    return launches


@pytest.fixture
def keyed_by_names():
    """A program is not taken for one that was kept and differs in the names of its operations alone."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture
def optax_promotion():
    """Optax mixes dtypes in its own arithmetic."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def as_a_reader_runs_it(tmp_path, monkeypatch):
    """The code of a page runs in a folder of its own, and may promote dtypes and ranks."""
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """lm-eval and datasets without a network, with their caches in the test's own folder."""
    for name in ("HF_HOME", "HF_DATASETS_CACHE", "LM_HARNESS_CACHE_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "caches"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
