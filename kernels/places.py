"""The order in which tensor cores add up features where one operand is loaded in fewer bits than the other.

The instructions that take operands from registers (`mma`) multiply 16 features of 16 bits at a time. Of each 16, the
first of four threads holds features 0, 1, 8 and 9, the second 2, 3, 10 and 11. If an operand is loaded in 8 bits,
Triton gives a thread as many features that follow each other as fill a register, and several products take two of
them each: PRODUCTS of them, 2 for FP8, 2 or 4 where a byte has two numbers. Other features would then be added up
together than for operands of 16 bits, and the sum would have other bits. So the features of both operands change
places, such that each product gets those that it would get of operands of 16 bits. Of float32, a thread's register of
32 bits has one feature instead of two.

Which way Triton goes was read from what it compiles; `tests/products/test_invariance.py` compares the bits on a GPU.
"""

import triton
import triton.language as tl


@triton.jit
def for_threads(rows, PRODUCTS: tl.constexpr, SHARE: tl.constexpr):
    """Exchanges the places of rows [n, columns], the features of w; SHARE of them share a register's 32 bits."""
    count: tl.constexpr = rows.shape[0]
    columns: tl.constexpr = rows.shape[1]
    GROUP: tl.constexpr = PRODUCTS * 8 * SHARE
    tl.static_assert(count % GROUP == 0)
    places = tl.permute(tl.reshape(rows, (count // GROUP, PRODUCTS, 2, 4, SHARE, columns)), (0, 2, 3, 1, 4, 5))
    return tl.reshape(places, (count, columns))


@triton.jit
def for_threads_of_x(x, PRODUCTS: tl.constexpr, SHARE: tl.constexpr):
    """The features of rows of x [rows, n], placed like `for_threads` places the rows of w."""
    rows: tl.constexpr = x.shape[0]
    count: tl.constexpr = x.shape[1]
    GROUP: tl.constexpr = PRODUCTS * 8 * SHARE
    places = tl.permute(tl.reshape(x, (rows, count // GROUP, PRODUCTS, 2, 4, SHARE)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(places, (rows, count))
