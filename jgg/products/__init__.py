"""The products that jgg computes by kernels, one in each file: operands, plain JAX, launch, rules for vmap and meshes.

`product.Product` says what a product is; docs/how-it-works.md walks from `jgg.grouped_gemm` through one of them.
"""
