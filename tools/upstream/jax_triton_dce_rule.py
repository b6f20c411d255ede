"""A report for https://github.com/jax-ml/jax-triton, which was not sent yet.

With JAX 0.12 no call lowers: the rule for dead code elimination takes two arguments and gets three

JAX 0.12 calls the rules in `partial_eval.dce_rules` with `(used_outs, live_ins, eqn)`. jax-triton's
`_triton_kernel_call_dce_rule` takes `(used_outs, eqn)`, so that `jax.jit` of any function that calls `triton_call`
raises TypeError during lowering. jax-triton 0.4.1 asks for `jax>=0.11.0`, so pip installs the two together. A rule
that takes `(used_outs, *live_ins_and_eqn)` serves both versions of JAX.

Seen with jax-triton 0.4.1, JAX 0.12.0.1 and Triton 3.9.0; right with JAX 0.11.2. It needs no GPU, but
`jax-cuda12-plugin` to lower for one. It ends with the TypeError while it is so.
"""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def double(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at))


def call(x: jax.Array) -> jax.Array:
    out = jax.typeof(x)
    return jax_triton.triton_call(x, kernel=double, out_type=out, grid=1, BLOCK=128, compute_capability=90)


if __name__ == "__main__":
    jax.jit(call).trace(jnp.zeros(128)).lower(lowering_platforms=("cuda",))
    print(jax.__version__, "right")
