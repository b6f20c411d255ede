"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

A kernel is compiled again by each thread and in each process

jax-triton keeps compiled kernels in a dictionary of the process, and fills it without a lock. So two threads that lower
the same kernel both compile it, and nothing is kept on disk, where Triton's own launcher has its cache: each start of a
program takes seconds for each of its kernels. A lock for each key, and Triton's cache manager or a folder of
jax-triton's, would spare that.

Seen with jax-triton 0.4.1, JAX 0.11.2, Triton 3.7.1 and 3.9.0. It needs no GPU, but `jax-cuda12-plugin` to lower for
one; with JAX 0.12 see jax_triton_dce_rule.py first. It prints how often the kernel was compiled, 2 in this process and
1 in a second one rather than 1 and 0, and ends with 1 while that is so.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl
from triton.backends.nvidia.compiler import CUDABackend


@triton.jit
def double(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at))


def lower(_) -> None:
    def call(x):
        out = jax.typeof(x)
        return jax_triton.triton_call(x, kernel=double, out_type=out, grid=1, BLOCK=128, compute_capability=90)

    jax.jit(call).trace(jnp.zeros(128)).lower(lowering_platforms=("cuda",))


def main() -> int:
    compiled, make_ptx = [], CUDABackend.make_ptx
    CUDABackend.make_ptx = lambda *args: (compiled.append(args), make_ptx(*args))[1]  # counts
    num_threads = 1 if "again" in sys.argv else 2
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(lower, range(num_threads)))
    print(f"{num_threads} threads compiled it {len(compiled)} times", flush=True)
    if "again" in sys.argv:
        return len(compiled)
    return int(subprocess.run([sys.executable, __file__, "again"]).returncode or len(compiled) > 1)


if __name__ == "__main__":
    sys.exit(main())
