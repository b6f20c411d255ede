"""How products are computed: by Triton kernels on a GPU, by the same kernels interpreted, or in plain JAX."""
