"""Rows that are sent in FP8 between devices, quantized once, to the layer that multiplies them there."""

import jax

from jgg.core.matrix import Matrix
from jgg.core.quantized import QuantizedArray, as_bits, from_bits
from jgg.experts.exchange import Exchange
from jgg.linear import layer
from jgg.linear.linear import Linear, Rows
from jgg.products.quantize import QUANTIZE_ROWS, Quantize


def sends_fp8(exchange: Exchange | None, linear: Linear) -> bool:
    """Whether rows for a layer are quantized before they are sent: they go to other devices, and it has a recipe."""
    return exchange is not None and exchange.num_devices > 1 and linear.row_format is not None


def sent(linear: Linear, rows: jax.Array, exchange: Exchange) -> QuantizedArray:
    """Rows of this device's tokens, quantized once as the layer reads them, at the devices of their experts."""
    assert linear.row_format is not None
    quantized = QUANTIZE_ROWS(linear.how, Quantize(rows), stored_as=linear.row_format)
    return jax.tree.map(exchange.there, quantized)


def beside_quantization(linear: Linear, rows: Rows, matrix: Matrix) -> tuple[Rows, Matrix]:
    """Rows that were sent and the matrix that they are multiplied by, quantized while the rows are on their way."""
    # bits, since a conversion is in no kernel, and XLA waits for the rows where they are converted
    matrix, bits = layer.quantized_beside(linear, matrix, jax.tree.map(as_bits, rows))
    return jax.tree.map(lambda part, own: from_bits(own, part.dtype), rows, bits), matrix
