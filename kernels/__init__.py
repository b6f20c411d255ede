"""The kernels, without an import of JAX: which one runs where.

Plain Triton, on every GPU and, by Triton's interpreter, on a CPU: `forward`, `dx` and `dw` the three
products, with what they share in `tiles`; `combine`, `group_sums`, `activation` and `routing` what a layer needs around
them.

Gluon, on compute capability 9.0 alone (H100, H200), with Triton 3.9 and jax-triton 0.4.1: `hopper`, the same three
products of 16-bit operands, warp-specialized, and `hopper_results`, what it does with a finished tile.
`jgg.configs.requirements` says where it can take their place.
"""
