"""Unpacks MXFP4: bytes of two 4-bit numbers, with an 8-bit power of two for each 32; see `jgg.core.mxfp4`.

The four bits of a number are the sign, the exponent and the mantissa of a wider float. Put there unchanged, they make
a bfloat16 that is 2**126 times too small, subnormal where the exponent is 0. Two products bring it to its size: by
2**126, which is exact, and by the scale.
"""

import triton
import triton.language as tl

from .places import for_threads

GROUP = tl.constexpr(32)  # numbers that share a scale
_ONES_16, _MINUS_ZEROS_16 = tl.constexpr(0x7E807E80), tl.constexpr(-0x7FFF8000)  # two bfloat16: 2**126 and -0


@triton.jit
def scale_bits(scales, dtype: tl.constexpr):
    """The scales 2**(scales - 127) as float32 or, for results in bfloat16, as int32 with two bfloat16; 255 is NaN."""
    wide = scales.to(tl.int32)
    if dtype == tl.bfloat16:
        bits = (tl.maximum(wide << 7, 1 << 6) | ((wide + 1) >> 2 & 1 << 6)) * 0x10001
    else:
        bits = (tl.maximum(wide << 23, 1 << 22) | ((wide + 1) >> 8 << 22)).to(tl.float32, bitcast=True)
    return bits


@triton.jit
def float32_of(number):
    """The float32 of 4 bits, int32, by products and sums of normal numbers alone: some devices take others for zero."""
    code = number & 7
    large = ((code << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(code < 2, code.to(tl.float32) * 0.5, large)
    return tl.where(number < 8, magnitude, -magnitude)


@triton.jit
def unpack_pairs(pairs, scales, dtype: tl.constexpr):
    """The first and the second numbers in bytes, times `scale_bits` of the same shape, in `dtype`."""
    wide = pairs.to(tl.int32)
    if dtype == tl.bfloat16:
        # both numbers in one register: mantissas and exponents to bits 6 to 8 and 22 to 24, signs to bits 15 and 31
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b32 number, sign;
            mul.lo.u32 number, $2, 0x40040;
            mul.lo.u32 sign, $2, 0x1001000;
            and.b32 number, number, 0x01C001C0;
            and.b32 sign, sign, 0x80008000;
            or.b32 number, number, sign;
            fma.rn.bf16x2 number, number, $4, $5;
            fma.rn.bf16x2 number, number, $3, $5;
            mov.b32 {$0, $1}, number;
            }""",
            "=h,=h,r,r,r,r",
            [wide, scales, _ONES_16, _MINUS_ZEROS_16],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=1,
        )
    else:
        first, second = (float32_of(wide & 15) * scales).to(dtype), (float32_of(wide >> 4) * scales).to(dtype)
    return first, second


@triton.jit
def unpack_rows(pairs, scales, dtype: tl.constexpr, PRODUCTS: tl.constexpr):
    """The numbers [2 * n, columns] in bytes [n, columns], packed along the rows, with scales [n / 16, columns].

    If PRODUCTS is not 1, `for_threads` decides their places.
    """
    count: tl.constexpr = pairs.shape[0]
    columns: tl.constexpr = pairs.shape[1]
    bits = scale_bits(scales, dtype)
    bits = tl.reshape(tl.broadcast_to(bits[:, None, :], (count * 2 // GROUP, GROUP // 2, columns)), (count, columns))
    if PRODUCTS > 1:  # the two numbers of a byte share a register
        pairs, bits = for_threads(pairs, PRODUCTS, 1), for_threads(bits, PRODUCTS, 1)
    first, second = unpack_pairs(pairs, bits, dtype)
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (count * 2, columns))


@triton.jit
def unpack_kernel(
    values,
    scales,
    w,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PACKS_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Unpacks values [matrices, ROWS, COLUMNS], bytes, to w, which has two rows or two columns for each of them.

    Scales have one row for 16 rows of bytes if PACKS_ROWS, or else one column for 16 columns. The grid is (COLUMNS /
    BLOCK_COLUMNS, ROWS / BLOCK_ROWS, matrices), rounded up; both blocks are multiples of 16.
    """
    SHARE: tl.constexpr = GROUP // 2  # bytes
    matrix = tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(1) * BLOCK_ROWS, tl.program_id(0) * BLOCK_COLUMNS
    rows, columns = row + tl.arange(0, BLOCK_ROWS), column + tl.arange(0, BLOCK_COLUMNS)
    within = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    first = matrix * (ROWS * COLUMNS)
    places = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    pairs = tl.load(values + first + places, mask=within, other=0)
    dtype: tl.constexpr = w.dtype.element_ty
    scales += matrix * (ROWS * COLUMNS // SHARE)
    if PACKS_ROWS:
        groups = row // SHARE + tl.arange(0, BLOCK_ROWS // SHARE)
        mask = (groups < ROWS // SHARE)[:, None] & (columns < COLUMNS)[None, :]
        exponents = tl.load(scales + groups[:, None] * COLUMNS + columns[None, :], mask=mask, other=0)
        shape: tl.constexpr = (BLOCK_ROWS // SHARE, SHARE, BLOCK_COLUMNS)
        bits = tl.broadcast_to(scale_bits(exponents, dtype)[:, None, :], shape)
        low, high = unpack_pairs(pairs, tl.reshape(bits, (BLOCK_ROWS, BLOCK_COLUMNS)), dtype)
        places = 2 * first + 2 * rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        tl.store(w + places, low, mask=within)
        tl.store(w + places + COLUMNS, high, mask=within)
    else:
        groups = column // SHARE + tl.arange(0, BLOCK_COLUMNS // SHARE)
        mask = (rows < ROWS)[:, None] & (groups < COLUMNS // SHARE)[None, :]
        exponents = tl.load(scales + rows[:, None] * (COLUMNS // SHARE) + groups[None, :], mask=mask, other=0)
        shape: tl.constexpr = (BLOCK_ROWS, BLOCK_COLUMNS // SHARE, SHARE)
        bits = tl.broadcast_to(scale_bits(exponents, dtype)[:, :, None], shape)
        low, high = unpack_pairs(pairs, tl.reshape(bits, (BLOCK_ROWS, BLOCK_COLUMNS)), dtype)
        columns = 2 * column + tl.arange(0, 2 * BLOCK_COLUMNS)
        places = 2 * first + rows.to(tl.int64)[:, None] * (2 * COLUMNS) + columns[None, :]
        mask = (rows < ROWS)[:, None] & (columns < 2 * COLUMNS)[None, :]
        tl.store(w + places, tl.reshape(tl.join(low, high), (BLOCK_ROWS, 2 * BLOCK_COLUMNS)), mask=mask)
