"""jgg: grouped GEMM for JAX mixture-of-experts training on NVIDIA GPUs."""

from jgg.configs.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.exporting import export
from jgg.fp8 import Fp8, QuantizedWeights, quantize_tokens, quantize_weights
from jgg.gpu_target import target
from jgg.grouped_gemm import grouped_gemm, grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_forward
from jgg.moe import moe_mlp
from jgg.quantized import QuantizedArray
from jgg.ragged_dot import ragged_dot, ragged_dot_general
from jgg.router import router_logits
from jgg.router_losses import load_balancing_loss, router_z_loss, update_selection_bias
from jgg.routing import Routing, route, sort_by_expert
from jgg.schedule import check
from jgg.tuning import tune

__version__ = "0.1.0"

__all__ = [
    "Fp8",
    "KernelConfigDW",
    "KernelConfigDX",
    "KernelConfigForward",
    "QuantizedArray",
    "QuantizedWeights",
    "Routing",
    "check",
    "export",
    "grouped_gemm",
    "grouped_gemm_dw",
    "grouped_gemm_dx",
    "grouped_gemm_forward",
    "load_balancing_loss",
    "moe_mlp",
    "quantize_tokens",
    "quantize_weights",
    "ragged_dot",
    "ragged_dot_general",
    "route",
    "router_logits",
    "router_z_loss",
    "sort_by_expert",
    "target",
    "tune",
    "update_selection_bias",
]
