"""The examples run as the documentation says."""

import os
import re

import pytest

from tests.support.processes import ROOT, run


def losses(printed):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}


def train(folder, *options, **environment):
    arguments = "--text", ROOT / "README.md", "--preset", "tiny", "--checkpoints", folder, *options
    return losses(run(ROOT / "examples/train_moe.py", *arguments, JAX_PLATFORMS="cpu", **environment))


@pytest.mark.sweep
def test_training_begins(tmp_path):
    first = train(tmp_path, "--steps", 2, "--batch", 2)
    assert list(first) == [1, 2]
    assert first[1] > 5.5  # about log(256), which knowing nothing costs


@pytest.mark.sweep
def test_training_goes_on_from_a_checkpoint_on_other_devices(tmp_path):
    first = train(tmp_path, "--steps", 30)
    assert list(first) == [1, 10, 20, 30]
    assert first[30] < 4.5
    four_devices = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"}
    sizes = "--batch", 2, "--expert-parallel", 2, "--remat", "names", "--fp8"
    then = train(tmp_path, "--steps", 32, *sizes, **four_devices)
    assert list(then) == [31, 32]
    assert max(then.values()) < 4.5
