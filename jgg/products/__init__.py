"""What jgg computes by kernels, each product in a file of its own: operands, plain JAX, launch, rules of vmap, meshes.

`product.Product` says what a product is; docs/how-it-works.md walks from `jgg.grouped_gemm` through one of them.
"""
