"""What FP8 computes, in NumPy float64: dequantized exactly, and multiplied."""

import numpy as np

import jgg
from jgg.core.activations import ACTIVATIONS
from tests.support.oracle import group_ranges


def exactly(quantized):
    """values * scales, float64."""
    scales = np.asarray(quantized.scales, np.float64)
    for axis in (-2, -1):
        blocks, size = scales.shape[axis], quantized.shape[axis]
        scales = np.repeat(scales, size if blocks == 1 else 1 if blocks == size else 128, axis=axis)
    return np.asarray(quantized.values).astype(np.float64) * scales[..., : quantized.shape[-2], : quantized.shape[-1]]


def again(array, quantize, **options):
    """An array quantized and dequantized, float64."""
    array = np.asarray(array)
    return exactly(quantize(array.astype(np.float32) if array.dtype == np.float64 else array, **options))


def mlp(x, w_gate_up, w_down, group_sizes, gather_indices, topk_weights, dy, activation, recipe, order, **biases):
    """y and the gradients in x, w_gate_up, w_down and topk_weights of `moe_mlp` by a recipe.

    Only what the recipe quantizes, and what kernels hand on in the dtype of x, is rounded. Weights are [E, N, K], gate
    and up side by side; `order` is that in which their features were in blocks as they were quantized.
    """
    powers = {"power_of_2_scales": recipe.power_of_2_scales}
    tokens = lambda array, **own: again(array, jgg.quantize_tokens, **powers, **own)  # noqa: E731
    back = np.argsort(order)
    up, down = (again(w, jgg.quantize_weights, **powers) for w in (w_gate_up[:, order], w_down))
    up = up[:, back]
    exact_x, exact_dy = (np.asarray(array).astype(np.float64) for array in (x, dy))
    quantized_x, quantized_dy = tokens(x), tokens(dy, dtype=recipe.gradient_dtype)
    groups = [slice(rows.start, rows.stop) for rows in group_ranges(group_sizes, len(gather_indices))]
    b_up, b_down = (
        0 if bias is None else np.repeat(bias, group_sizes, axis=0)
        for bias in (biases.get("b_gate_up"), biases.get("b_down"))
    )

    def multiply(rows, matrices):
        return np.concatenate([rows[own] @ matrix for own, matrix in zip(groups, matrices, strict=True)])

    def outer(left, right):
        return np.stack([left[own].T @ right[own] for own in groups])

    token, p = gather_indices // topk_weights.shape[1], topk_weights.reshape(-1)[gather_indices, None].astype(float)
    pre = (multiply(quantized_x[token], up.swapaxes(1, 2)) + b_up).astype(x.dtype)
    out = multiply(tokens(_activation(activation, pre)[0]), down.swapaxes(1, 2)) + b_down
    z = multiply(quantized_dy[token], down).astype(x.dtype).astype(np.float64)
    hidden, backward = _activation(activation, _by_halves(pre, activation, tokens))
    d_pre = backward(p * z).astype(x.dtype)
    quantized_d = tokens(d_pre[:, order], dtype=recipe.gradient_dtype)[:, back]
    y, dx, d_weights = (np.zeros(np.shape(array)) for array in (x, x, topk_weights))
    np.add.at(y, token, p * out)
    np.add.at(dx, token, multiply(quantized_d, up))
    d_weights.reshape(-1)[gather_indices] = np.sum(hidden * z, axis=1) + np.sum(exact_dy[token] * b_down, axis=1)
    d_up, d_down = outer(d_pre.astype(np.float64), exact_x[token]), outer(p * exact_dy[token], hidden)
    return y, dx, d_up, d_down, d_weights


def _by_halves(pre, activation, tokens):
    """What is kept of the pre-activation: gate and up are quantized apart."""
    halves = 2 if ACTIVATIONS[activation].is_gated else 1
    return np.concatenate([tokens(half) for half in np.split(pre, halves, axis=1)], axis=1)


def _activation(name, pre):
    """hidden, float64, and the function from its gradient to pre's."""
    pre = np.asarray(pre).astype(np.float64)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    if name == "ungated_relu_squared":
        relu = np.maximum(pre, 0)
        return relu**2, lambda d: 2 * relu * d
    gate, up = np.split(pre, 2, axis=1)
    s = sigmoid(gate)
    slope = s * (1 + gate * (1 - s))
    return gate * s * up, lambda d: np.concatenate([d * slope * up, d * gate * s], axis=1)
