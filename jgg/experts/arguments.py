"""Checks the arguments of an expert MLP once: its weights, its options, its routing."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Self, TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from jgg.core.activations import Activation, ActivationLike, find_activation
from jgg.core.arguments import (
    Shaped,
    as_array,
    as_array_or_none,
    as_dtype,
    as_flag,
    as_int,
    as_names,
    as_precision,
    check_instance,
    check_integers,
    check_one_of,
    check_rank,
)
from jgg.core.choices import W_LAYOUTS
from jgg.core.matrix import Matrix
from jgg.core.problem import DTYPES
from jgg.core.problem_checks import check_bias, check_known_groups
from jgg.experts.router.routing import Routing
from jgg.launching.choice import check_implementation
from jgg.linear.fp8 import Fp8, check_quantization
from jgg.linear.low_rank import LowRank, checked_beside
from jgg.linear.weights import Weights, as_matrix, in_recipe

_AXES = {"gate_up": "[E, 2 * I, H] or [E, H, 2 * I]", "down": "[E, H, I] or [E, I, H]"}


class ResidualNames(NamedTuple):
    """The names that `jax.checkpoint` policies use for what `jgg.moe_mlp` keeps for the backward pass.

    Attributes:
      weights: the weights cast to the dtype of x, if they have another dtype.
    """

    x: str = "jgg_x"
    pre_activation: str = "jgg_pre_activation"
    weights: str = "jgg_weights"


class ExpertWeights(NamedTuple):
    """The parameters of the experts, in the layout of `MlpOptions.w_layout`; biases as in `jgg.moe_mlp`."""

    gate_up: Matrix
    down: Matrix
    b_gate_up: jax.Array | None = None
    b_down: jax.Array | None = None

    def in_recipe(self, recipe: Fp8 | None, dtype: DTypeLike) -> Self:
        """The parameters with the forms of quantized weights that products with a recipe need."""
        gate_up = in_recipe("w_gate_up", self.gate_up, recipe, dtype)
        return self._replace(gate_up=gate_up, down=in_recipe("w_down", self.down, recipe, dtype))


class Options(TypedDict, total=False):
    """The keyword arguments that `jgg.moe_mlp` and its forms on a mesh share."""

    b_gate_up: ArrayLike | None
    b_down: ArrayLike | None
    low_rank_gate_up: LowRank | None
    low_rank_down: LowRank | None
    activation: ActivationLike
    interleaved: bool
    w_layout: str
    precision: jax.lax.PrecisionLike
    quantization: Fp8 | None
    implementation: str | None
    residual_names: Mapping[str, str] | None


@dataclasses.dataclass(frozen=True)
class MlpOptions:
    """The options of `jgg.moe_mlp`, checked.

    Attributes:
      activation, interleaved, w_layout, precision, quantization, implementation: as in `jgg.moe_mlp`.
      names: as `residual_names` of `jgg.moe_mlp` gives them.
      spare_sms, expected_rows: as in `jgg.moe_mlp`.
      spare_sms_always: multiprocessors that every product leaves idle.
    """

    activation: Activation
    interleaved: bool
    w_layout: str
    precision: jax.lax.Precision
    quantization: Fp8 | None
    implementation: str | None
    names: ResidualNames
    spare_sms: int = 0
    expected_rows: int | None = None
    spare_sms_always: int = 0

    @classmethod
    def checked(
        cls,
        activation: ActivationLike = "swiglu",
        interleaved: bool = False,
        w_layout: str = "enk",
        precision: jax.lax.PrecisionLike = None,
        quantization: Fp8 | None = None,
        implementation: str | None = None,
        residual_names: Mapping[str, str] | None = None,
        spare_sms: int = 0,
        expected_rows: int | None = None,
    ) -> Self:
        """The options from these arguments of `jgg.moe_mlp`; raises if one is wrong."""
        activation, interleaved = find_activation(activation), as_flag("interleaved", interleaved)
        check_quantization(quantization)
        spare_sms = as_int("spare_sms", spare_sms, least=0)
        if expected_rows is not None:
            expected_rows = as_int("expected_rows", expected_rows, least=1, expected="None or an int of at least 1")
        check_one_of("w_layout", w_layout, W_LAYOUTS)
        check_implementation(implementation)
        names = ResidualNames(**as_names("residual_names", residual_names, ResidualNames()._asdict()))
        computed = w_layout, as_precision(precision), quantization, implementation
        return cls(activation, interleaved, *computed, names, spare_sms, expected_rows)


def expert_weights(
    w_gate_up: ArrayLike | Weights,
    w_down: ArrayLike | Weights,
    b_gate_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    low_rank_gate_up: LowRank | None = None,
    low_rank_down: LowRank | None = None,
    w_layout: str = "enk",
) -> ExpertWeights:
    """The parameters as arrays; raises if a LoRA term does not fit its weights."""
    gate_up = _matrix("gate_up", w_gate_up, low_rank_gate_up, w_layout)
    down = _matrix("down", w_down, low_rank_down, w_layout)
    biases = as_array_or_none("b_gate_up", b_gate_up), as_array_or_none("b_down", b_down)
    return ExpertWeights(gate_up, down, *biases)


def _matrix(name: str, w: ArrayLike | Weights, term: LowRank | None, w_layout: str) -> Matrix:
    matrix = as_matrix(f"w_{name}", w)
    check_rank(f"w_{name}", matrix, _AXES[name])
    return matrix if term is None else checked_beside(f"low_rank_{name}", matrix, term, w_layout)


def check_shapes(x: Shaped, weights: ExpertWeights, options: MlpOptions) -> None:
    """Raises if the tokens and the parameters disagree with each other or with the activation."""
    as_dtype("x", x.dtype, DTYPES)
    check_rank("x", x, "[T, H]")
    for name, w in (("w_gate_up", weights.gate_up), ("w_down", weights.down)):
        if w.dense is not None:
            as_dtype(name, w.dense.dtype, DTYPES)
    activation = options.activation
    in_by_out = [w.shape[1:] if options.w_layout == "ekn" else w.shape[:0:-1] for w in (weights.gate_up, weights.down)]
    (got_features, wide), down_features = in_by_out
    num_experts, features = weights.gate_up.shape[0], x.shape[1]
    if got_features != features:
        raise ValueError(
            f"w_gate_up must have H in-features equal to x's {features}, got {list(weights.gate_up.shape)}."
        )
    hidden, rest = divmod(wide, 2 if activation.is_gated else 1)
    if rest:
        raise ValueError(f"w_gate_up must have 2 * I out-features for activation {activation.name!r}, got {wide}.")
    expected, got = [num_experts, hidden, features], [weights.down.shape[0], *down_features]
    if got != expected:
        raise ValueError(
            f"w_down must have E, I, H = {expected} by x, w_gate_up and the activation {activation.name!r}, got {got}."
        )
    check_bias("b_gate_up", weights.b_gate_up, (num_experts, wide))
    check_bias("b_down", weights.b_down, (num_experts, features))


def checked_routing(x: jax.Array, routing: Routing, num_experts: int) -> Routing:
    """The routing as arrays; raises unless it routes x's tokens among `num_experts` experts."""
    check_instance("routing", routing, Routing, "a jgg.Routing")
    weights = as_array("routing.topk_weights", routing.topk_weights)
    choices = as_array("routing.topk_indices", routing.topk_indices)
    sizes = as_array("routing.group_sizes", routing.group_sizes)
    indices = as_array_or_none("routing.gather_indices", routing.gather_indices)
    check_integers("routing.group_sizes", sizes)
    if indices is not None:
        check_integers("routing.gather_indices", indices)
    check_choices(x, weights, choices, "routing.")
    if sizes.shape != (num_experts,):
        raise ValueError(f"routing.group_sizes must be [E] = [{num_experts}], got {list(sizes.shape)}.")
    check_known_groups(sizes)
    if indices is None:
        if weights.shape[1] != 1:
            raise ValueError(
                "routing.gather_indices must be given unless k is 1 and the tokens are in expert order, "
                f"got None for topk_weights {list(weights.shape)}."
            )
    elif len(indices.shape) != 1 or indices.shape[0] > weights.size:
        raise ValueError(
            f"routing.gather_indices must be [M] with M at most T * k = {weights.size}, got {list(indices.shape)}."
        )
    return Routing(weights, choices, sizes, indices)


def check_choices(x: Shaped, topk_weights: Shaped, topk_indices: Shaped, prefix: str = "") -> None:
    """Raises unless both are [T, k], with float weights and integer indices; errors put `prefix` before names."""
    as_dtype(f"{prefix}topk_weights", topk_weights.dtype, DTYPES)
    check_rank(f"{prefix}topk_weights", topk_weights, "[T, k]")
    check_integers(f"{prefix}topk_indices", topk_indices)
    num_tokens, topk = topk_weights.shape
    if num_tokens != x.shape[0] or topk == 0:
        raise ValueError(
            f"{prefix}topk_weights must be [T, k] with T equal to x's {x.shape[0]} and k at least 1, "
            f"got {[num_tokens, topk]}."
        )
    if topk_indices.shape != topk_weights.shape:
        raise ValueError(
            f"{prefix}topk_indices must be [T, k] = {[num_tokens, topk]} as {prefix}topk_weights, "
            f"got {list(topk_indices.shape)}."
        )
