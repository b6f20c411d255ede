"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

With Triton 3.7 no kernel with a TMA descriptor compiles: it does not set `is_im2col`

`CompilationResult.__post_init__` raises ValueError if `tensordesc_meta` lacks a key of `TensorDescMeta`. Triton 3.7
writes no `is_im2col`, though jax-triton asks for `triton>=3.7`. `is_im2col: NotRequired[bool]` would fix it: where the
field is used, it is read by `meta.get("is_im2col", False)` already.

Seen with jax-triton 0.4.1, JAX 0.11.2 and Triton 3.7.1; right with Triton 3.9.0. It needs no GPU, but
`jax-cuda12-plugin` to lower for one; with JAX 0.12 see jax_triton_dce_rule.py first. It ends with the ValueError while
it is so.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at[:, None] * BLOCK + at[None, :], x.load([0, 0]))


def call(x: jax.Array) -> jax.Array:
    described, out = jax_triton.TensorDescriptor.from_array(x, (64, 64)), jax.typeof(x)
    return jax_triton.triton_call(described, kernel=copy, out_type=out, grid=1, BLOCK=64, compute_capability=90)


if __name__ == "__main__":
    jax.jit(call).trace(jnp.zeros((64, 64), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
    print(triton.__version__, "right")
