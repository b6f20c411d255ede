"""A tuned entry, the problem that it is of, and what is chosen for that."""

import jgg
from jgg.core.gpu_target import Target
from jgg.launching import tuned_configs, tuned_files
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.tuning.workloads import gemm

HOPPER = Target(90, 132, "NVIDIA H200")
SIZES = {"num_rows": 65536, "in_features": 2048, "out_features": 1536, "num_experts": 128, "topk": 8}
PROBLEM = gemm(**SIZES)
UNUSUAL = jgg.KernelConfigForward(band=3)


def entry(problem=PROBLEM, config=UNUSUAL, milliseconds=1.0, capability=90, device="NVIDIA H200"):
    return tuned_files.Entry(problem, config, milliseconds, device, capability, {"jax": "0.11.2"}, "2026-11-21")


def chosen(problem=PROBLEM, op="forward", target=HOPPER):
    return tuned_configs.choose_config(CONFIG_TYPES[op], problem, target)
