"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

A warp-specialized Gluon kernel is launched with too few threads

`gl.warp_specialize` adds warps to those of the default partition. Triton writes their sum into the PTX, as `.reqntid`.
jax-triton launches `num_warps` warps, those of the default partition alone (`TritonFunction._compile_kernel`), and CUDA
refuses a launch with another number of threads than `.reqntid`. `make_llir` of Triton's backend writes the sum into
`metadata["num_warps"]`, from where `_compile_kernel` could take it.

Seen with jax-triton 0.4.1, JAX 0.11.2, Triton 3.7.1 and 3.9.0. The launch needs an H100 or H200: there the program
fails with an error of CUDA, rather than print [1. 2.]. Without one it compiles the kernel, which needs
`jax-cuda12-plugin`, and prints the 256 threads that the PTX requires and the 128 of the launch; it ends with 1 while
they differ. With JAX 0.12 see jax_triton_dce_rule.py first.
"""

import glob
import os
import re
import sys
import tempfile

os.environ["JAX_TRITON_DUMP_DIR"] = FOLDER = tempfile.mkdtemp()

import jax
import jax.numpy as jnp
import jax_triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first(y):
    gl.store(y, 1.0)


@gluon.jit
def second(y):
    gl.store(y + 1, 2.0)


@gluon.jit
def both(y):
    gl.warp_specialize([(first, (y,)), (second, (y,))], [4], [24])


def call() -> jax.Array:
    out = jax.ShapeDtypeStruct((2,), jnp.float32)
    return jax_triton.triton_call(kernel=both, out_type=out, grid=1, num_warps=4, compute_capability=90)


def main() -> int:
    jax.jit(call).trace().lower(lowering_platforms=("cuda",))
    (ptx,) = glob.glob(f"{FOLDER}/*/*.ptx")
    with open(ptx) as file:
        (required,) = re.findall(r"\.reqntid (\d+)", file.read())
    print(f"the PTX requires {required} threads, the launch has {4 * 32}")
    if jax.default_backend() == "gpu":
        print(jax.jit(call)())
    return int(int(required) != 4 * 32)


if __name__ == "__main__":
    sys.exit(main())
