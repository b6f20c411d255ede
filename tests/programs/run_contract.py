"""Runs cases of the contract by the Triton kernels, forward and backward, for a tool that watches them.

Takes the number of this process, how many share the cases, and an expression that is in their names. Prints the name of
each case before it runs, and compares nothing: the tests do.
"""

import functools
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from jgg.launching.heuristic import hopper_config
from jgg.linear.symmetric import symmetric_product
from tests.support import moe_oracle, moe_runs
from tests.support.cases import CASES, OPTIONS, OPTIONS_HALVES, make_data
from tests.support.comparison import passes_of_grouped_gemm, small_configs
from tests.support.routers import random_logits
from tests.support.specialized import LARGE_CASES, columns_of, specialized_configs

POINTERS = {f"use_tma_load_{name}": False for name in ("x", "w", "dy")}


def products():
    """(what it is, case, dtype, configurations)."""
    for case in CASES:
        yield "small tiles", case, "float32", small_configs()
    for case in OPTIONS_HALVES[0]:
        yield "small tiles, pointers", case, "float16", small_configs(**POINTERS)
    for case in OPTIONS_HALVES[1]:
        yield "default", case, "bfloat16", ()
    for case in OPTIONS[::3] + tuple(LARGE_CASES[::2]):
        configs = specialized_configs(case.w_layout, columns_of(case), fuse_gather=True)
        yield "warp-specialized", case, "bfloat16", tuple(configs)


def run_product(case, dtype, configs):
    data = make_data(case, dtype)
    options = {**case.options, "preferred_element_type": case.out_dtype}
    arrays, *fixed = jax.tree.map(
        jnp.asarray, ((data.x, data.w, data.topk_weights, data.bias), data.group_sizes, data.gather_indices, data.dy)
    )
    run = jax.jit(passes_of_grouped_gemm("triton", options, dict(configs)))
    jax.block_until_ready(run(arrays, *fixed))


def run_layer(activation, **options):
    floats, chosen, dy = moe_oracle.make(activation, **options)
    jax.block_until_ready(moe_runs.run(floats, chosen, dy, "triton", activation))


def run_router(num_tokens, num_experts, topk, **options):
    logits = random_logits(num_tokens, num_experts)
    jax.block_until_ready(jgg.route(logits, topk, implementation="triton", **options))


def run_symmetric(shape, dtype, config):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
    product = jax.jit(functools.partial(symmetric_product, kernel_config=config, implementation="triton"))
    gram = product(x)
    jax.block_until_ready(product(gram, add=gram, diagonal=1.0))


def everything():
    """(name, function without arguments)."""
    for kind, case, dtype, configs in products():
        yield f"{kind}: {case.name}", lambda case=case, dtype=dtype, configs=configs: run_product(case, dtype, configs)
    for activation, biased in (("swiglu", True), ("ungated_relu_squared", False), ("clamped_swiglu", False)):
        yield f"layer: {activation}", lambda name=activation, biased=biased: run_layer(name, biased=biased)
    for shape in ((33, 130, 9), (1500, 16, 2), (7, 8, 1)):
        yield f"router: {shape}", lambda shape=shape: run_router(*shape)
    yield "router: groups", lambda: run_router(60, 16, 4, score="sigmoid", num_groups=4, topk_groups=2)
    hopper = hopper_config(jgg.KernelConfigForward, "enk")
    for shape, dtype in (((3, 200, 72), "bfloat16"), ((2, 17, 33), "float32")):
        yield f"symmetric: {shape}", lambda shape=shape, dtype=dtype: run_symmetric(shape, dtype, None)
    yield "symmetric: warp-specialized", lambda: run_symmetric((30, 520, 136), "bfloat16", hopper)


def main():
    number, count = map(int, sys.argv[1:3])
    cases = (case for case in everything() if re.search(sys.argv[3], case[0]))
    for name, run in itertools.islice(cases, number, None, count):
        print(f"case: {name}", flush=True)
        with np.errstate(all="ignore"):
            run()
    print("all cases ran", flush=True)


if __name__ == "__main__":
    main()
