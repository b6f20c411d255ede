"""grouped_gemm of a small case as a function to transform, and the oracle's values for it."""

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from tests.support import oracle
from tests.support.cases import EVERYTHING, Case, make_data
from tests.support.comparison import passes_of_grouped_gemm, small_configs

SMALL = {"group_sizes": (3, 0, 6, 1), "in_features": 4, "out_features": 5}
# rows past the last group too
WITH_EVERYTHING = Case("everything", num_rows=12, **SMALL, **EVERYTHING)
PLAIN = Case("plain", num_rows=12, w_layout="ekn", **SMALL)
IN_ORDER = Case("in-order", num_rows=12, gather="random", weighted=True, biased=True, **SMALL)
NAMES = ("x", "w", "topk_weights", "bias")
ORDER = (*NAMES, "group_sizes", "gather_indices", "dy")


def differentiable(case, implementation):
    """grouped_gemm of a case as a function of its arrays, and the arrays to differentiate it at."""
    data = make_data(case, "float32")
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}
    fixed = jax.tree.map(jnp.asarray, {"group_sizes": data.group_sizes, "gather_indices": data.gather_indices})

    def function(arrays):
        return jgg.grouped_gemm(
            **arrays, **fixed, **case.options, **configs, implementation=implementation, precision="highest"
        )

    arrays = {name: getattr(data, name) for name in NAMES if getattr(data, name) is not None}
    return function, jax.tree.map(jnp.asarray, arrays), data


def batch_of(case, count):
    """Arrays of several cases that differ in their values, stacked, and each case's own data."""
    all_data = [make_data(case, "float32", seed) for seed in range(count)]
    stacked = {
        name: np.stack([getattr(data, name) for data in all_data])
        for name in (*NAMES, "group_sizes", "gather_indices", "dy")
    }
    # groups of each element have other sizes
    stacked["group_sizes"] = np.stack([np.roll(data.group_sizes, i) for i, data in enumerate(all_data)])
    return jax.tree.map(jnp.asarray, stacked)


def passes_of(case, implementation):
    """y and the gradients of a case as a function of arrays in ORDER."""
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}
    function = passes_of_grouped_gemm(implementation, case.options | {"precision": "highest"}, configs)

    def flat(x, w, topk_weights, bias, group_sizes, gather_indices, dy):
        y, gradients = function((x, w, topk_weights, bias), group_sizes, gather_indices, dy)
        return y, *gradients

    return flat


def expected_outputs(case, x, w, topk_weights, bias, group_sizes, gather_indices, dy):
    arguments = {
        "x": x,
        "w": w,
        "topk_weights": topk_weights,
        "bias": bias,
        "group_sizes": group_sizes,
        "gather_indices": gather_indices,
        **case.options,
    }
    return oracle.grouped_gemm(**arguments), *oracle.gradients(dy, **arguments)


# which arguments in ORDER have a batch axis where elements share the weights
SHARED_WEIGHTS = [None if name in ("w", "bias") else 0 for name in ORDER]


def arguments_of(case):
    """Arrays in ORDER, and what the oracle expects."""
    data = make_data(case, "float32")
    arrays = {name: getattr(data, name) for name in ORDER}
    with np.errstate(invalid="ignore"):
        return [jnp.asarray(array) for array in arrays.values()], list(expected_outputs(case, **arrays))


def moe_arguments():
    """x, w_gate_up, w_down and logits."""
    rng = np.random.default_rng(0)
    shapes = (6, 8), (4, 10, 8), (4, 8, 5), (6, 4)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def moe(implementation):
    """The expert MLP with its router, as a function of these."""

    def layer(x, w_gate_up, w_down, logits):
        routing = jgg.route(logits, 2)
        return jgg.moe_mlp(x, w_gate_up, w_down, routing, precision="highest", implementation=implementation)

    return layer
