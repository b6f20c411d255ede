"""Lowers forward and backward of random problems for a GPU that need not be here, as it would by default.

Takes the compute capability, how many problems, and a seed. Each line printed is a JSON object: a kernel with the
problem and the configuration that it was compiled for, the bytes of shared memory that it compiled to, and those that
`jgg.launching.requirements.shared_memory` says it takes at most (null for the small kernels around the products).
"""

import dataclasses
import functools
import json
import random
import sys

import jax
import jax.numpy as jnp

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching import jax_triton_fixes
from jgg.launching.heuristic import plain_config
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.launching.requirements import shared_memory
from jgg.launching.tuned_configs import choose_config
from jgg.primitives.operation import Operation
from jgg.products.launches import plans
from jgg.tuning.workloads import gemm, load_layers, operands
from tests.programs.lower_kernels import SMALL_KERNELS, leave_out_repeated_kernels

DTYPES = [("bfloat16", None), ("bfloat16", None), ("float16", "high")]
DTYPES += [("float32", precision) for precision in (None, "high", "highest")]


def random_problem(rng):
    """A grouped GEMM of any kind: one of a well-known layer, or with few rows or features."""
    dtype, precision = rng.choice(DTYPES)
    options = {name: rng.random() < 0.4 for name in ("permute_x", "permute_y", "weighted", "biased")}
    options |= {"dtype": dtype, "precision": precision, "w_layout": rng.choice(("enk", "ekn"))}
    if rng.random() < 0.5:
        layer = rng.choice(list(load_layers().values()))
        problem = rng.choice(list(layer.gemms(**options).values()))
    else:
        features = [rng.choice((17, 64, 96, 136, 256, 513, 1024, 2880)) for _ in range(2)]
        rows = 4 * rng.choice((1, 8, 17, 33, 65, 128, 500))
        problem = gemm(
            num_rows=rows, in_features=features[0], out_features=features[1], num_experts=4, topk=2, **options
        )
    return dataclasses.replace(problem, out_dtype=jnp.dtype(rng.choice((dtype, "float32", "bfloat16"))))


def lower(problem, configs):
    """Forward and backward by the public function; its kernels are compiled on the way."""
    arrays = jax.eval_shape(functools.partial(operands, problem))
    floats = {name: arrays[name] for name in ("x", "w", "topk_weights", "bias") if name in arrays}
    fixed = {name: arrays[name] for name in ("group_sizes", "gather_indices") if name in arrays}

    def product(floats, fixed):
        return jgg.grouped_gemm(
            **floats,
            **fixed,
            **configs,
            topk=problem.topk,
            permute_x=problem.permute_x,
            permute_y=problem.permute_y,
            w_layout=problem.w_layout,
            precision=problem.precision,
            preferred_element_type=problem.out_dtype,
            implementation="triton",
        )

    def forward_and_backward(floats, fixed, dy):
        y, vjp = jax.vjp(lambda floats: product(floats, fixed), floats)
        return y, vjp(dy)

    dy = jax.eval_shape(product, floats, fixed)
    jax.jit(forward_and_backward).trace(floats, fixed, dy).lower(lowering_platforms=("cuda",))


def print_kernels():
    """Prints each kernel that is compiled, whether or not it fits."""
    product = {}

    def choose(kind, problem, target, given=None):
        config = choose_config(kind, problem, target, given)
        most = shared_memory(problem, target, config)
        product.update(problem=str(problem), config=str(config), most=most)
        return config

    def note(kernel, needed, compute_capability):
        most = None if kernel in SMALL_KERNELS else product["most"]
        print(json.dumps(product | {"kernel": kernel, "shared_memory": needed, "most": most}), flush=True)

    plans.choose_config = choose
    jax_triton_fixes.check_fits = note
    # what is compiled is of the product that was chosen for last
    Operation.ahead.num_threads = 0


def main():
    compute_capability, count, seed = map(int, sys.argv[1:])
    leave_out_repeated_kernels()
    print_kernels()
    rng = random.Random(seed)
    names = [f"kernel_config_{name}" for name in ("fwd", "bwd_dx", "bwd_dw")]
    with jgg.target(compute_capability):
        for index in range(count):
            problem, configs = random_problem(rng), {}
            if index % 2:  # as where the hopper kernel cannot run, with another version of Triton
                configs = {
                    name: plain_config(CONFIG_TYPES[op], problem, current_target())
                    for name, op in zip(names, CONFIG_TYPES, strict=True)
                }
            lower(problem, configs)


if __name__ == "__main__":
    main()
