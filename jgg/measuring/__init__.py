"""Measuring kernels outside jit: the layers and data that are measured, the ways to compute a product, the clock."""
