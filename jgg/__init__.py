"""Fine-tune, train and run mixture-of-experts (MoE) models in JAX, with fast Triton kernels for NVIDIA GPUs.

`import jgg` makes all of it available, but imports nothing, not even JAX, until you use it.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jgg import activations as activations
    from jgg import data as data
    from jgg import extend as extend
    from jgg import hf as hf
    from jgg import integrations as integrations
    from jgg import layers as layers
    from jgg import linen as linen
    from jgg import models as models
    from jgg import nnx as nnx
    from jgg import optim as optim
    from jgg import sharding as sharding
    from jgg import train as train
    from jgg.core.exporting import export as export
    from jgg.core.gpu_target import target as target
    from jgg.core.quantized import QuantizedArray as QuantizedArray
    from jgg.core.quantized import QuantizedWeights as QuantizedWeights
    from jgg.core.schedule import check as check
    from jgg.core.versions import __version__ as __version__
    from jgg.experts.moe import moe_mlp as moe_mlp
    from jgg.experts.router.logits import router_logits as router_logits
    from jgg.experts.router.losses import load_balancing_loss as load_balancing_loss
    from jgg.experts.router.losses import router_z_loss as router_z_loss
    from jgg.experts.router.losses import update_selection_bias as update_selection_bias
    from jgg.experts.router.routing import Routing as Routing
    from jgg.experts.router.routing import route as route
    from jgg.experts.router.routing import sort_by_expert as sort_by_expert
    from jgg.launching.kernel_configs import KernelConfigDW as KernelConfigDW
    from jgg.launching.kernel_configs import KernelConfigDX as KernelConfigDX
    from jgg.launching.kernel_configs import KernelConfigForward as KernelConfigForward
    from jgg.linear.fp8 import Fp8 as Fp8
    from jgg.linear.fp8 import quantize_mxfp4 as quantize_mxfp4
    from jgg.linear.fp8 import quantize_tokens as quantize_tokens
    from jgg.linear.fp8 import quantize_weights as quantize_weights
    from jgg.linear.grouped_gemm import grouped_gemm as grouped_gemm
    from jgg.linear.grouped_gemm import grouped_gemm_dw as grouped_gemm_dw
    from jgg.linear.grouped_gemm import grouped_gemm_dx as grouped_gemm_dx
    from jgg.linear.grouped_gemm import grouped_gemm_forward as grouped_gemm_forward
    from jgg.linear.low_rank import LowRank as LowRank
    from jgg.linear.ragged_dot import ragged_dot as ragged_dot
    from jgg.linear.ragged_dot import ragged_dot_general as ragged_dot_general
    from jgg.tuning.search import tune as tune

# the modules that people import, and the package that each needs in addition to JAX, if any
_MODULES: dict[str, str | None] = {
    **dict.fromkeys(("activations", "extend", "hf", "integrations", "layers", "sharding")),
    **dict.fromkeys(("data", "linen", "models", "nnx", "optim"), "flax"),
    "train": "orbax",
}
_EXTRAS = {"flax": "flax", "orbax": "train"}  # what installs these packages
_NAMES = {
    "core.exporting": "export",
    "core.gpu_target": "target",
    "core.quantized": "QuantizedArray QuantizedWeights",
    "core.schedule": "check",
    "core.versions": "__version__",
    "experts.moe": "moe_mlp",
    "experts.router.logits": "router_logits",
    "experts.router.losses": "load_balancing_loss router_z_loss update_selection_bias",
    "experts.router.routing": "Routing route sort_by_expert",
    "launching.kernel_configs": "KernelConfigDW KernelConfigDX KernelConfigForward",
    "linear.fp8": "Fp8 quantize_mxfp4 quantize_tokens quantize_weights",
    "linear.grouped_gemm": "grouped_gemm grouped_gemm_dw grouped_gemm_dx grouped_gemm_forward",
    "linear.low_rank": "LowRank",
    "linear.ragged_dot": "ragged_dot ragged_dot_general",
    "tuning.search": "tune",
}
_HOMES = {name: f"jgg.{home}" for home, names in _NAMES.items() for name in names.split()}
if not TYPE_CHECKING:  # which read the names above
    __all__ = sorted(_HOMES.keys() - {"__version__"})


def __getattr__(name: str) -> Any:
    """Imports a name when it is first used."""
    if name in _HOMES:
        value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
        return value
    if name not in _MODULES:
        raise AttributeError(f"module 'jgg' has no attribute {name!r}")
    try:
        return importlib.import_module(f"jgg.{name}")
    except ModuleNotFoundError as error:
        needed = _MODULES[name]
        if needed is None or str(error.name).startswith("jgg"):
            raise
        message = f"jgg.{name} needs {needed.capitalize()}: pip install 'jgg[{_EXTRAS[needed]}]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    usable = [name for name, needed in _MODULES.items() if needed is None or importlib.util.find_spec(needed)]
    return sorted([*_HOMES, *usable])
