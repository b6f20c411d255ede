"""Measuring kernels outside jit: which layers and data (workloads), how long a product takes (timing)."""
