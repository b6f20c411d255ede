"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

An output cannot be a TMA descriptor

`triton_call` takes a `TensorDescriptor` as an operand, but makes a pointer of each output, also where `out_type` is a
`TensorDescriptor` of a `jax.ShapeDtypeStruct`. So a kernel that stores by TMA lowers only if its output is a `jax.Ref`,
which XLA must first fill. `triton_kernel_call_lowering` could put the descriptor into `args` in place of
`ctx.avals_out[ordinal]`; all that follows already takes descriptors.

Seen with jax-triton 0.4.1, JAX 0.11.2, Triton 3.7.1 and 3.9.0. It needs no GPU, but `jax-cuda12-plugin` to lower for
one; with JAX 0.12 see jax_triton_dce_rule.py first. It ends with Triton's CompilationError, since `y` is a pointer,
while it is so.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def fill(y, BLOCK: tl.constexpr):
    y.store([0, 0], tl.full([BLOCK, BLOCK], 1.0, tl.bfloat16))


def call() -> jax.Array:
    out = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    described = jax_triton.TensorDescriptor.from_array(out, (64, 64))
    return jax_triton.triton_call(kernel=fill, out_type=described, grid=1, BLOCK=64, compute_capability=90)


if __name__ == "__main__":
    jax.jit(call).trace().lower(lowering_platforms=("cuda",))
    print(jax_triton.__version__, "right")
