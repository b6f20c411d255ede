"""The operations that models need beside grouped GEMM: attention, the delta rule, norms, rotations, losses."""
