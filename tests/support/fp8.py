"""What FP8 computes, in NumPy float64: dequantized exactly, and multiplied."""

import numpy as np

import jgg
from jgg.activations import ACTIVATIONS
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
    dtype, topk = x.dtype, topk_weights.shape[1]
    powers = {"power_of_2_scales": recipe.power_of_2_scales}
    tokens = lambda array, **own: again(array, jgg.quantize_tokens, **powers, **own)  # noqa: E731
    back = np.argsort(order)
    up, down = (again(w, jgg.quantize_weights, **powers) for w in (w_gate_up[:, order], w_down))
    up = up[:, back]
    b_up, b_down = (biases.get(name) for name in ("b_gate_up", "b_down"))
    quantized_x, quantized_dy = tokens(x), tokens(dy, dtype=recipe.gradient_dtype)
    exact_x, exact_dy = (np.asarray(array).astype(np.float64) for array in (x, dy))
    results = [np.zeros(np.shape(array)) for array in (x, x, w_gate_up, w_down, topk_weights)]
    y, dx, d_up, d_down, d_weights = results
    for expert, rows in enumerate(group_ranges(group_sizes, len(gather_indices))):
        if not len(rows):
            continue
        positions = gather_indices[rows.start : rows.stop]
        token, p = positions // topk, topk_weights.reshape(-1)[positions, None].astype(np.float64)
        pre = quantized_x[token] @ up[expert].T + (0 if b_up is None else b_up[expert])
        hidden = tokens(
            _activation(activation, pre.astype(dtype))[0],
        )
        out = hidden @ down[expert].T + (0 if b_down is None else b_down[expert])
        np.add.at(y, token, p * out)
        z = (quantized_dy[token] @ down[expert]).astype(dtype).astype(np.float64)
        kept = _by_halves(pre.astype(dtype), activation, tokens)
        hidden, backward = _activation(activation, kept)
        d_pre = backward(p * z).astype(dtype)
        quantized_d = again(d_pre[:, order], jgg.quantize_tokens, dtype=recipe.gradient_dtype, **powers)[:, back]
        np.add.at(dx, token, quantized_d @ up[expert])
        d_up[expert] = d_pre.astype(np.float64).T @ exact_x[token]
        d_down[expert] = (p * exact_dy[token]).T @ hidden
        sums = np.sum(hidden * z, axis=1)
        if b_down is not None:
            sums += exact_dy[token] @ b_down[expert]
        d_weights.reshape(-1)[positions] = sums
    return results


def _by_halves(pre, activation, tokens):
    """What is kept of the pre-activation: gate and up are quantized apart."""
    halves = 2 if ACTIVATIONS[activation].is_gated else 1
    return np.concatenate([tokens(half) for half in np.split(pre, halves, axis=1)], axis=1)


def _activation(name, pre):
    """hidden, float64, and the function from its gradient to that of pre."""
    pre = np.asarray(pre).astype(np.float64)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    if name == "ungated_relu_squared":
        relu = np.maximum(pre, 0)
        return relu**2, lambda d: 2 * relu * d
    gate, up = np.split(pre, 2, axis=1)
    s = sigmoid(gate)
    slope = s * (1 + gate * (1 - s))
    return gate * s * up, lambda d: np.concatenate([d * slope * up, d * gate * s], axis=1)
