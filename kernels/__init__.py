"""The kernels, without an import of JAX: which one runs where.

Plain Triton, on every GPU and, by Triton's interpreter, on a CPU: `forward`, `dx` and `dw` the three products, the
first also of FP8 operands, with what they share in `tiles`; `combine`, `group_sums`, `activation` and `routing` what a
layer needs around them, `quantize` and `activation_fp8` the same in FP8, from 8.9 on.

Gluon, on compute capability 9.0 alone (H100, H200), with Triton 3.9 and jax-triton 0.4.1: `hopper`, the same three
products of 16-bit operands, warp-specialized, and `hopper_results`, what it does with a finished tile; `hopper_fp8` and
`hopper_fp8_results`, forward and dX of FP8 operands; `hopper_blocks`, what both share. `jgg.configs.requirements` says
where they can take the others' place.
"""
