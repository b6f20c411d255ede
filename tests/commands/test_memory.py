"""How much of a GPU's memory commands take, and how they tell that it was too little."""

import argparse
import ast
import os
import re
import subprocess
import sys

import jax
import pytest

from jgg.cli.errors import enough_memory
from jgg.cli.memory import take_most


@pytest.mark.parametrize("kind", [MemoryError("32 GiB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 32\nGiB")])
def test_too_little_memory_is_one_line(kind):
    with pytest.raises(SystemExit, match=r"^jgg: memory runs out: take less of --x .*32 GiB\)$"), enough_memory("--x"):
        raise kind
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), enough_memory("--x"):
        raise jax.errors.JaxRuntimeError("INTERNAL: other")


@pytest.mark.parametrize(
    ("name", "value", "share"),
    [
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".92", "92% of the GPU's memory, 72.0 GiB, and more with {} above 0.92"),
        ("XLA_CLIENT_MEM_FRACTION", ".5", "50% of the GPU's memory, 72.0 GiB, and more with {} above 0.5"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "", "75% of the GPU's memory, 72.0 GiB, and more with {} above 0.75"),
    ],
)
def test_too_little_memory_names_the_share_of_the_gpu(name, value, share, monkeypatch):
    for other in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    device = argparse.Namespace(memory_stats=lambda: {"bytes_limit": 72 * 2**30})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    message = re.escape(f"take less of --x; JAX may use {share.format(name)} (RESOURCE_EXHAUSTED: 32 GiB)")
    with pytest.raises(SystemExit, match=message), enough_memory("--x"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 32\nGiB")


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_a_share_of_the_user_s_stays(name, monkeypatch):
    """JAX refuses both names."""
    for other in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, ".5")
    take_most()
    assert {key: value for key, value in os.environ.items() if "MEM_FRACTION" in key} == {name: ".5"}
    monkeypatch.setenv(name, "")  # which JAX takes for none
    take_most()
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".92"


def test_a_command_takes_most_of_a_gpu_before_jax_asks_and_an_import_nothing():
    """JAX reads the share when it loads its plugin."""
    program = (
        "import os, jax, jgg.cli, jgg.models\n"
        "from jax._src import xla_bridge\n"
        "def shares(): return {name: os.environ[name] for name in os.environ if 'MEM_FRACTION' in name}\n"
        "before, found = shares(), []\n"
        "xla_bridge.discover_pjrt_plugins = lambda: found.append(shares())\n"
        "jgg.cli.main(['info', '--json'])\n"
        "print()\nprint([before, *found])"
    )
    env = {name: value for name, value in os.environ.items() if "MEM_FRACTION" not in name}
    ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    wanted = [{}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".92"}]
    assert ast.literal_eval(ended.stdout.splitlines()[-1]) == wanted
