"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

Gluon kernels go through Triton's passes, which make asynchronous products wait

jax-triton compiles a Gluon kernel by `make_ttir` and `make_ttgir` of the CUDA backend, as it does a Triton kernel.
Triton compiles it by `gluon_to_ttgir` instead: in Gluon the kernel itself says what is asynchronous. Triton's
pipelining then puts a wait for all products behind each `warpgroup_mma`. Results are right, but no product overlaps
with the next. `backend.gluon_to_ttgir(module, metadata, options, capability)` for `GluonJITFunction`s would fix it.

Seen with jax-triton 0.4.1, JAX 0.11.2, Triton 3.7.1 and 3.9.0. It needs no GPU, but `jax-cuda12-plugin` to lower for
one; with JAX 0.12 see jax_triton_dce_rule.py first. It prints the waits in the PTX, by jax-triton and by Triton:
[1, 0, 0], the first two in the loop, and [1, 0]. It ends with 1 while they differ.
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
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language.nvidia import hopper


@gluon.jit
def products(y):
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], shared)
    acc = hopper.warpgroup_mma_init(gl.zeros([64, 64], gl.float32, result))
    for k in range(64):
        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
        acc = hopper.warpgroup_mma(a.index(k % 4), a.index((k + 1) % 4), acc, is_async=True)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    rows = gl.arange(0, 64, gl.SliceLayout(1, result))
    gl.store(y + rows[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, result))[None, :], acc)


def call() -> jax.Array:
    out = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return jax_triton.triton_call(kernel=products, out_type=out, grid=1, num_warps=4, compute_capability=90)


def waits(ptx: str) -> list[int]:
    return [int(number) for number in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)]


def main() -> int:
    jax.jit(call).trace().lower(lowering_platforms=("cuda",))
    (path,) = glob.glob(f"{FOLDER}/*/*.ptx")
    with open(path) as file:
        got = waits(file.read())
    source, target = GluonASTSource(products, {"y": "*fp32"}), GPUTarget("cuda", 90, 32)
    wanted = waits(triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"])
    print(f"jax-triton: {got}, Triton: {wanted}")
    return int(got != wanted)


if __name__ == "__main__":
    sys.exit(main())
