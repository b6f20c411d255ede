"""How tests are divided among workers, and a GPU's memory among those: the first ones run all large tests."""

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib
from xdist.scheduler import LoadGroupScheduling

from jgg.core.files import cache_folder

# GiB of a GPU: what CUDA and the compiled kernels take, and the arrays of a worker that runs no large tests
CONTEXT, ARRAYS = 1.0, 2.0
# GiB of arrays of the workers that do, gw0 and gw1: what fits of these
LARGE_ARRAYS = ((56.0, 24.0), (56.0,), (24.0,), ())
# bytes of compiled programs that are kept; one run of all tests makes about 80 MB of them
MOST_PROGRAMS = 500 * 2**20
# workers inherit the name from the process that starts them
_GROUPS = Path(os.environ.setdefault("JGG_TEST_GROUPS", f"{tempfile.gettempdir()}/jgg-test-groups-{os.getpid()}.json"))


@functools.cache
def gpu_memories() -> tuple[float, ...]:
    """GiB of each GPU, asked without starting CUDA."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(int(mebibytes) / 1024 for mebibytes in done.stdout.split())


def gpu_memory() -> float:
    """GiB of the smallest GPU; 0 where there is none."""
    return min(gpu_memories(), default=0.0)


def visible_gpus() -> list[str]:
    """What CUDA calls the GPUs that it may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpu_memories()))))).split(",")


def large_arrays() -> tuple[float, ...]:
    """GiB of arrays of each worker that runs large tests; there is room for another worker."""
    return next(sizes for sizes in LARGE_ARRAYS if not sizes or _taken(sizes) + CONTEXT + ARRAYS <= gpu_memory())


def _taken(sizes):
    return sum(CONTEXT + size for size in sizes)


def worker_of_large_test(needed: float = LARGE_ARRAYS[0][0]) -> str | None:
    """The worker with the least memory that has as many GiB for arrays, or None."""
    enough = [(size, f"gw{number}") for number, size in enumerate(large_arrays()) if size >= needed]
    return min(enough, default=(0.0, None))[1]


def num_workers() -> int:
    """The number of workers with memory and a CPU each; each uses every GPU and keeps its arrays on one of them."""
    large = large_arrays()
    others = (gpu_memory() - _taken(large)) / (CONTEXT + ARRAYS / len(visible_gpus()))
    return int(max(1, min(len(large) + others, len(os.sched_getaffinity(0)))))


def one_thread_of_blas() -> None:
    """Has NumPy multiply in one thread in each worker, which inherits this: not in as many as there are CPUs."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def compile_quickly() -> None:
    """Has XLA compile for a GPU, before JAX starts there, without trying which variant of a product is fastest."""
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"


def share_programs() -> None:
    """Has the processes of runs on a CPU compile briefly and keep what they compiled, in the user's cache folder.

    JGG_TEST_PROGRAMS names another folder.
    """
    if jax.config.jax_platforms != "cpu":
        return
    if "JGG_TEST_PROGRAMS" not in os.environ:
        os.environ["JGG_TEST_PROGRAMS"] = str(kept_programs())
    options = {
        "jax_compilation_cache_dir": os.path.abspath(os.environ["JGG_TEST_PROGRAMS"]),
        "jax_persistent_cache_min_compile_time_secs": 0,
        # no source line for each operation, which takes a tenth of the time of compiling
        "jax_traceback_in_locations_limit": 0,
    }
    for name, value in options.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # for the programs that tests run


def kept_programs() -> Path:
    """The folder of the programs of this jaxlib, processor and XLA_FLAGS, once old programs of all have been removed.

    Runs may share it: JAX compiles again what it cannot read.
    """
    folder = (cache_folder() or Path(tempfile.gettempdir(), "jgg")) / "test-programs"
    processor = _instructions() or f"{platform.machine()} {platform.processor()}"
    key = repr((jaxlib.__version__, processor, os.environ.get("XLA_FLAGS", "")))
    programs = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    programs.mkdir(parents=True, exist_ok=True)
    remove_oldest(folder)
    return programs


def _instructions():
    """What Linux says that the processor can do."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    return None


def remove_oldest(folder: Path, most: int = MOST_PROGRAMS) -> None:
    """Keeps the most recently read files below the folder, up to `most` bytes, and removes the rest.

    On a file system that does not record when files are read, the most recently written files stay.
    """
    files = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append((max(status.st_atime, status.st_mtime), status.st_blocks * 512, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > most:
            path.unlink(missing_ok=True)


def drop_programs() -> None:
    """Frees the programs that JAX keeps once the process has mapped half as many pieces of memory as Linux lets it.

    Each program on a CPU takes about six. XLA does not say that there are no more: it crashes or waits for ever.
    """
    most = Path("/proc/sys/vm/max_map_count")
    if most.exists() and Path("/proc/self/maps").read_bytes().count(b"\n") > int(most.read_text()) // 2:
        jax.clear_caches()


def share_gpus() -> None:
    """Gives a worker of several, before JAX starts there, a GPU to begin with and its part of each one's memory."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) == 1 or not gpu_memory():
        return
    worker, gpus = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), visible_gpus()
    first = worker % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])
    large = dict(enumerate(large_arrays())).get(worker)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = str(large is not None).lower()  # in one piece
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{(large or ARRAYS) / gpu_memory():.4f}"


def write_groups(items) -> None:
    """Tells the process that distributes the tests, which collects none, the group of each that is in one.

    pytest-xdist 3.8 writes it into the test's id, which pytest 9.2 does not take.
    """
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        groups = {item.nodeid: _group_of(item) for item in items}
        _GROUPS.write_text(json.dumps({nodeid: group for nodeid, group in groups.items() if group}))


def _group_of(item):
    """That of its mark, or its file, whose tests share what they compile; None for one that takes long or a GPU."""
    if mark := item.get_closest_marker("xdist_group"):
        return mark.args[0]
    is_alone = any(map(item.get_closest_marker, ("thorough", "gpu")))
    return None if is_alone else item.nodeid.partition("::")[0]


class Scheduler(LoadGroupScheduling):
    """Gives a worker all tests of a group, and the worker that a group is named after begins with it."""

    def schedule(self):
        if self.collection is None:
            self.groups = json.loads(_GROUPS.read_text()) if _GROUPS.exists() else {}
            _GROUPS.unlink(missing_ok=True)
            named_come_first = sorted(self.assigned_work.items(), key=lambda i: i[0].gateway.id not in self._names())
            self.assigned_work = dict(named_come_first)
        super().schedule()

    def _names(self):
        return set(self.groups.values())

    def _assign_work_unit(self, node):
        if node.gateway.id in self.workqueue:
            self.workqueue.move_to_end(node.gateway.id, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid):
        return self.groups.get(nodeid, nodeid)
