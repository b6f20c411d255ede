"""What the kernels compute, in plain JAX for every platform."""
