"""The kernels, which do not import JAX, and where each of them runs.

Kernels in plain Triton run on every GPU and, in Triton's interpreter, on a CPU. `forward`, `dx` and `dw` are the three
products (`forward` also takes FP8 operands) and share the helpers in `tiles`. `combine`, `group_sums`, `activation` and
`routing` are the rest of a layer; `norm` and `rotary` are for whole models. `quantize` and `activation_fp8` are for
FP8, from compute capability 8.9 on.

Kernels in Gluon run only on compute capability 9.0 (H100, H200), with Triton 3.9 and jax-triton 0.4.1. `hopper` is the
three products of 16-bit operands, warp-specialized; `hopper_results` stores its finished tiles. `hopper_fp8` and
`hopper_fp8_results` do so for forward and dX of FP8 operands. Both share `hopper_blocks`, the tiles and the ring of
blocks, and `hopper_loads`, which fills the ring. `jgg.launching.requirements` says where the Gluon kernels can replace
the plain ones.
"""
