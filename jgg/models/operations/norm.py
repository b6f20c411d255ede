"""RMS norm of rows, with what is added to them before, and its derivative; each makes one pass over memory."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.extend import WHOLE, Launch, Launcher, Letters, Operation, array_type, power_of_2, tiles_of

_LONGEST = 2**14  # columns that a program holds; with more it would spill registers
_LONGEST_BACKWARD = 2**13
_EACH = "t" + WHOLE


class Norm(NamedTuple):
    """Rows to normalize.

    Attributes:
      x: [T, H].
      added: [T, H] in the dtype of x, what is added to x before, times the parameter `added_scale`; or None.
      scale: [H], the factor of each column.
    """

    x: jax.Array
    added: jax.Array | None
    scale: jax.Array


class Normalized(NamedTuple):
    """Normalized rows.

    Attributes:
      total: x + added_scale * added, [T, H] in the dtype of x; None without `added`.
      y: its RMS norm times scale, in the same shape and dtype.
    """

    total: jax.Array | None
    y: jax.Array


class NormBackward(NamedTuple):
    """The operands of the norm's derivative.

    Attributes:
      x: [T, H], what was normalized, after the addition.
      scale: [H].
      dy: [T, H], the gradient of y.
      d_total: [T, H], the gradient of x on its other ways, which is added to the result; or None.
    """

    x: jax.Array
    scale: jax.Array
    dy: jax.Array
    d_total: jax.Array | None


class NormGradients(NamedTuple):
    """The gradients of x, [T, H] in its dtype, and of scale, float32 [H]."""

    dx: jax.Array
    d_scale: jax.Array


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm of the last axis in plain JAX, computed in float32. Source: Zhang and Sennrich, 2019."""
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    return (y * jnp.broadcast_to(scale.astype(jnp.float32), y.shape)).astype(x.dtype)


def _types(operands: Norm, **_: object) -> Normalized:
    like = array_type(operands.x.shape, operands.x.dtype)
    return Normalized(None if operands.added is None else like, like)


def _plain(operands: Norm, epsilon: float, added_scale: float = 1.0) -> Normalized:
    x, added, scale = operands
    if added is None:
        return Normalized(None, rms_norm(x, scale, epsilon))
    total = (x.astype(jnp.float32) + added_scale * added.astype(jnp.float32)).astype(x.dtype)
    return Normalized(total, rms_norm(total, scale, epsilon))


def _launch(launcher: Launcher, operands: Norm, epsilon: float, added_scale: float = 1.0) -> Normalized:
    from jgg.kernels.norm import norm_kernel

    x, num_columns = operands.x, operands.x.shape[1]
    if num_columns > _LONGEST:
        return _plain(operands, epsilon, added_scale)
    block, tiles = power_of_2(num_columns), tiles_of("norm_kernel", launcher.target)
    results = {name: result for name, result in _types(operands)._asdict().items() if result is not None}
    launch = Launch(
        operands={**operands._asdict(), **dict.fromkeys({"total"} - results.keys())},
        outputs=results,
        constants={
            "COLUMNS": num_columns,
            "EPSILON": epsilon,
            "ADDED_SCALE": added_scale,
            "BLOCK_COLUMNS": block,
        },
        grid=(x.shape[0],),
        num_warps=max(1, block // tiles["columns_of_warp"], min(8, block // tiles["columns_of_few_warps"])),
        flops=5 * x.size,
        bytes_accessed=2 * len(results) * x.size * x.dtype.itemsize,
    )
    written = launcher.run(norm_kernel, launch)
    return Normalized(written.get("total"), written["y"])


NORM: Operation[Normalized] = Operation(
    "norm", Norm, result_types=_types, plain=_plain, launch=_launch, vmap="rows", mesh="rows", shared=("scale",)
)
"""The RMS norm of each row, as Normalized.

Its parameters are epsilon, which is added to the mean square, and added_scale, the factor of what is added to x.
"""


def _backward_types(operands: NormBackward, **_: object) -> NormGradients:
    x = operands.x
    return NormGradients(array_type(x.shape, x.dtype), array_type(x.shape[1:], jnp.float32))


def _backward_plainly(operands: NormBackward, epsilon: float) -> NormGradients:
    x, scale, dy, d_total = (None if array is None else array.astype(jnp.float32) for array in operands)
    _, vjp = jax.vjp(functools.partial(rms_norm, epsilon=epsilon), x, scale)
    dx, d_scale = vjp(dy)
    return NormGradients((dx if d_total is None else dx + d_total).astype(operands.x.dtype), d_scale)


def _launch_backward(launcher: Launcher, operands: NormBackward, epsilon: float) -> NormGradients:
    from jgg.kernels.norm import norm_backward_kernel

    num_rows, num_columns = operands.x.shape
    if num_columns > _LONGEST_BACKWARD:
        return _backward_plainly(operands, epsilon)
    block, tiles = power_of_2(num_columns), tiles_of("norm_backward_kernel", launcher.target)
    rows = max(1, min(tiles["rows"], num_rows // tiles["programs"]))
    programs = math.ceil(num_rows / rows)
    types = _backward_types(operands)
    arrays = [array for array in operands if array is not None and array.ndim == 2]
    launch = Launch(
        operands={**operands._asdict(), "num_rows": num_rows},
        outputs={"dx": types.dx, "d_scale": jax.ShapeDtypeStruct((programs, num_columns), jnp.float32)},
        constants={"COLUMNS": num_columns, "EPSILON": epsilon, "ROWS": rows, "BLOCK_COLUMNS": block},
        grid=(programs,),
        num_warps=min(32, max(1, block // tiles["columns_of_warp"])),
        flops=12 * operands.x.size,
        bytes_accessed=(1 + len(arrays)) * types.dx.size * types.dx.dtype.itemsize,
    )
    results = launcher.run(norm_backward_kernel, launch)
    return NormGradients(results["dx"], jnp.sum(results["d_scale"], axis=0))


def _backward_letters(operands: NormBackward, **_: object) -> Letters:
    letters = {"x": _EACH, "scale": WHOLE, "dy": _EACH, "d_total": _EACH}
    return Letters(letters, (_EACH, WHOLE), ("", "t"))


NORM_BACKWARD: Operation[NormGradients] = Operation(
    "norm_backward",
    NormBackward,
    result_types=_backward_types,
    plain=_backward_plainly,
    launch=_launch_backward,
    mesh=_backward_letters,
)
"""The gradients of NORM, as NormGradients; the parameter is epsilon.

The kernel computes the reciprocal root again. It adds up the gradient of scale in blocks of rows, which are summed
last: where nothing uses that gradient, that sum is dead code.
"""
