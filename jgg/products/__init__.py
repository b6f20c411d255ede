"""The operations of experts, one in each file: operands, plain JAX, launch, rules for vmap and meshes.

`jgg.primitives.operation.Operation` says what an operation is; docs/how-it-works.md walks from `jgg.grouped_gemm`
through one of them.
"""
