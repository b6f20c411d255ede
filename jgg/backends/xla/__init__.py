"""Plain JAX for every platform: what the kernels compute, differentiable to any order."""
