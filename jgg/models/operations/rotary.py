"""The rotary embedding of queries and keys, after the norm of each head where there is one, and its derivative."""

import math
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import Target
from jgg.core.problem import MAX_ROWS
from jgg.extend import How, Launch, Launcher, Operation, array_type, power_of_2, tiles_of, vmap
from jgg.models.operations.norm import rms_norm

_MOST_PAIRS = 1024  # of a head that kernels take
_MOST_OF_REST = 4 * _MOST_PAIRS  # features that are not rotated, of the heads that a program takes at once


class Rotary(NamedTuple):
    """Queries and keys, and the angles for rotating their heads.

    Attributes:
      q, k: [T, heads * D] and [T, kv heads * D], in one dtype.
      q_scale, k_scale: [D], factors of the features after each head's RMS norm; None for both without a norm.
      cos, sin: float32 [S, pairs] of S positions; token t has those of t modulo S.
    """

    q: jax.Array
    k: jax.Array
    q_scale: jax.Array | None
    k_scale: jax.Array | None
    cos: jax.Array
    sin: jax.Array


class Rotated(NamedTuple):
    """The rotated queries and keys, in the shapes and dtypes of q and k."""

    q: jax.Array
    k: jax.Array


class RotaryBackward(NamedTuple):
    """The operands of the derivative of ROTARY.

    Attributes:
      q, k, q_scale, k_scale, cos, sin: as in Rotary; q and k are None without a norm.
      dq, dk: the gradients of the results.
    """

    q: jax.Array | None
    k: jax.Array | None
    q_scale: jax.Array | None
    k_scale: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    dq: jax.Array
    dk: jax.Array


class RotaryGradients(NamedTuple):
    """The gradients of q and k, in their dtype, and of their scales, float32 [D], or None."""

    dq: jax.Array
    dk: jax.Array
    d_q_scale: jax.Array | None
    d_k_scale: jax.Array | None


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs of features of x [..., D] in plain JAX; the rotated features' halves have one of each pair.

    The angles, [..., pairs] in the dtype of x, have the rank of x. Source: Su et al., RoFormer, 2021.
    """
    a, b, rest = jnp.split(x, [cos.shape[-1], 2 * cos.shape[-1]], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _types(operands: Rotary, **_: object) -> Rotated:
    return Rotated(*(array_type(array.shape, array.dtype) for array in (operands.q, operands.k)))


def _plain(operands: Rotary, head_features: int, epsilon: float) -> Rotated:
    q, k, q_scale, k_scale, *angles = operands

    def one(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        num_positions = angles[0].shape[0]
        heads = x.reshape(-1, num_positions, x.shape[1] // head_features, head_features).astype(jnp.float32)
        heads = heads if scale is None else rms_norm(heads, scale, epsilon)
        return rotate(heads, *(part[None, :, None] for part in angles)).astype(x.dtype).reshape(x.shape)

    return Rotated(one(q, q_scale), one(k, k_scale))


def _constants(
    target: Target, q: jax.Array, k: jax.Array, cos: jax.Array, head_features: int, epsilon: float
) -> dict[str, int | float]:
    pairs = cos.shape[1]
    block_pairs, block_rest = power_of_2(pairs), power_of_2(max(1, head_features - 2 * pairs))
    rows = min(tiles_of("rotary_kernel", target)["pairs"] // block_pairs, _MOST_OF_REST // block_rest)
    return {
        "HEADS_Q": q.shape[1] // head_features,
        "HEADS_K": k.shape[1] // head_features,
        "D": head_features,
        "PAIRS": pairs,
        "EPSILON": epsilon,
        "BLOCK_ROWS": max(1, rows),
        "BLOCK_PAIRS": block_pairs,
        "BLOCK_REST": block_rest,
    }


def _blocks(num_tokens: int, constants: Mapping[str, int | float]) -> tuple[int, int]:
    """The blocks of rows of queries and of keys."""
    heads = constants["HEADS_Q"], constants["HEADS_K"]
    of_q, of_k = (math.ceil(num_tokens * count / constants["BLOCK_ROWS"]) for count in heads)
    return of_q, of_k


def _fits(num_tokens: int, constants: Mapping[str, int | float]) -> bool:
    is_small = num_tokens * max(constants["HEADS_Q"], constants["HEADS_K"]) <= MAX_ROWS
    return is_small and constants["BLOCK_REST"] <= _MOST_OF_REST and constants["PAIRS"] <= _MOST_PAIRS


def _launch(launcher: Launcher, operands: Rotary, head_features: int, epsilon: float) -> Rotated:
    from jgg.kernels.rotary import rotary_kernel

    q, k, cos = operands.q, operands.k, operands.cos
    constants = _constants(launcher.target, q, k, cos, head_features, epsilon)
    if not _fits(q.shape[0], constants):
        return _plain(operands, head_features, epsilon)
    types = _types(operands)
    launch = Launch(
        operands={**operands._asdict(), "num_tokens": q.shape[0], "num_positions": cos.shape[0]},
        outputs={"rotated_q": types.q, "rotated_k": types.k},
        constants=constants,
        grid=(sum(_blocks(q.shape[0], constants)),),
        flops=8 * (q.size + k.size),
        bytes_accessed=2 * (q.size + k.size) * q.dtype.itemsize,
    )
    results = launcher.run(rotary_kernel, launch)
    return Rotated(results["rotated_q"], results["rotated_k"])


def _merge_batch(how: How, operands: Rotary, batched: Rotary, **parameters: Hashable) -> Rotated | None:
    is_angle_batched = batched.cos or batched.sin
    one_each = operands.cos.shape[-2] == operands.q.shape[-2]
    if batched.q_scale or batched.k_scale or (is_angle_batched and not one_each):
        return None
    size = vmap.batch_size(operands, batched)
    names = ("q", "k", "cos", "sin") if is_angle_batched else ("q", "k")
    merged = {n: vmap.flat(vmap.for_each(getattr(operands, n), getattr(batched, n), size)) for n in names}
    results = ROTARY(how, operands._replace(**merged), **parameters)
    return jax.tree.map(lambda result: result.reshape(size, -1, result.shape[1]), results)


ROTARY: Operation[Rotated] = Operation(
    "rotary",
    Rotary,
    result_types=_types,
    plain=_plain,
    launch=_launch,
    vmap=_merge_batch,
)
"""Queries and keys whose heads are normalized, where they have scales, and rotated, as Rotated.

Its parameters are head_features, D, and epsilon, which the norm adds to the mean square. Results are rounded once.
"""


def _backward_types(operands: RotaryBackward, **_: object) -> RotaryGradients:
    dq, dk = (array_type(array.shape, array.dtype) for array in (operands.dq, operands.dk))
    scales = (
        None if scale is None else array_type(scale.shape, jnp.float32)
        for scale in (operands.q_scale, operands.k_scale)
    )
    return RotaryGradients(dq, dk, *scales)


def _backward_plainly(operands: RotaryBackward, head_features: int, epsilon: float) -> RotaryGradients:
    q, k, q_scale, k_scale, cos, sin, dq, dk = operands
    x = [jnp.zeros(dx.shape, jnp.float32) if x is None else x.astype(jnp.float32) for x, dx in ((q, dq), (k, dk))]
    scales = jax.tree.map(lambda scale: scale.astype(jnp.float32), (q_scale, k_scale))

    def forward(q: jax.Array, k: jax.Array, scales: tuple[jax.Array | None, jax.Array | None]) -> Rotated:
        return _plain(Rotary(q, k, *scales, cos, sin), head_features, epsilon)

    _, vjp = jax.vjp(forward, *x, scales)
    gradient_q, gradient_k, d_scales = vjp(Rotated(dq.astype(jnp.float32), dk.astype(jnp.float32)))
    return RotaryGradients(gradient_q.astype(dq.dtype), gradient_k.astype(dk.dtype), *d_scales)


def _launch_backward(
    launcher: Launcher, operands: RotaryBackward, head_features: int, epsilon: float
) -> RotaryGradients:
    from jgg.kernels.rotary import rotary_backward_kernel

    types, cos = _backward_types(operands), operands.cos
    (num_tokens, _), num_positions = types.dq.shape, cos.shape[0]
    constants = _constants(launcher.target, operands.dq, operands.dk, cos, head_features, epsilon)
    if not _fits(num_tokens, constants):
        return _backward_plainly(operands, head_features, epsilon)
    given = operands._asdict()
    given |= {"d_rotated_q": given.pop("dq"), "d_rotated_k": given.pop("dk")}
    outputs = {"dq": types.dq, "dk": types.dk}
    parts = dict(zip(("d_q_scale", "d_k_scale"), _blocks(num_tokens, constants), strict=True))
    if operands.q_scale is None:
        given |= dict.fromkeys(parts)
    else:
        outputs |= {name: array_type((count, head_features), jnp.float32) for name, count in parts.items()}
    launch = Launch(
        operands={**given, "num_tokens": num_tokens, "num_positions": num_positions},
        outputs=outputs,
        constants=constants,
        grid=(sum(parts.values()),),
        flops=20 * (types.dq.size + types.dk.size),
        bytes_accessed=(2 if operands.q is None else 3) * (types.dq.size + types.dk.size) * types.dq.dtype.itemsize,
    )
    results = launcher.run(rotary_backward_kernel, launch)
    d_q_scale, d_k_scale = (jnp.sum(results[name], axis=0) if name in results else None for name in parts)
    return RotaryGradients(results["dq"], results["dk"], d_q_scale, d_k_scale)


ROTARY_BACKWARD: Operation[RotaryGradients] = Operation(
    "rotary_backward",
    RotaryBackward,
    result_types=_backward_types,
    plain=_backward_plainly,
    launch=_launch_backward,
)
"""The gradients of ROTARY, as RotaryGradients, with its parameters.

The kernel adds up the gradients of scales in blocks of rows, which are summed last, as NORM_BACKWARD's does.
"""
