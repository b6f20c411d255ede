"""What is chosen by default fits every GPU: random problems, compiled on a machine with none.

JGG_FIT_CASES=N compiles N problems in place of 42.
"""

import json
import os
import random

import jax
import jax.numpy as jnp
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching import tuned_configs, tuned_files
from jgg.launching.heuristic import plain_config
from jgg.launching.kernel_configs import CONFIG_TYPES, KERNELS
from jgg.launching.requirements import KERNEL_REQUIREMENTS, can_run
from tests.programs.lower_defaults import random_problem
from tests.support import processes

# that with the least shared memory
AT_EVERY_CHANGE = (89,)
COMPUTE_CAPABILITIES = 80, 89, 90, 100, 103, 120, 121
COUNT = int(os.environ.get("JGG_FIT_CASES", 42))


def lowered(compute_capability):
    """The kernels that lower_defaults.py compiled, in a process of its own since it replaces what launches them."""
    count = COUNT // len(COMPUTE_CAPABILITIES)
    output = processes.run_program(
        "lower_defaults",
        compute_capability,
        count,
        0,
        timeout=max(600, 60 * count),
        JAX_PLATFORMS="cpu",
        JGG_TUNED="nonesuch",
    )
    return [json.loads(line) for line in output.splitlines()]


def table(rows):
    return "".join(f"\n{row}" for row in rows)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "compute_capability",
    [pytest.param(each, marks=[pytest.mark.sweep] * (each not in AT_EVERY_CHANGE)) for each in COMPUTE_CAPABILITIES],
)
def test_kernels_fit(compute_capability):
    kernels = lowered(compute_capability)
    with jgg.target(compute_capability):
        limit = current_target().shared_memory
    too_large = [kernel for kernel in kernels if kernel["shared_memory"] > limit]
    assert not too_large, f"more than {limit} bytes of shared memory: {table(too_large)}"
    surprising = [kernel for kernel in kernels if kernel["most"] and kernel["shared_memory"] > kernel["most"]]
    assert not surprising, f"more than jgg.launching.requirements.shared_memory says: {table(surprising)}"
    assert {"forward_kernel", "dx_kernel", "dw_kernel"} < {kernel["kernel"] for kernel in kernels}


@pytest.mark.parametrize("compute_capability", [80, 86, 89, 90, 100, 103, 110, 120, 121])
def test_every_choice_is_expected_to_fit(compute_capability):
    rng = random.Random(compute_capability)
    with jgg.target(compute_capability):
        target = current_target()
    for _ in range(300):
        problem = random_problem(rng)
        for op in CONFIG_TYPES:
            plain = plain_config(CONFIG_TYPES[op], problem, target)
            for config in (plain, tuned_configs.choose_config(CONFIG_TYPES[op], problem, target)):
                assert can_run(problem, target, config), (op, problem, config)


def test_each_kernel_has_requirements():
    assert tuple(KERNEL_REQUIREMENTS) == KERNELS


def test_tuned_configurations_are_expected_to_fit():
    """Every shipped configuration has been measured on its device, so `can_run` must refuse none of them."""
    for path in tuned_files.shipped_files():
        for entry in tuned_files.parse(path):
            with jgg.target(entry.compute_capability):
                assert can_run(entry.problem, current_target(), entry.config), entry


def test_a_given_configuration_that_does_not_fit_is_refused():
    x, w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((2, 512, 512), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    config = jgg.KernelConfigForward(num_stages=5)

    def forward(x, w, sizes):
        return jgg.grouped_gemm(x, w, sizes, kernel_config_fwd=config, implementation="triton")

    with jgg.target(89), pytest.raises(ValueError, match=r"kernel_config_fwd.* 101376 bytes .*sm_89, got 1\d+ bytes"):
        jax.jit(forward).trace(x, w, sizes).lower(lowering_platforms=("cuda",))
