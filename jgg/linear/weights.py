"""Converts weights from users to a `Matrix`."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, check
from jgg.core.matrix import Matrix
from jgg.core.quantized import (
    BLOCK,
    QuantizedArray,
    QuantizedWeights,
    ToQuantize,
    WeightForms,
    block_of,
    scales_shape,
)
from jgg.launching.choice import How
from jgg.linear.fp8 import Fp8, quantize_once
from jgg.products.quantize import QUANTIZE_WEIGHTS, with_quantized

Weights = jax.Array | QuantizedArray | QuantizedWeights | WeightForms


def as_matrix(name: str, value: ArrayLike | Weights) -> Matrix:
    """Weights as a Matrix; quantized weights get no gradient.

    Raises:
      TypeError: the weights are not an array, or are a QuantizedArray with unsupported dtypes.
      ValueError: no block size explains the scales.
    """
    if isinstance(value, QuantizedWeights):
        array = as_array(f"{name}.array", value.array)
        return Matrix(dense=array).with_forms(jax.lax.stop_gradient(value.forms))
    if isinstance(value, WeightForms):  # jgg's own, made by `forms_of_forward`
        return Matrix().with_forms(jax.lax.stop_gradient(value))
    if isinstance(value, QuantizedArray):
        block_of(value, f"{name}.")
        return Matrix(straight=jax.lax.stop_gradient(value))
    return Matrix(dense=as_array(name, value))


def in_recipe(name: str, matrix: Matrix, recipe: Fp8 | None, dtype: DTypeLike) -> Matrix:
    """The matrix with the forms of quantized weights that products with a recipe need.

    Weights with blocks of 128 x 128 are copied to make the transposed form. Other weights are quantized again.

    Args:
      name: the weights' name in messages.
      dtype: the dtype of x; weights that are quantized again are first dequantized to it.

    Raises:
      ValueError: QuantizedWeights are given without a recipe, or their array and their FP8 forms have different shapes.
    """
    straight = matrix.straight
    if straight is None:  # dense, or the form that a product reads
        return matrix
    if matrix.dense is not None:
        if recipe is None:
            raise ValueError(f"{name} must be an array or a QuantizedArray without quantization, got QuantizedWeights.")
        shape, own = straight.shape, jnp.shape(matrix.dense)
        check(own == shape, f"{name}.array must be {list(shape)}, as what is quantized, got {list(own)}.")
        return matrix
    if recipe is None:
        return matrix
    if not _has_blocks(straight):
        array = jax.lax.stop_gradient(straight.dequantize(dtype))
        return matrix.with_forms(quantize_once(name, array, recipe).forms)
    return matrix.with_forms(WeightForms(straight, exchanged(straight)))


def exchanged(form: QuantizedArray) -> QuantizedArray:
    """The other form of weights, a copy."""
    # in a scan over stacked layers XLA would else transpose the weights of all layers before the loop
    stays = with_layout_constraint(form.values, Layout(tuple(range(len(form.shape)))))
    return QuantizedArray(stays, form.scales).mT


def forms_of_forward(name: str, weights: Weights, recipe: Fp8, dtype: DTypeLike, how: How) -> WeightForms:
    """What forward products with a recipe read of stacked weights [L, E, K, N]: only the transposed form.

    Args:
      name, dtype: as in `in_recipe`.
      how: how to quantize the weights, if they are not quantized yet.
    """
    # not in the loop over layers, before which XLA would transpose all of them, to copy one after the other
    if isinstance(weights, QuantizedArray) and _has_blocks(weights):
        return WeightForms(None, jax.lax.stop_gradient(weights).mT)

    def of_layer(weights: Weights) -> WeightForms:
        matrix = in_recipe(name, as_matrix(name, weights), recipe, dtype)
        form = matrix.transposed
        if form is None:
            to_quantize = ToQuantize(jax.lax.stop_gradient(matrix.dense), True, recipe.format)
            form = with_quantized(to_quantize, functools.partial(QUANTIZE_WEIGHTS, how))
        return WeightForms(None, form)

    return jax.lax.map(of_layer, weights)


def _has_blocks(array: QuantizedArray) -> bool:
    """Whether an array is in FP8 with blocks of 128 x 128, which FP8 products multiply without a conversion."""
    return not array.is_packed and array.scales.shape == scales_shape(array.shape, (BLOCK, BLOCK))
