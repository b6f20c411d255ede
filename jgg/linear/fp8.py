"""FP8 and MXFP4: functions that quantize tokens and weights, and `Fp8`, the recipe for training in FP8."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jgg.core.arguments import as_array, as_dtype, as_flag, check, check_instance, check_rank
from jgg.core.gpu_target import current_target
from jgg.core.mxfp4 import GROUP, pack
from jgg.core.quantized import (
    BLOCK,
    DTYPES,
    Format,
    QuantizedArray,
    QuantizedWeights,
    WeightForms,
    as_bits,
    from_bits,
)
from jgg.launching.choice import How
from jgg.products.quantize import QUANTIZE_ROWS, QUANTIZE_WEIGHTS, Quantize, QuantizedMatrices


def quantize_tokens(
    x: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, power_of_2_scales: bool = False
) -> QuantizedArray:
    """Quantizes rows with one scale for every 128 features of a row.

    The scale is the largest magnitude among these features, divided by the largest number of the dtype. A block with a
    NaN or an infinity becomes NaN; other blocks do not. Gradients do not flow through.

    Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.2.

    Args:
      x: float [T, K].
      dtype: float8_e4m3fn or, with more range and fewer digits, float8_e5m2.
      power_of_2_scales: round scales up to powers of two, so that scaling rounds nothing.

    Returns: a QuantizedArray of values [T, K] and float32 scales [T, K / 128].

    Raises: ValueError: x has another rank. TypeError: x is not a float array, or dtype is neither of the two.
    """
    stored_as = _format(dtype, power_of_2_scales)
    return QUANTIZE_ROWS(How(None, current_target()), Quantize(_checked("x", x, "[T, K]")), stored_as=stored_as)


def quantize_weights(
    w: ArrayLike, dtype: DTypeLike = jnp.float8_e4m3fn, *, power_of_2_scales: bool = False
) -> QuantizedArray:
    """Quantizes matrices like `quantize_tokens`, but with one scale per block of 128 x 128.

    Args:
      w: float [E, N, K] or [E, K, N].
      dtype, power_of_2_scales: as in `quantize_tokens`.

    Returns: a QuantizedArray of values in the shape of w and float32 scales [E, N / 128, K / 128] or
      [E, K / 128, N / 128].

    Raises: as `quantize_tokens`; ValueError: Explicit mesh axes split a block.
    """
    straight = _quantized_matrices("w", w, _format(dtype, power_of_2_scales), transposes=False).forms.straight
    assert straight is not None
    return straight


def quantize_mxfp4(w: ArrayLike) -> QuantizedArray:
    """Quantizes matrices to MXFP4: 4 bits a number, and 8 bits for 32 rows of a column, as gpt-oss's experts have.

    A number becomes the nearest one of its scale, of two equally near ones the even one. A scale is the power of two
    with the least squared error. 32 numbers with a NaN or an infinity become NaN. Numbers that are in MXFP4 already do
    not change. Gradients do not flow through.

    Source: OCP Microscaling Formats (MX) Specification 1.0, which takes the largest scale of the three looked at here
    that does not exceed the largest number.

    Args:
      w: float [E, rows, columns], with a multiple of 32 rows. In layers with `w_layout="ekn"` rows are the features
        that a product sums over.

    Returns: a QuantizedArray of values uint8 [E, rows / 2, columns] and scales uint8 [E, rows / 32, columns].

    Raises:
      ValueError: w has another rank or number of rows, or Explicit mesh axes split 32 rows.
      TypeError: w is not a float array.
    """
    w = _checked("w", w, "[E, K, N]")
    check(w.shape[1] % GROUP == 0, f"w must have a multiple of {GROUP} rows, got {list(w.shape)}.")
    split = jax.typeof(w).sharding  # over Explicit axes of a mesh
    if not any(split.spec):
        return QuantizedArray(*pack(w, -2))
    _check_parts("w", w, split, axes=(1,), block=GROUP)
    pack_part = jax.shard_map(lambda w: pack(w, -2), mesh=split.mesh, in_specs=split.spec, out_specs=split.spec)
    return QuantizedArray(*pack_part(w))


def _checked(name: str, array: object, expected: str) -> jax.Array:
    array = jax.lax.stop_gradient(as_array(name, array))
    check_rank(name, array, expected)
    as_dtype(f"{name}.dtype", array.dtype)
    return array


def _format(dtype: DTypeLike, power_of_2_scales: object) -> Format:
    return Format(as_dtype("dtype", dtype, DTYPES), as_flag("power_of_2_scales", power_of_2_scales))


def _quantized_matrices(name: str, w: object, stored_as: Format, transposes: bool) -> QuantizedMatrices:
    w = _checked(name, w, "[E, N, K] or [E, K, N]")

    def quantized(w: jax.Array) -> QuantizedMatrices:
        how = How(None, current_target())
        return QUANTIZE_WEIGHTS(how, Quantize(w), stored_as=stored_as, keeps=True, transposes=transposes)

    split = jax.typeof(w).sharding  # over Explicit axes of a mesh
    if not any(split.spec):
        return quantized(w)
    _check_parts(name, w, split, axes=(1, 2), block=BLOCK)
    experts, rows, columns = split.spec
    transposed = jax.P(experts, columns, rows) if transposes else None
    specs = QuantizedMatrices(split.spec, split.spec, transposed)  # type: ignore[arg-type]
    return jax.shard_map(quantized, mesh=split.mesh, in_specs=split.spec, out_specs=specs)(w)


def _check_parts(name: str, w: jax.Array, split: jax.NamedSharding, *, axes: tuple[int, ...], block: int) -> None:
    """Raises ValueError if devices have parts of a block of w, which begins at multiples of `block` along the axes."""
    part = split.shard_shape(w.shape)
    for axis in axes:
        check(
            part[axis] == w.shape[axis] or part[axis] % block == 0,
            f"{name} must have a multiple of {block} along axis {axis} on each device, got {list(part)}.",
        )


@dataclasses.dataclass(frozen=True)
class Fp8:
    """The recipe of `quantization=`: forward and dX multiply in FP8, dW in the dtype of x.

    Each factor gets scales from its own values: one scale for 128 features of a token, of its hidden features or of a
    gradient, and one for 128 x 128 entries of a weight. Products are summed in float32, promoted every 128 features.
    Quantization passes gradients straight through. For the backward pass the pre-activation is kept in FP8. Tokens and
    gradients that are sent to experts on other devices are quantized first, and dW then reads the quantized values.

    Source: DeepSeek-V3 Technical Report (arXiv 2412.19437), 3.3.

    Attributes:
      gradient_dtype: dtype of quantized gradients, float8_e4m3fn or float8_e5m2; all other values are float8_e4m3fn.
      power_of_2_scales: round scales up to powers of two, so that scaling rounds nothing.
      keeps_weights: quantize weights once for both passes, which is faster but keeps a byte per weight for the backward
        pass. Otherwise each pass quantizes what it needs, except weights wider than x, which are read only once.

    Raises: TypeError: gradient_dtype is neither of the two, or an option is not a bool.
    """

    gradient_dtype: DTypeLike = jnp.float8_e4m3fn
    power_of_2_scales: bool = False
    keeps_weights: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "gradient_dtype", as_dtype("gradient_dtype", self.gradient_dtype, DTYPES))
        object.__setattr__(self, "power_of_2_scales", as_flag("power_of_2_scales", self.power_of_2_scales))
        object.__setattr__(self, "keeps_weights", as_flag("keeps_weights", self.keeps_weights))

    @property
    def format(self) -> Format:
        """How everything but gradients is quantized."""
        return Format(power_of_2_scales=self.power_of_2_scales)

    @property
    def gradient_format(self) -> Format:
        """How gradients are quantized."""
        return Format(jnp.dtype(self.gradient_dtype), self.power_of_2_scales)

    def weights(self, w: ArrayLike) -> QuantizedWeights:
        """Quantizes weights [E, N, K] or [E, K, N] once, for several uses.

        `jax.checkpoint` policies know the FP8 weights as "jgg_fp8_weights".

        Raises: ValueError: w has another rank, or Explicit mesh axes split a block. TypeError: w is not a float array.
        """
        return quantize_once("w", w, self)


def quantize_once(name: str, w: object, recipe: Fp8) -> QuantizedWeights:
    """Weights together with both of their FP8 forms. Arguments are as in `Fp8.weights`, plus a name for messages."""
    matrices = jax.tree.map(named, _quantized_matrices(name, w, recipe.format, transposes=True))
    return QuantizedWeights(as_array(name, w), matrices.forms)


def both_forms(how: How, w: jax.Array, stored_as: Format) -> WeightForms:
    """Quantizes a device's weights [E, N, K] or [E, K, N], straight and transposed, reading them only once."""
    matrices = QUANTIZE_WEIGHTS(how, Quantize(w), stored_as=stored_as, keeps=True, transposes=True)
    return jax.tree.map(named, matrices).forms


def named(array: jax.Array, name: str = "jgg_fp8_weights") -> jax.Array:
    """Names an array for `jax.checkpoint` policies; for an FP8 array, the name is given to its bits.

    Otherwise JAX would pass kept floats through `reduce_precision`, which turns float8_e4m3fn values of 256 and more
    into inf.
    """
    return from_bits(checkpoint_name(as_bits(array), name), array.dtype)


def check_quantization(quantization: Fp8 | None) -> None:
    """Raises TypeError unless `quantization` is an `Fp8` or None."""
    if quantization is not None:
        check_instance("quantization", quantization, Fp8, "a jgg.Fp8 or None")
