"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

A kernel that needs more shared memory than the GPU has is compiled, and fails when the program runs

Triton's own launcher raises OutOfResources, with the bytes that are needed and the limit, before the first launch.
jax-triton knows the bytes as it compiles (`metadata["shared"]`), but checks nothing. The program fails when it runs,
with an error of CUDA that does not name the kernel. A ValueError from `_compile_kernel`, with the kernel's name and
both numbers, would say what to change.

Seen with jax-triton 0.4.1, JAX 0.11.2, Triton 3.7.1 and 3.9.0. It needs an H100 or H200 to fail as it runs. Without
one it compiles, which needs `jax-cuda12-plugin`, prints the bytes that the kernel needs, 294,912, next to the 232,448
of a block on an H100, and ends with 1 while that is no error. With JAX 0.12 see jax_triton_dce_rule.py first.
"""

import glob
import os
import sys
import tempfile

os.environ["JAX_TRITON_DUMP_DIR"] = FOLDER = tempfile.mkdtemp()

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def products(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(64):
        block = tl.load(x + k * BLOCK * BLOCK + at)
        total = tl.dot(block, block, total)
    tl.store(y + at, total)


def call(x: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    sizes = {"num_warps": 8, "num_stages": 9, "BLOCK": 128}
    return jax_triton.triton_call(x, kernel=products, out_type=out, grid=1, compute_capability=90, **sizes)


def main() -> int:
    x = jnp.zeros((64, 128, 128), jnp.bfloat16)
    jax.jit(call).trace(x).lower(lowering_platforms=("cuda",))
    (path,) = glob.glob(f"{FOLDER}/*/*.compile_info")
    with open(path) as file:
        print(f"no error for {file.read().strip()}, but an H100 has 232448")
    if jax.default_backend() == "gpu":
        print(jax.jit(call)(x))
    return 1


if __name__ == "__main__":
    sys.exit(main())
