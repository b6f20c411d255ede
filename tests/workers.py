"""How tests are divided among workers, and a GPU's memory among those: one of them runs all large tests."""

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path

from xdist.scheduler import LoadGroupScheduling

# GiB of a GPU: what CUDA and the compiled kernels take, the arrays of a worker, and of the one that runs large tests
CONTEXT, ARRAYS, LARGE_ARRAYS = 1.0, 2.0, 56.0
LARGE_GPU = CONTEXT + LARGE_ARRAYS
FIRST = "gw0"  # of the workers
# workers inherit the name from the process that starts them
_GROUPS = Path(os.environ.setdefault("JGG_TEST_GROUPS", f"{tempfile.gettempdir()}/jgg-test-groups-{os.getpid()}.json"))


@functools.cache
def gpu_memory() -> float:
    """GiB of the smallest GPU, asked without starting CUDA; 0 where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return min(map(int, done.stdout.split()), default=0) / 1024


def runs_large_tests() -> bool:
    """Whether the GPU has room for a large test."""
    return gpu_memory() >= LARGE_GPU


def num_workers() -> int:
    """As many as find memory and a CPU each."""
    first = LARGE_ARRAYS - ARRAYS if runs_large_tests() else 0.0
    return int(max(1, min((gpu_memory() - first) / (CONTEXT + ARRAYS), len(os.sched_getaffinity(0)))))


def compile_quickly() -> None:
    """Has XLA compile for a GPU, before JAX starts there, without trying which variant of a product is fastest."""
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"


def limit_memory() -> None:
    """Gives a worker of several, before JAX starts there, its part of the GPU's memory."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) == 1 or not gpu_memory():
        return
    is_first = os.environ["PYTEST_XDIST_WORKER"] == FIRST and runs_large_tests()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(is_first).lower()  # in one piece
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{(LARGE_ARRAYS if is_first else ARRAYS) / gpu_memory():.4f}"


def write_groups(items) -> None:
    """Tells the process that distributes the tests, which collects none, the group of each that is in one.

    pytest-xdist 3.8 writes it into the test's id, which pytest 9.2 does not take.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") == FIRST:
        marks = {item.nodeid: item.get_closest_marker("xdist_group") for item in items}
        _GROUPS.write_text(json.dumps({nodeid: mark.args[0] for nodeid, mark in marks.items() if mark}))


class Scheduler(LoadGroupScheduling):
    """Gives a worker all tests of a group, the first worker those of the group that has most: of large tests."""

    def schedule(self):
        if self.collection is None:
            self.groups = json.loads(_GROUPS.read_text()) if _GROUPS.exists() else {}
            _GROUPS.unlink(missing_ok=True)
            first_comes_first = sorted(self.assigned_work.items(), key=lambda item: item[0].gateway.id != FIRST)
            self.assigned_work = dict(first_comes_first)
        super().schedule()

    def _split_scope(self, nodeid):
        return self.groups.get(nodeid, nodeid)
