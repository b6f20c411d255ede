"""jgg: grouped GEMM for JAX mixture-of-experts training on NVIDIA GPUs."""

from typing import TYPE_CHECKING, Any

from jgg.core.exporting import export
from jgg.core.gpu_target import target
from jgg.core.quantized import QuantizedArray, QuantizedWeights
from jgg.core.schedule import check
from jgg.core.versions import __version__ as __version__
from jgg.experts.moe import moe_mlp
from jgg.experts.router.logits import router_logits
from jgg.experts.router.losses import load_balancing_loss, router_z_loss, update_selection_bias
from jgg.experts.router.routing import Routing, route, sort_by_expert
from jgg.launching.kernel_configs import KernelConfigDW, KernelConfigDX, KernelConfigForward
from jgg.linear.fp8 import Fp8, quantize_tokens, quantize_weights
from jgg.linear.grouped_gemm import grouped_gemm, grouped_gemm_dw, grouped_gemm_dx, grouped_gemm_forward
from jgg.linear.low_rank import LowRank
from jgg.linear.ragged_dot import ragged_dot, ragged_dot_general

if TYPE_CHECKING:
    from jgg.tuning.search import tune

__all__ = [
    "Fp8",
    "KernelConfigDW",
    "KernelConfigDX",
    "KernelConfigForward",
    "LowRank",
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


def __getattr__(name: str) -> Any:
    """Imports `tune` when it is first used, because it also imports the modules that measure."""
    if name == "tune":
        from jgg.tuning.search import tune

        return tune
    raise AttributeError(f"module 'jgg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "tune"})
