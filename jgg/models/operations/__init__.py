"""The operations that models need in addition to grouped GEMM: attention, the delta rule, norms, rotations, losses."""
