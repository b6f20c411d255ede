"""Sizes and options of an MoE layer, as fields that the layers of every framework inherit.

Linen and NNX make dataclasses of these fields, so an editor and `help` show them. The classes here are not frozen,
because the frameworks' dataclasses are not, and a dataclass that is not frozen cannot inherit from a frozen one.
"""

import dataclasses

from jgg.activations import ActivationLike


@dataclasses.dataclass(eq=False, repr=False)
class InFeatures:
    """The number of in-features, which Linen's layer takes from x and every other layer gets as an argument.

    Args:
      in_features: H, features of x and y.
    """

    in_features: int


@dataclasses.dataclass(eq=False, repr=False)
class LayerOptions:
    """Sizes and options of an MoE layer: the fields that the layers of every framework have.

    Args:
      hidden_features: I, hidden features of each expert.
      num_experts: E, experts of the layer.
      topk: k, experts per token.
      score, normalize, scale, num_groups, topk_groups: options of the router, as in `jgg.route`.
      use_selection_bias: the router chooses by scores plus a bias that is no parameter; see
        `jgg.update_selection_bias`.
      scale_input: the router's weight scales x before the expert instead of the result (Llama-4); needs topk 1.
      activation: activation of the experts, as in `jgg.moe_mlp`.
      interleaved: the features of w_gate_up are gate 0, up 0, gate 1, up 1, ... rather than side by side.
      use_bias: each expert's products have biases.
      use_router_bias: the router's logits have a bias.
      shared_features: hidden features of the shared experts, taken together; 0 for none.
      use_shared_gate: the shared experts' result is scaled by a sigmoid of one more projection of x.
    """

    hidden_features: int
    num_experts: int
    topk: int
    score: str = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    use_selection_bias: bool = False
    scale_input: bool = False
    activation: ActivationLike = "swiglu"
    interleaved: bool = False
    use_bias: bool = False
    use_router_bias: bool = False
    shared_features: int = 0
    use_shared_gate: bool = False
