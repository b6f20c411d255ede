"""The products of `moe_mlp` that are made in FP8, by the recipe `mlp.quantization`."""

import dataclasses
from typing import Any

import jax

from jgg.core.problem import GroupedGemmProblem
from jgg.core.quantized import E4M3, QuantizedArray, ToQuantize
from jgg.experts.mlp import Mlp, Operands
from jgg.fp8 import WeightForms
from jgg.products.activate_fp8 import ACTIVATE_BACKWARD_FP8, ActivateBackwardFp8
from jgg.products.forward import Forward
from jgg.products.forward_fp8 import FORWARD_FP8
from jgg.products.quantize import QUANTIZE_ROWS, Quantize
from jgg.products.up_fp8 import UP_FP8


def up(mlp: Mlp, operands: Operands, keeps: bool) -> list[QuantizedArray]:
    """The pre-activation, if it `keeps` that, as ACTIVATE_FP8 keeps it, and the hidden features [M, I]."""
    weights = _k_major(mlp, operands.w_gate_up, operands.quantized_gate_up, mlp.up.w_layout == "ekn")
    of_up = Forward(
        _rows(mlp, operands.x, E4M3), weights, mlp.bounds(operands.group_sizes), operands.gather_indices,
        bias=operands.b_gate_up,
    )  # fmt: skip
    options = mlp.activation_options | {"power_of_2_scales": _powers(mlp)}
    parts = UP_FP8(mlp.how, of_up, problem=_in_fp8(mlp.up), keeps=keeps, **options)
    hidden, *kept = (QuantizedArray(*parts[at : at + 2]) for at in range(0, len(parts), 2))
    return [*kept, hidden]


def down(mlp: Mlp, operands: Operands, hidden: QuantizedArray) -> jax.Array:
    """y [T, H]."""
    weights = _k_major(mlp, operands.w_down, operands.quantized_down, mlp.down.w_layout == "ekn")
    options = {"topk_weights": operands.topk_weights, "bias": operands.b_down}
    return _multiply(mlp, mlp.combined_down, hidden, weights, operands, **options)


def activation_backward(
    mlp: Mlp, operands: Operands, kept: QuantizedArray, dy: jax.Array, weights: jax.Array, options: dict[str, Any]
) -> list[Any]:
    """d pre-activation, the same quantized, hidden, and float32 [M] sums of hidden * z."""
    w_down = _k_major(mlp, operands.w_down, operands.quantized_down, mlp.down.w_layout == "enk")
    rows = _rows(mlp, dy, mlp.recipe.gradient_dtype)
    z = _multiply(mlp, mlp.transposed_down, rows, w_down, operands)
    d_pre, values, scales, *others = ACTIVATE_BACKWARD_FP8(
        mlp.how, ActivateBackwardFp8(kept, z, weights), gradient_dtype=mlp.recipe.gradient_dtype,
        power_of_2_scales=_powers(mlp), **options,
    )  # fmt: skip
    return [d_pre, QuantizedArray(values, scales), *others]


def dx(mlp: Mlp, operands: Operands, d_pre_activation: QuantizedArray) -> jax.Array:
    """[T, H]."""
    weights = _k_major(mlp, operands.w_gate_up, operands.quantized_gate_up, mlp.up.w_layout == "enk")
    return _multiply(mlp, mlp.transposed_up, d_pre_activation, weights, operands)


def kept_for_backward(mlp: Mlp, operands: Operands) -> Operands:
    """The operands, of weights in FP8 only the forms that dX and z multiply."""
    is_turned = mlp.up.w_layout == "enk"
    kept = {}
    for name in ("quantized_gate_up", "quantized_down"):
        forms = getattr(operands, name)
        kept[name] = forms and (forms._replace(straight=None) if is_turned else forms._replace(turned=None))
    return operands._replace(**kept)


def _multiply(
    mlp: Mlp, problem: GroupedGemmProblem, rows: QuantizedArray, weights: QuantizedArray | ToQuantize,
    operands: Operands, **options: jax.Array | None,
) -> jax.Array:  # fmt: skip
    of_product = Forward(rows, weights, mlp.bounds(operands.group_sizes), operands.gather_indices, **options)
    (y,) = FORWARD_FP8(mlp.how, of_product, problem=_in_fp8(problem))
    return y


def _in_fp8(problem: GroupedGemmProblem) -> GroupedGemmProblem:
    return dataclasses.replace(problem, dtype=E4M3, w_layout="enk")


def _rows(mlp: Mlp, rows: jax.Array, dtype: Any) -> QuantizedArray:
    return QuantizedArray(*QUANTIZE_ROWS(mlp.how, Quantize(rows), dtype=dtype, power_of_2_scales=_powers(mlp)))


def _k_major(mlp: Mlp, w: jax.Array, forms: WeightForms | None, turned: bool) -> QuantizedArray | ToQuantize:
    """Weights as they are or `turned`, from their forms if there are some."""
    form = forms and (forms.turned if turned else forms.straight)
    return ToQuantize(w, turned, _powers(mlp)) if form is None else form


def _powers(mlp: Mlp) -> bool:
    return mlp.recipe.power_of_2_scales
