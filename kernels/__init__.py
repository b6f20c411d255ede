"""The Triton kernels: plain Triton, no JAX import, so that Triton's interpreter can run them too."""
