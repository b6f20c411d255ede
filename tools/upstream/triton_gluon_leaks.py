"""A report for https://github.com/triton-lang/triton, which was not sent yet.

A process that compiled a Gluon kernel ends with 20 lines about leaked types

`libtriton` keeps the classes of Gluon's layouts for good, in a static of C++ (`GluonLayouts`), as soon as a kernel asks
for the layout of a tensor or of shared memory. Their methods keep the globals of their modules alive, so that nanobind
finds its types still there when the interpreter ends, and prints "nanobind: leaked 4 instances!", 7 types and 326
functions. Nothing else is wrong. References that are dropped at exit, by `atexit` or a capsule of the module, would end
it.

Seen with Triton 3.9.0, without JAX; not with 3.7.1. It needs triton alone and no GPU. It prints the lines as it ends.
"""

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

triton.knobs.compilation.always_compile = True  # a kernel from the cache asks for no layout


@gluon.jit
def read(y):
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    rows: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    at = gl.arange(0, 64, gl.SliceLayout(1, rows))[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, rows))[None, :]
    gl.store(y + at, gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], shared).index(0).load(rows))


if __name__ == "__main__":
    source, target = GluonASTSource(read, {"y": "*bf16"}), GPUTarget("cuda", 90, 32)
    triton.compile(source, target=target, options={"num_warps": 4})
    print(triton.__version__, "compiled")
