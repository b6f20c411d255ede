"""Configurations of the kernels: what they are, which is chosen, whether it can run."""
