"""Sends rows between devices in FP8, quantized once for the layer that multiplies them on arrival."""

import jax

from jgg.core.matrix import Matrix
from jgg.core.quantized import QuantizedArray, as_bits, from_bits
from jgg.experts.exchange import Exchange
from jgg.linear import layer
from jgg.linear.linear import Linear, Rows
from jgg.products.quantize import QUANTIZE_ROWS, Quantize


def sends_fp8(exchange: Exchange | None, linear: Linear) -> bool:
    """Whether a layer's rows are quantized before they are sent: they go to other devices, and it has a recipe."""
    return exchange is not None and exchange.num_devices > 1 and linear.row_format is not None


def sent(linear: Linear, rows: jax.Array, exchange: Exchange) -> QuantizedArray:
    """Quantizes rows of this device's tokens once, as the layer reads them, and sends them to the experts' devices."""
    assert linear.row_format is not None
    quantized = QUANTIZE_ROWS(linear.how, Quantize(rows), stored_as=linear.row_format)
    return jax.tree.map(exchange.there, quantized)


def beside_quantization(linear: Linear, rows: Rows, matrix: Matrix) -> tuple[Rows, Matrix]:
    """The sent rows and the matrix that multiplies them, which is quantized while the rows are in transit."""
    # bits, since a conversion is in no kernel, and XLA waits for the rows where they are converted
    matrix, bits = layer.quantized_beside(linear, matrix, jax.tree.map(as_bits, rows))
    return jax.tree.map(lambda part, own: from_bits(own, part.dtype), rows, bits), matrix
