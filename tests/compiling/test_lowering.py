"""The kernels compiled for every kind of GPU, on a machine with none.

A process for each, since jax-triton reads where to dump its kernels when it is imported.
"""

import json

import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.core.versions import WARP_SPECIALIZED, unlike
from jgg.launching import tuned_files
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.launching.tiles import TILES
from tests.programs.lower_kernels import (
    HOPPER_KERNELS,
    KERNELS,
    MODES,
    chosen_configs,
    every_problem,
    problems_to_lower,
)
from tests.support import processes
from tests.support.layer_kernels import DELTA_RULE_KERNELS, FP8_KERNELS, LAYER_KERNELS

# test_defaults_fit.py compiles for these too, and in float32, what the defaults choose for random problems
TARGETS = [pytest.param(each, marks=[pytest.mark.sweep] * (each != 90)) for each in (80, 89, 90, 100)]
WARP_SPECIALIZED_KERNELS = (*HOPPER_KERNELS, "hopper_symmetric_kernel")


def lowered(folder, compute_capability, *options):
    """The kernels that lower_kernels.py compiled."""
    environment = {"JAX_PLATFORMS": "cpu", "JAX_TRITON_DUMP_DIR": str(folder)}
    process = processes.start("-m", "tests.programs.lower_kernels", compute_capability, *options, **environment)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert "nanobind: leaked" not in errors
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("compute_capability", "options"),
    [
        pytest.param(80, [], id="80", marks=pytest.mark.sweep),
        pytest.param(89, ["--few"], id="89"),
        *(pytest.param(swept, ["--all"], id=f"{swept}-all", marks=pytest.mark.sweep) for swept in (89, 90, 100)),
    ],
)
def test_kernels_compile_and_fit(compute_capability, options, tmp_path):
    kernels = lowered(tmp_path, compute_capability, *options)
    check_shared_memory(kernels, compute_capability)
    # four registers of warps that multiply, where gathers share the kernel with hidden features and what is kept
    allowed = {"hopper_fp8_kernel": 64}
    # what lives from before a loop over columns until after it
    allowed |= dict.fromkeys(DELTA_RULE_KERNELS, 4096)
    allowed["attend_latents_kernel"] = 512  # the same, of a loop over keys, in the widest kernels
    # two registers where the kernel gathers and unpacks w: so the assembler has room for four programs
    of_layers = {"packed": {"forward_kernel": 16}}
    # keys and values take registers as they are converted: in prompts, and in the widest heads
    of_layers |= {"attend fp8": {"attend_kernel": 256}, "attend_one fp8": {"attend_one_kernel": 64}}
    spilling = [
        kernel
        for kernel in kernels
        if kernel["spills"] > of_layers.get(kernel["problem"][0], allowed).get(kernel["kernel"], 0)
    ]
    assert not spilling, f"registers spill: {table(spilling)}"
    # else the next loads could overwrite what such a product still reads
    running_on = [kernel for kernel in kernels if kernel["kernel"] == "forward_kernel" and kernel["runs_on"]]
    assert not running_on, f"products run on past their step: {table(running_on)}"
    by_tma = ("hopper_kernel", "hopper_symmetric_kernel")
    storing = [kernel for kernel in kernels if kernel["kernel"] in by_tma and kernel["stores"]]
    assert not storing, f"stores by threads, not TMA: {table(storing)}"
    compiled = {kernel["kernel"] for kernel in kernels}
    assert TILES.keys() - (FP8_KERNELS if compute_capability < 89 else ()) <= compiled, "tiles that are not compiled"
    assert compiled == {
        *KERNELS,
        "combine_kernel",
        "group_sums_kernel",
        *LAYER_KERNELS,
        *(FP8_KERNELS if compute_capability >= 89 else ()),
        *(WARP_SPECIALIZED_KERNELS if compute_capability == 90 and not unlike(WARP_SPECIALIZED) else ()),
    }


@pytest.mark.thorough
@pytest.mark.sweep
@pytest.mark.parametrize("path", tuned_files.shipped_files(), ids=lambda path: path.stem)
def test_tuned_kernels_compile_and_fit(path, tmp_path):
    """Whether or not they spill, as they were measured to be fastest."""
    (compute_capability,) = {entry.compute_capability for entry in tuned_files.parse(path)}
    kernels = lowered(tmp_path, compute_capability, path)
    check_shared_memory(kernels, compute_capability)
    assert set(KERNELS) & {kernel["kernel"] for kernel in kernels}


def check_shared_memory(kernels, compute_capability):
    with jgg.target(compute_capability):
        limit = current_target().shared_memory
    too_large = [kernel for kernel in kernels if kernel["shared_memory"] > limit]
    assert not too_large, f"more than {limit} bytes of shared memory: {table(too_large)}"


def test_a_tuned_file_comes_along():
    (path,) = tuned_files.shipped_files()
    entries = tuned_files.parse(path)
    assert {entry.op for entry in entries} == CONFIG_TYPES.keys()
    assert len({entry.identity for entry in entries}) == len(entries)


def table(kernels):
    return "".join(f"\n{kernel}" for kernel in kernels)


@pytest.mark.thorough
@pytest.mark.parametrize("compute_capability", TARGETS)
@pytest.mark.parametrize(("mode", "same"), MODES.items())
def test_every_choice_of_the_heuristic_is_compiled(mode, same, compute_capability):
    """What test_kernels_compile_and_fit compiles has every configuration that there can be."""
    with jgg.target(compute_capability):
        target = current_target()

    compiled = {
        config
        for lowered_mode in (mode, same or mode)
        for problem, products in problems_to_lower(target, lowered_mode)
        for op, config in chosen_configs(target, problem, *lowered_mode).items()
        if op in products
    }
    chosen = {config for problem in every_problem() for config in chosen_configs(target, problem, *mode).values()}
    assert chosen <= compiled
