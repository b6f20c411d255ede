"""Runs tests with the oldest, a middle and the newest versions of Python, JAX, Triton and Flax; prints a table.

    python tools/versions.py --folder environments    # all combinations
    python tools/versions.py --only oldest --quick    # a few

pip installs this checkout together with the versions of each combination, so it fails if pyproject.toml excludes one.
Then tests run in that environment, and the kernels of all default configurations are compiled for compute capabilities
8.0 and 9.0: they must fit into shared memory and spill no registers. Environments already in the folder are reused.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
# the minor version of Python, or "" for any, and the requirements for pip
COMBINATIONS = {
    "oldest": ("12", "jax==0.11.1", "jax-cuda12-plugin==0.11.1", "triton==3.7.1", "flax==0.12.9"),
    "middle": ("13", "jax==0.11.2", "jax-cuda12-plugin==0.11.2", "triton==3.8.0"),
    "newest": ("", "jax", "jax-cuda12-plugin", "triton", "flax"),
}
REQUIRED = ("flatbuffers", "hypothesis", "pytest", "pytest-xdist")  # by the tests below
SHOWN = ("jax", "triton", "jax-triton", "flax")
QUICK = ["versions", "barrier", "compiling", "activation_kernels"]
CORE = [*QUICK, "routing_kernels", "contract", "vmap", "moe", "flax", "export", "profiling", "many_calls"]
CORE += ["warp_specialization"]
LOWERING = "tests/compiling/test_lowering.py::test_kernels_compile_and_fit"
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
)


def make_environment(name: str, folder: Path) -> Path:
    """Returns the Python of the environment for a combination, which it makes if needed."""
    minor, *pinned = COMBINATIONS[name]
    python = folder / name / "bin" / "python"
    requirements = [*pinned, *REQUIRED]
    stamp = folder / name / "requirements"
    if not stamp.is_file() or stamp.read_text() != str(requirements):
        find = ["sh", str(ROOT / "tools/find_python.sh"), *([minor] if minor else [])]
        found = subprocess.run(find, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()
        print(f"Installing {name}: {' '.join(pinned)}", flush=True)
        subprocess.run([found, "-m", "venv", "--clear", folder / name], check=True)
        install = [python, "-m", "pip", "install", "-q", "--no-compile", "-e", f"{ROOT}[flax,hf,triton]"]
        subprocess.run([*install, *requirements], check=True)
        stamp.write_text(str(requirements))
    return python


def versions(python: Path) -> str:
    """The versions in an environment, in words."""
    program = f"import importlib.metadata as m, platform as p; print(p.python_version(), *map(m.version, {SHOWN}))"
    numbers = subprocess.run([python, "-c", program], check=True, text=True, stdout=subprocess.PIPE).stdout.split()
    return ", ".join(map(" ".join, zip(("Python", *SHOWN), numbers, strict=True)))


def run_tests(python: Path, *arguments: str) -> str:
    """Runs tests; returns how many passed and failed, and prints the output of pytest if one failed."""
    with tempfile.TemporaryDirectory() as caches:
        done = subprocess.run(
            [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(min(os.cpu_count(), 8)), *arguments],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS, "XDG_CACHE_HOME": caches},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        print(done.stdout, flush=True)
    counts = re.findall(r"\b\d+ (?:passed|failed|skipped|errors?)\b", done.stdout)
    return ", ".join(counts) if counts else f"exit code {done.returncode}"


def results(python: Path, quick: bool) -> dict[str, str]:
    """Runs each kind of test and returns the outcomes, by column of the table."""
    files = [str(path) for name in (QUICK if quick else CORE) for path in ROOT.glob(f"tests/*/test_{name}.py")]
    found = {"tests": run_tests(python, *files)}
    if not quick:
        for capability in ("80", "90"):
            found[f"sm_{capability}"] = run_tests(python, "-m", "thorough", f"{LOWERING}[{capability}]")
    program = "from jgg.core.versions import *; print(unlike(WARP_SPECIALIZED) or 'yes')"
    found["warp-specialized"] = subprocess.run(
        [python, "-c", program], check=True, text=True, stdout=subprocess.PIPE
    ).stdout.strip()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the environments, of 3 GB each (default: a temporary one)")
    parser.add_argument("--only", choices=COMBINATIONS, nargs="+", default=list(COMBINATIONS), help="(default: all)")
    parser.add_argument("--quick", action="store_true", help="few tests, and nothing but what they compile")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        for name in args.only:
            python = make_environment(name, folder)
            rows.append({"combination": f"{name}: {versions(python)}", **results(python, args.quick)})
    print("| " + " | ".join(rows[0]) + " |")
    print("| " + " | ".join("---" for _ in rows[0]) + " |")
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    sys.exit(any(re.search("failed|error|exit", result) for row in rows for result in row.values()))


if __name__ == "__main__":
    main()
