"""FP8 with block scales: what quantizes tokens and weights, and the recipe to train in it."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_dtype, as_flag, check, check_instance, check_rank
from jgg.core.gpu_target import current_target
from jgg.core.quantized import BLOCK, DTYPES, E4M3, QuantizedArray, as_bits, from_bits, scales_shape
from jgg.launching.choice import How
from jgg.products.quantize import QUANTIZE_ROWS, QUANTIZE_WEIGHTS, Quantize


def quantize_tokens(
    x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, power_of_2_scales: bool = False
) -> QuantizedArray:
    """Quantizes rows with a scale for 128 features of each, the largest magnitude over the largest of the dtype.

    A block with a NaN or an infinity becomes NaN, and no other does. Gradients do not pass.

    Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.2.

    Args:
      x: float [T, K].
      dtype: float8_e4m3fn or, with more range and fewer digits, float8_e5m2.
      power_of_2_scales: round scales up to powers of two, so that scaling rounds nothing.

    Returns: values [T, K], scales [T, K / 128].

    Raises: ValueError: x has another rank. TypeError: x is no float array, or dtype none of the two.
    """
    array, options = _checked("x", x, "[T, K]", dtype, power_of_2_scales)
    return QuantizedArray(*QUANTIZE_ROWS(How(None, current_target()), Quantize(array), **options))


def quantize_weights(
    w: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, power_of_2_scales: bool = False
) -> QuantizedArray:
    """Quantizes matrices with a scale for each block of 128 x 128, otherwise as `quantize_tokens`.

    Args:
      w: float [E, N, K] or [E, K, N].
      dtype, power_of_2_scales: as in `quantize_tokens`.

    Returns: values in the shape of w, scales [E, N / 128, K / 128] or [E, K / 128, N / 128].

    Raises: as `quantize_tokens`.
    """
    array, options = _checked("w", w, "[E, N, K] or [E, K, N]", dtype, power_of_2_scales)
    return QuantizedArray(
        *QUANTIZE_WEIGHTS(How(None, current_target()), Quantize(array), keeps=True, turns=False, **options)
    )


def _checked(name, array, expected, dtype, power_of_2_scales):
    array = jax.lax.stop_gradient(as_array(name, array))
    check_rank(name, array, expected)
    as_dtype(f"{name}.dtype", array.dtype)
    options = {
        "dtype": as_dtype("dtype", dtype, DTYPES),
        "power_of_2_scales": as_flag("power_of_2_scales", power_of_2_scales),
    }
    return array, options


class WeightForms(NamedTuple):
    """Weights in FP8: as they are, and with rows and columns exchanged.

    FP8 products on Hopper read both operands along the reduced axis, so that forward and dX need one each.
    """

    straight: QuantizedArray | None
    turned: QuantizedArray | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights together with what they are in FP8, made by `Fp8.weights`; a pytree.

    `moe_mlp` multiplies by what is quantized, and its gradient in the weights is that of `array`. To quantize once for
    several microbatches, differentiate in w with `dataclasses.replace(weights, array=w)`.

    Attributes:
      array: [E, rows, columns].
      forms: the same in FP8, twice: as it is, and with rows and columns exchanged.
    """

    array: jax.Array
    forms: WeightForms


@dataclasses.dataclass(frozen=True)
class Fp8:
    """The recipe of `quantization=`: forward and dX multiply in FP8, dW in the dtype of the weights.

    What is multiplied gets scales from its own values: one for 128 features of a token, of its hidden features or of a
    gradient, one for 128 x 128 of a weight. Products are summed in float32, promoted every 128. Quantization passes
    gradients straight through. For the backward pass the pre-activation is kept in FP8.

    Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.

    Attributes:
      gradient_dtype: of quantized gradients, float8_e4m3fn or float8_e5m2; all else is float8_e4m3fn.
      power_of_2_scales: round scales up to powers of two, so that scaling rounds nothing.
      keeps_weights: quantize weights once for both passes, which is faster and keeps a byte a weight for the backward
        pass; otherwise each pass quantizes what it needs.

    Raises: TypeError: gradient_dtype is neither of the two, or an option is no bool.
    """

    gradient_dtype: DTypeLike = jnp.float8_e4m3fn
    power_of_2_scales: bool = False
    keeps_weights: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradient_dtype", as_dtype("gradient_dtype", self.gradient_dtype, DTYPES))
        object.__setattr__(self, "power_of_2_scales", as_flag("power_of_2_scales", self.power_of_2_scales))
        object.__setattr__(self, "keeps_weights", as_flag("keeps_weights", self.keeps_weights))

    def weights(self, w: ArrayLike) -> QuantizedWeights:
        """Quantizes weights [E, N, K] or [E, K, N], to be used more than once.

        Policies of `jax.checkpoint` know what is quantized as "jgg_fp8_weights".

        Raises: ValueError: w has another rank. TypeError: w is no float array.
        """
        return _quantize_once("w", w, self)


def _quantize_once(name: str, w: object, recipe: Fp8) -> QuantizedWeights:
    array, options = _checked(name, w, "[E, N, K] or [E, K, N]", E4M3, recipe.power_of_2_scales)
    how = How(None, current_target())
    results = QUANTIZE_WEIGHTS(how, Quantize(array), keeps=True, turns=True, **options)
    values, scales, turned = map(_named, results)
    forms = WeightForms(QuantizedArray(values, scales), QuantizedArray(turned, scales.mT))
    return QuantizedWeights(as_array(name, w), forms)


def _named(array: jax.Array) -> jax.Array:
    """As policies of `jax.checkpoint` know it; numbers in FP8 as bits.

    What is kept of floats, JAX puts through `reduce_precision`, by which float8_e4m3fn's from 256 on are infinite.
    """
    return from_bits(checkpoint_name(as_bits(array), "jgg_fp8_weights"), array.dtype)


def check_quantization(quantization: Fp8 | None) -> None:
    """Raises TypeError for what is no recipe."""
    if quantization is not None:
        check_instance("quantization", quantization, Fp8, "a jgg.Fp8 or None")


def as_quantized_weights(name: str, value: object, quantization: Fp8 | None, x: ArrayLike) -> QuantizedWeights | None:
    """Weights that are in FP8 before the first pass needs them, or None.

    A QuantizedArray of blocks of 128 x 128 is turned, which copies it; one of other blocks is quantized again. Their
    array is what they dequantize to, without a gradient.

    Raises: ValueError: QuantizedWeights are given without quantization, or their array has another shape than what is
      quantized. TypeError: values are not in FP8.
    """
    if isinstance(value, QuantizedWeights):
        if quantization is None:
            raise ValueError(f"{name} must be an array or a QuantizedArray without quantization, got QuantizedWeights.")
        assert value.forms.straight is not None
        shape, own = value.forms.straight.shape, jnp.shape(value.array)
        check(own == shape, f"{name}.array must be {list(shape)}, as what is quantized, got {list(own)}.")
        return value
    if quantization is None:
        return None
    if not isinstance(value, QuantizedArray):
        return _quantize_once(name, value, quantization) if quantization.keeps_weights else None
    as_dtype(f"{name}.values", value.values.dtype, DTYPES)
    array = jax.lax.stop_gradient(value.dequantize(as_array("x", x).dtype))
    if value.scales.shape != scales_shape(value.shape, (BLOCK, BLOCK)):
        return _quantize_once(name, array, quantization)
    return QuantizedWeights(array, WeightForms(value, value.mT))
