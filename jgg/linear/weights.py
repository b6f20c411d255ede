"""Weights as users give them, as a `Matrix`."""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, check
from jgg.core.matrix import Matrix
from jgg.core.quantized import BLOCK, QuantizedArray, QuantizedWeights, WeightForms, block_of, scales_shape
from jgg.linear.fp8 import Fp8, quantize_once

Weights = jax.Array | QuantizedArray | QuantizedWeights


def as_matrix(name: str, value: ArrayLike | Weights) -> Matrix:
    """Weights as a Matrix; what is quantized gets no gradient.

    Raises: TypeError: they are no array, or a QuantizedArray of other dtypes. ValueError: no blocks explain its scales.
    """
    if isinstance(value, QuantizedWeights):
        array = as_array(f"{name}.array", value.array)
        return Matrix(dense=array).with_forms(jax.lax.stop_gradient(value.forms))
    if isinstance(value, QuantizedArray):
        block_of(value, f"{name}.")
        return Matrix(straight=jax.lax.stop_gradient(value))
    return Matrix(dense=as_array(name, value))


def in_recipe(name: str, matrix: Matrix, recipe: Fp8 | None, dtype: DTypeLike) -> Matrix:
    """The matrix with the forms that products by a recipe need of weights that are stored quantized.

    Weights with blocks of 128 x 128 are copied to make the transposed form. Other weights are quantized again.

    Args:
      name: of the weights, in messages.
      dtype: what weights that are quantized again are dequantized to before, the dtype of x.

    Raises: ValueError: QuantizedWeights are given without a recipe, or their array and their FP8 forms have different
      shapes.
    """
    straight = matrix.straight
    if straight is None:
        return matrix
    if matrix.dense is not None:
        if recipe is None:
            raise ValueError(f"{name} must be an array or a QuantizedArray without quantization, got QuantizedWeights.")
        shape, own = straight.shape, jnp.shape(matrix.dense)
        check(own == shape, f"{name}.array must be {list(shape)}, as what is quantized, got {list(own)}.")
        return matrix
    if recipe is None:
        return matrix
    if straight.is_packed or straight.scales.shape != scales_shape(straight.shape, (BLOCK, BLOCK)):
        array = jax.lax.stop_gradient(straight.dequantize(dtype))
        return matrix.with_forms(quantize_once(name, array, recipe).forms)
    # in a scan over stacked layers XLA would else transpose the weights of all layers before the loop
    stays = with_layout_constraint(straight.values, Layout(tuple(range(len(straight.shape)))))
    return matrix.with_forms(WeightForms(straight, QuantizedArray(stays, straight.scales).mT))
