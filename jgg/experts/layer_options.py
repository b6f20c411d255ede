"""Sizes and options of an MoE layer, as fields that every framework's layer inherits.

Linen and NNX make dataclasses of these fields, so an editor and `help` show them. The classes here are not frozen,
because the frameworks' dataclasses are not, and a dataclass that is not frozen cannot inherit from a frozen one.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from jgg.core.activations import ActivationLike
from jgg.core.arguments import as_dtype, as_precision, check_instance
from jgg.core.choices import OF_EXPERTS
from jgg.core.problem import DTYPES
from jgg.experts.mesh import MoESharding, check_interleaved
from jgg.launching.choice import check_implementation
from jgg.linear.fp8 import Fp8, check_quantization


@dataclasses.dataclass(eq=False, repr=False)
class InFeatures:
    """The number of in-features: an argument of every layer except Linen's, which takes it from x.

    Args:
      in_features: H, features of x and y.
    """

    in_features: int


@dataclasses.dataclass(eq=False, repr=False)
class LayerOptions:
    """Sizes and options of an MoE layer: the fields that every framework's layer has.

    Args:
      hidden_features: I, hidden features of each expert.
      num_experts: E, experts of the layer.
      topk: k, experts per token.
      score, normalize, scale, num_groups, topk_groups, scores_per_group: options of the router, as in `jgg.route`. With
        topk 1, normalize=True and score="topk_softmax" make every weight 1, so only its losses train the router.
      use_selection_bias: the router chooses by scores plus a bias that is not a parameter; see
        `jgg.update_selection_bias`.
      scale_input: the router's weight scales x before the expert instead of the result (Llama-4); needs topk 1.
      activation: activation of the experts, as in `jgg.moe_mlp`.
      interleaved: the features of w_gate_up are gate 0, up 0, gate 1, up 1, ... rather than side by side.
      use_bias: each expert's products have biases.
      use_router_bias: the router's logits have a bias.
      use_router_scale: the router's weights, once normalized, are multiplied by one factor per expert (Gemma 4).
      shared_features: total hidden features of all shared experts; 0 for none.
      use_shared_gate: the shared experts' result is scaled by a sigmoid of one more projection of x.
      lora_rank: r, the rank of LoRA adapters; None for no adapters. A matrix with an adapter gets no gradient. The
        adapter of w [E, K, N] is two parameters, a [E, K, r] and b [E, r, N], whose names are the name of w plus
        "_lora_a" and "_lora_b". It adds `lora_alpha / lora_rank * a @ b` to w. A tuple has one rank per target.
      lora_alpha: a number that is not trained, or a tuple with one per target; None for lora_rank, so a scale of 1.
      lora_targets: the matrices that have adapters: the experts' "w_gate_up" and "w_down", the shared experts'
        "w_shared_gate_up" [H, N] and "w_shared_down" [K, H], and the router's "w_router" [H, E]. Adapters of the last
        three have no axis for experts.
    """

    hidden_features: int
    num_experts: int
    topk: int
    score: str = "softmax"
    normalize: bool | None = None
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    scores_per_group: int | None = None
    use_selection_bias: bool = False
    scale_input: bool = False
    activation: ActivationLike = "swiglu"
    interleaved: bool = False
    use_bias: bool = False
    use_router_bias: bool = False
    use_router_scale: bool = False
    shared_features: int = 0
    use_shared_gate: bool = False
    lora_rank: int | tuple[int, ...] | None = None
    lora_alpha: float | tuple[float, ...] | None = None
    lora_targets: tuple[str, ...] = OF_EXPERTS


class _OfFramework(Protocol):
    """What every framework's layer has."""

    dtype: DTypeLike | None
    precision: jax.lax.PrecisionLike
    quantization: Fp8 | None
    sharding: MoESharding | None
    implementation: str | None


def check_layer(
    options: LayerOptions,
    layer: _OfFramework,
    param_dtypes: Mapping[str, DTypeLike],
    initializers: Mapping[str, Initializer],
) -> None:
    """Raises if a framework's layer has an option that `MoELayer.apply` or its parameters would not take."""
    as_precision(layer.precision)
    check_quantization(layer.quantization)
    check_implementation(layer.implementation)
    if layer.dtype is not None:
        as_dtype("dtype", layer.dtype, DTYPES)
    for name, dtype in param_dtypes.items():
        as_dtype(name, dtype)
    for name, init in initializers.items():
        check_instance(name, init, Callable, "a function")
    check_sharding(options, layer.sharding)


def check_sharding(options: LayerOptions, sharding: MoESharding | None) -> None:
    """Raises unless the sharding can split a layer with these options."""
    if sharding is None:
        return
    check_instance("sharding", sharding, MoESharding, "a jgg.sharding.MoESharding or None")
    check_interleaved(options.interleaved, options.activation, sharding)
