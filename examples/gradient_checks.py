"""Checks gradients of grouped GEMMs by `jax.test_util.check_grads`, and against a float64 loop over the experts.

    python examples/gradient_checks.py                       # plain JAX on a CPU, the kernels on a GPU
    python examples/gradient_checks.py --implementation interpret    # the kernels on a CPU

Copy this file to check a function of your own: one expert is empty, and no size is a multiple of a tile.
"""

import argparse
import functools

import jax
import numpy as np
from jax.test_util import check_grads

import jgg

TOKENS, FEATURES, OUT, TOPK = 13, 7, 5, 2
LOGITS = np.random.default_rng(0).standard_normal((TOKENS, 4)).astype(np.float32)
LOGITS[:, 2] -= 99  # nobody chooses expert 2


def product(x, w, topk_weights, bias, implementation=None):
    """Multiplies each token by its experts' matrices; the result is in token order."""
    routing = jgg.route(LOGITS, TOPK)
    return jgg.grouped_gemm(
        x,
        w,
        routing.group_sizes,
        TOPK,
        routing.gather_indices,
        permute_x=True,
        permute_y=True,
        topk_weights=topk_weights,
        bias=bias,
        precision="highest",
        implementation=implementation,
    )


def expected(x, w, topk_weights, bias, dy):
    """Computes y and the gradients by a loop in float64."""
    experts = np.asarray(jgg.route(LOGITS, TOPK).topk_indices).reshape(-1)
    x, w, weights, bias, dy = (np.asarray(array, np.float64) for array in (x, w, topk_weights, bias, dy))
    weights, y = weights.reshape(-1), np.zeros((TOKENS * TOPK, OUT))
    dx, dw, d_weights, d_bias = np.zeros_like(x), np.zeros_like(w), np.zeros_like(weights), np.zeros_like(bias)
    for row, expert in enumerate(experts):
        token = row // TOPK
        unscaled = w[expert] @ x[token] + bias[expert]
        y[row] = weights[row] * unscaled
        d_weights[row] = dy[row] @ unscaled
        dx[token] += weights[row] * dy[row] @ w[expert]
        dw[expert] += weights[row] * np.outer(dy[row], x[token])
        d_bias[expert] += weights[row] * dy[row]
    return y, (dx, dw, d_weights.reshape(TOKENS, TOPK), d_bias)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=("triton", "xla", "interpret"))
    options = parser.parse_args(arguments)
    function = jax.jit(functools.partial(product, implementation=options.implementation))

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (TOKENS, FEATURES), (4, OUT, FEATURES), (TOKENS, TOPK), (4, OUT), (TOKENS * TOPK, OUT)
    *operands, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    check_grads(function, operands, order=1, modes=["rev"], rtol=1e-2, atol=1e-2)
    print("check_grads: finite differences agree")

    y, vjp = jax.vjp(function, *operands)
    want_y, want_gradients = expected(*operands, dy)
    names = ("y", "dx", "dw", "d topk_weights", "d bias")
    for name, got, want in zip(names, (y, *vjp(dy)), (want_y, *want_gradients), strict=True):
        error = np.max(np.abs(got - want)) / np.max(np.abs(want))
        print(f"{name}: largest error {error:.1e} of the largest value")
        assert error < 1e-5, name
    assert np.all(np.asarray(vjp(dy)[1])[2] == 0)
    print("dw of the expert without rows is exactly zero")


if __name__ == "__main__":
    main()
