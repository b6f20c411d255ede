"""Lowers grouped_gemm for a GPU that need not be here; prints what each compiled kernel takes.

Takes the compute capability as its argument and a folder in JAX_TRITON_DUMP_DIR, where jax-triton dumps the kernels.
It lowers what the heuristic chooses and the cases of `layer_kernels`, with --all after it those that differ little from
others too, with --few a part of what the heuristic chooses, or the configurations of the tuned files named after it.
Each line printed is a JSON object: a kernel with the problem that it was compiled for, its bytes of shared memory, the
bytes that it spills to memory and its kinds of stores.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import triton

import jgg
from jgg.core.gpu_target import current_target
from jgg.core.problem_checks import check_problem
from jgg.launching import triton as triton_implementation
from jgg.launching import tuned_files
from jgg.launching.heuristic import heuristic_config
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.tuning.timing import product
from jgg.tuning.workloads import operands
from tests.support.layer_kernels import layer_kernels
from tests.support.lowering import EXPERTS, OPTIONS, arguments, lower

KERNELS = ("forward_kernel", "dx_kernel", "dw_kernel")
HOPPER_KERNELS = ("hopper_kernel", "hopper_fp8_kernel")
SMALL_KERNELS = ("combine_kernel", "group_sums_kernel")
SIZES = ("REDUCED", "COLUMNS", "W_COLUMNS", "Y_COLUMNS", "LEFT", "RIGHT", "TOPK", "BAND")
# dtype and precision, and the one whose kernels stand for those of the same configuration: they differ in the type or
# in repeated instructions
MODES = {
    ("bfloat16", None): None,
    ("float16", None): ("bfloat16", None),
    ("float32", None): None,
    ("float32", "high"): ("float32", None),
    ("float32", "highest"): None,
}


def chosen_configs(target, problem, dtype, precision):
    """The configurations that the heuristic chooses for the products of a problem, by their names."""
    arrays, static = arguments(*problem, dtype, precision)
    checked = check_problem(**arrays, **static)
    return {op: heuristic_config(CONFIG_TYPES[op], checked, target) for op in CONFIG_TYPES}


def every_problem():
    """Problems of all kinds that a heuristic might tell apart: (rows of an expert, K, N, layout, options)."""
    rows = (1, 16, 17, 33, 65, 500)
    features = (17, 64, 128, 136, 513, 4096, 8192)
    return itertools.product(rows, features, features, ("enk", "ekn"), OPTIONS)


def configs_of_problems(target, dtype, precision):
    """The configurations chosen for small problems, which together have all there are; most options come first."""
    narrow = ((64, 64), (128, 128), (64, 512), (512, 64))
    features = ((512, 512), (1024, 1024), (513, 513), *narrow, (512, 8192), (513, 8192))
    problems = itertools.product((256, 128, 64, 32, 16), features, ("enk", "ekn"), reversed(OPTIONS))
    problems = [(rows, *sizes, layout, options) for rows, sizes, layout, options in problems]
    return {problem: chosen_configs(target, problem, dtype, precision) for problem in problems}


def problems_to_lower(target, mode):
    """Few (problem, products) that together have every configuration of a mode, or one and those of no other."""
    configs = configs_of_problems(target, *mode)
    missing = {config for chosen in configs.values() for config in chosen.values()}
    if MODES[mode]:
        others = configs_of_problems(target, *MODES[mode]).values()
        missing.difference_update(*(chosen.values() for chosen in others))
        missing.add(next(iter(configs.values()))["forward"])
    while missing:
        problem = max(configs, key=lambda problem: len(missing.intersection(configs[problem].values())))
        yield problem, tuple(op for op, config in configs[problem].items() if config in missing)
        missing.difference_update(configs[problem].values())


def lower_product(problem, dtype, precision, products):
    arrays, static = arguments(*problem, dtype, precision)
    floats = {name: arrays.pop(name) for name in ("x", "w", "topk_weights", "bias")}

    def forward(floats, fixed):
        return jgg.grouped_gemm(**floats, **fixed, **static, implementation="triton")

    def compute(floats, fixed, dy):
        """What needs those products; jit leaves the others out."""
        y, vjp = jax.vjp(lambda floats: forward(floats, fixed), floats)
        (grads,) = vjp(dy)
        results = {"forward": y, "dx": (grads["x"], grads["topk_weights"]), "dw": (grads["w"], grads["bias"])}
        return [results[name] for name in products]

    lower(compute, floats, arrays, jax.eval_shape(forward, floats, arrays))


def lower_entry(entry):
    shapes = jax.eval_shape(functools.partial(operands, entry.problem))
    lower(product(entry.op, entry.problem, "triton", entry.config), shapes)


def kind(name, launch, takes_all):
    """What decides how a kernel is compiled: of sizes, whether rows are aligned and a tile takes more than a step."""
    constants = {key: value for key, value in launch.constants.items() if key not in SIZES}
    if name in HOPPER_KERNELS:  # which take six seconds to compile, and no more memory with a bias or weights
        of_interest = ("RAGGED_M", "ACTIVATES")
        if takes_all:
            of_interest += ("GATHERS", "HAS_PIECES", "BLOCK_COLUMNS", "STAGES", "Y_IS_TRANSPOSED")
            of_interest += ("GATED", "INTERLEAVED", "CURVE")
        constants = {key: value for key, value in constants.items() if key in of_interest}
        sizes = {key: result.dtype.itemsize for key, result in launch.result_types.items()}
        return repr((name, constants, sizes, launch.operands["left"].dtype.name.removeprefix("b")))
    aligned = {key: launch.constants[key] % 16 == 0 for key in SIZES if key in launch.constants}
    has_steps = launch.constants.get("REDUCED", 0) > launch.constants.get("BLOCK_REDUCED", 0)
    dtypes = {key: array.dtype for key, array in (launch.arrays | launch.result_types).items()}
    options = [*launch.descriptors], launch.num_warps, launch.num_stages
    return repr((name, constants, aligned, has_steps, dtypes, options))


def leave_out_repeated_kernels(takes_all=True):
    """Compiles one kernel of each kind, or of the Hopper kernels few kinds."""
    call_kernel, seen = triton_implementation.call, set()

    def call(compute_capability, kernel, launch):
        name = kernel.__name__
        if name in (*KERNELS, *SMALL_KERNELS, *HOPPER_KERNELS):
            if kind(name, launch, takes_all) in seen:
                return {key: jnp.zeros(result.shape, result.dtype) for key, result in launch.result_types.items()}
            seen.add(kind(name, launch, takes_all))
        return call_kernel(compute_capability, kernel, launch)

    triton_implementation.call = call


def assemble(folder, compute_capability):
    """Name, shared memory, spills and instructions to store of the kernel dumped in a folder; and `runs_on`.

    That is how many products may still run after a wait, of those whose left operand is in registers.
    """
    (ptx,), (info,) = folder.glob("*.ptx"), folder.glob("*.compile_info")
    assembler = "ptxas-blackwell" if compute_capability >= 100 else "ptxas"
    architecture = re.search(r"\.target (\w+)", ptx.read_text())[1]
    done = subprocess.run(
        [
            Path(triton.__file__).parent / "backends/nvidia/bin" / assembler,
            "-v",
            f"-arch={architecture}",
            ptx,
            "-o",
            folder / "binary",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spills, done.stderr
    shared_memory = int(info.read_text().split(":")[-1])
    stores = sorted(set(re.findall(r"st\.global[\w.]*", ptx.read_text())))
    is_left = re.search(r"wgmma\.mma_async[^{]*\{[^}]*\}, *\{", ptx.read_text())
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned *(\d+)", ptx.read_text()) if is_left else []
    return {
        "kernel": ptx.stem,
        "shared_memory": shared_memory,
        "spills": sum(map(int, spills)),
        "stores": stores,
        "runs_on": max(map(int, waits), default=0),
    }


def heuristic_kernels(compute_capability, takes_all, most=None):
    """(what a kernel is for, the function that lowers it) of each configuration of the heuristic.

    With `most`, of those problems of a dtype that have most of its configurations.
    """
    target = current_target()
    for dtype, precision in MODES:
        if dtype == "float32" and not takes_all:
            continue
        if dtype == "float32" and (compute_capability == 80 or (precision == "highest" and compute_capability > 89)):
            continue  # the same kernels are compiled for 8.9, where less shared memory must be enough for them
        for problem, products in itertools.islice(problems_to_lower(target, (dtype, precision)), most):
            what = [*problem, dtype, precision]
            yield what, functools.partial(lower_product, problem, dtype, precision, products)


def tuned_kernels(path):
    """The same of each configuration in a file, whatever its order of tiles, for a problem of sizes that all share."""
    sizes = {"num_rows": 4096, "num_experts": EXPERTS, "in_features": 512, "out_features": 512, "topk": 2}
    entries = {}
    for entry in tuned_files.parse(path):
        problem = dataclasses.replace(entry.problem, **sizes)
        entry = dataclasses.replace(entry, problem=problem, config=dataclasses.replace(entry.config, band=8))
        entries[entry.op, problem, entry.config] = entry
    for entry in entries.values():
        yield entry.as_json(), functools.partial(lower_entry, entry)


def main():
    compute_capability = int(sys.argv[1])
    dumped = Path(os.environ["JAX_TRITON_DUMP_DIR"])
    takes_all, most = "--all" in sys.argv, 2 if "--few" in sys.argv else None
    files = [Path(file) for file in sys.argv[2:] if not file.startswith("--")]
    leave_out_repeated_kernels(takes_all or len(files) > 0)
    kernels = [*map(tuned_kernels, files)]
    if not kernels:
        kernels = [heuristic_kernels(compute_capability, takes_all, most), layer_kernels(compute_capability, takes_all)]
    with jgg.target(compute_capability):
        for problem, lower_it in itertools.chain.from_iterable(kernels):
            before = set(dumped.iterdir())
            lower_it()
            for folder in set(dumped.iterdir()) - before:
                print(json.dumps({"problem": problem, **assemble(folder, compute_capability)}), flush=True)


if __name__ == "__main__":
    main()
