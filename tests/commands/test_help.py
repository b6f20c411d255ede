"""Help, versions and mistakes: shown before JAX is imported, of options that offer what jgg has."""

import argparse
import importlib
import inspect
import subprocess
import sys

import jax.numpy as jnp
import pytest

import jgg
from _jgg_command import parser
from jgg import tuning
from jgg.backends import choice
from jgg.cli import bench, demo, options, scale
from jgg.measuring import cost_model, peers, workloads
from jgg.problem import DTYPES, W_LAYOUTS
from jgg.quantized import E4M3
from tests.support.processes import ROOT

# runs the command as installed, and says in the end whether it imported JAX
PROGRAM = """
import sys
import _jgg_command
try:
    _jgg_command.main()
finally:
    print("imported:", *sorted({"jax", "jgg", "numpy"} & set(sys.modules)))
"""


def run(*arguments):
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def subparsers():
    (commands,) = (
        action for action in parser.make_parser("")._actions if isinstance(action, argparse._SubParsersAction)
    )
    return commands.choices


def option(command, name):
    return subparsers()[command]._option_string_actions[name]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], *([name, "--help"] for name in parser.COMMANDS)], ids=" ".join
)
def test_help_needs_no_jax(arguments):
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    description = parser.COMMANDS[arguments[0]].description if len(arguments) > 1 else "Show versions, devices"
    *text, last = done.stdout.splitlines()
    assert description in " ".join(" ".join(text).split())
    assert last == "imported:"
    assert not done.stderr


def test_the_version_needs_no_jax():
    done = run("--version")
    assert done.stdout.splitlines() == [f"jgg {jgg.__version__}", "imported:"]


@pytest.mark.parametrize("arguments", [[], ["bench", "--groups", "odd"]])
def test_mistakes_are_told_without_jax(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == "imported:\n"
    assert done.stderr.startswith(" ".join(["usage: jgg", *arguments[:1]])) and "Traceback" not in done.stderr


def test_each_command_has_a_module():
    for name in parser.COMMANDS:
        assert inspect.isfunction(importlib.import_module(f"jgg.cli.{name}").run)


def test_options_offer_what_jgg_has():
    dtypes = tuple(jnp.dtype(dtype).name for dtype in DTYPES)
    gemm_in_fp8 = workloads.gemm(num_rows=1, in_features=1, out_features=1, num_experts=1, dtype=E4M3)
    assert option("tune", "--dtype").choices == option("bench", "--dtype").choices == (*dtypes, options.FP8)
    assert option("scale", "--dtype").choices == tuple(scale.MAX_ERROR)
    assert option("bench", "--w-layout").choices == W_LAYOUTS
    assert option("bench", "--implementation").choices == choice.NAMES
    assert option("bench", "--groups").choices == workloads.GROUPS
    assert option("bench", "--op").default == ",".join(bench.OPS)
    assert f"({','.join(workloads.OPS)}; in fp8 {','.join(tuning.ops_of(gemm_in_fp8))} " in option("tune", "--op").help
    assert tuple(peers.PEERS) == parser.PEERS
    assert cost_model.FAMILIES == parser.FAMILIES
    assert f"a multiple of {demo.HEAD_DIM} " in option("demo", "--hidden").help


def test_plan_is_for_the_cost_model_s_cluster():
    cluster = cost_model.Cluster(1)
    args = parser.make_parser("").parse_args(["plan"])
    assert args.node_size == cluster.node_size
    assert (args.link_gbps, args.network_gbps, args.memory_gb) == (
        cluster.link / 1e9, cluster.network / 1e9, cluster.memory / 1e9,
    )  # fmt: skip
    assert args.tflops == cluster.flops / 1e12
