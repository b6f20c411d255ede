"""Runs Python in other processes, among it the programs of tests/programs: JAX's devices are fixed when it starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def with_devices(count):
    """The environment of a process with this many CPU devices, which compiles as quickly as this one."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def start(*arguments, cwd=ROOT, **environment):
    """A process of Python with these arguments, given what is to be changed in its environment."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process, timeout=600):
    """What a process that must end well prints."""
    try:
        out, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return out


def run(*arguments, timeout=300, **options):
    """What Python with these arguments prints."""
    return printed(start(*arguments, **options), timeout)


def run_program(name, *arguments, **options):
    """What a program of tests/programs prints."""
    return run("-m", f"tests.programs.{name}", *arguments, **options)
