"""Runs a case by an implementation and compares it with the oracle: the one tolerance of all tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from tests.support import oracle
from tests.support.cases import Case, Data, make_data
from tests.support.closeness import largest_error
from tests.support.passes import forward_and_backward

OUTPUTS = ("y", "x", "w", "topk_weights", "bias")  # y and what the gradients are of


def small_configs(block=16, **switches):
    """Kernel configurations of tiles small enough that a group has several, as arguments of grouped_gemm."""
    blocks = {"block_m": block, "block_n": block, "block_k": block, "num_warps": 4, "band": 2}

    def make(config_type):
        known = {name: value for name, value in switches.items() if hasattr(config_type, name)}
        return config_type(**blocks, **known)

    return (
        ("kernel_config_fwd", make(jgg.KernelConfigForward)),
        ("kernel_config_bwd_dx", make(jgg.KernelConfigDX)),
        ("kernel_config_bwd_dw", make(jgg.KernelConfigDW)),
    )


def run(case: Case, data: Data, implementation, *, precision=None, configs=(), jit=True):
    """y and the gradients, in the order of OUTPUTS, NumPy arrays or None."""
    if not configs and implementation == "interpret" and not case.default_config:
        configs = small_configs()
    options = {**case.options, "precision": precision, "preferred_element_type": case.out_dtype}
    function = _compiled(implementation, tuple(options.items()), tuple(configs), jit)
    arrays = [data.x, data.w, data.topk_weights, data.bias]
    fixed = jax.tree.map(jnp.asarray, (data.group_sizes, data.gather_indices))
    # Donated, these become the memory of the results, so that an element nobody writes is NaN.
    unwritten = jax.tree.map(lambda array: jnp.asarray(np.full_like(array, np.nan)), (data.dy, arrays))
    y, gradients = function(unwritten, jax.tree.map(jnp.asarray, arrays), *fixed, jnp.asarray(data.dy))
    return jax.tree.map(np.asarray, [y, *gradients])


@functools.cache
def _compiled(implementation, options, configs, jit):
    both = passes_of_grouped_gemm(implementation, dict(options), dict(configs))

    def function(unwritten, *arguments):
        del unwritten
        return both(*arguments)

    return jax.jit(function, donate_argnums=0, keep_unused=True) if jit else function


def passes_of_grouped_gemm(implementation, options, configs):
    """grouped_gemm as a function to y and the gradients in the arrays x, w, topk_weights and bias."""

    def function(arrays, group_sizes, gather_indices, dy):
        def forward(x, w, topk_weights, bias):
            return jgg.grouped_gemm(
                x,
                w,
                group_sizes,
                gather_indices=gather_indices,
                topk_weights=topk_weights,
                bias=bias,
                implementation=implementation,
                **options,
                **configs,
            )

        y, *gradients = forward_and_backward(forward)(dy, *arrays)
        return y, gradients

    return function


def assert_right(case: Case, dtype, implementation, seed=0, **options):
    """Checks y and every gradient of a case against the oracle."""
    data = make_data(case, dtype, seed)
    assert_matches(case, data, run(case, data, implementation, **options), options.get("precision"))


def assert_matches(case: Case, data: Data, outputs, precision=None):
    """Compares y and the gradients with the oracle.

    Where the oracle has zero, NaN or Inf, so must they, exactly. Elsewhere the error, relative to the largest element,
    is at most twice the error of XLA's own dense product in the same dtype, plus 1e-5.
    """
    expected, fixed = _expected(case, data)
    own = None
    for index, (name, got, want) in enumerate(zip(OUTPUTS, outputs, expected, strict=True)):
        if want is None:
            assert got is None
            continue
        assert got.shape == want.shape, name
        mask = np.broadcast_to(fixed[index], want.shape)
        error = error_of(got, want, mask, f"{case.name}: {name}")
        if error <= 1e-5:
            continue
        if own is None:
            own = _own_errors(case, data, precision)
        bound = 1e-5 + 2 * own[name]
        assert error <= bound, f"{case.name}: the error of {name} is {error:.2e}, at most {bound:.2e} is right"


def _expected(case, data):
    """The oracle's y and gradients, and which of their elements are specified."""
    arguments = oracle_arguments(case, data)
    with np.errstate(invalid="ignore"):
        expected = [oracle.grouped_gemm(**arguments), *oracle.gradients(data.dy, **arguments)]
    return expected, oracle.specified(**arguments)


def oracle_arguments(case: Case, data: Data):
    """What the oracle's functions take."""
    return {
        "x": data.x,
        "w": data.w,
        "group_sizes": data.group_sizes,
        "gather_indices": data.gather_indices,
        "topk_weights": data.topk_weights,
        "bias": data.bias,
        **case.options,
    }


def error_of(got, want, mask, name):
    """The largest error of the elements in `mask`, relative to the largest of them."""
    got, want = got[mask], want[mask]
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite, f"where {name} is finite")
    got, want = got[finite], want[finite]
    # the oracle has zeros only where nothing was added up
    np.testing.assert_array_equal(got[want == 0], 0, f"{name} where it must be exactly zero")
    return largest_error(got, want)


def _own_errors(case, data, precision):
    """The errors of plain XLA in the same dtype, by output; NaN and Inf, which its dense product spreads, left out."""
    finite = {
        name: None if array is None else np.where(np.isfinite(array), array, 0).astype(array.dtype)
        for name, array in (("x", data.x), ("w", data.w), ("dy", data.dy), ("bias", data.bias))
    }
    data = dataclasses.replace(data, **finite)
    expected, fixed = _expected(case, data)
    own = _own_outputs(case, data, precision)
    return {
        name: max(error_of(o[i], want, np.broadcast_to(fixed[i], want.shape), f"plain XLA's {name}") for o in own)
        for i, (name, want) in enumerate(zip(OUTPUTS, expected, strict=True))
        if want is not None
    }


def _own_outputs(case, data, precision):
    """Results of plain XLA, whose errors are the measure; one or two ways."""
    num_rows, topk = case.num_rows, case.topk
    ranges = oracle.group_ranges(data.group_sizes, num_rows)
    members = np.zeros((len(ranges), num_rows), bool)
    for group, rows in enumerate(ranges):
        members[group, rows.start : rows.stop] = True

    # Every case as one with indices, weights and bias, so that they share what JAX compiles.
    in_order = np.arange(num_rows)
    positions = in_order
    if data.gather_indices is not None:
        positions = data.gather_indices.astype(np.int64)
        positions = np.where((positions >= 0) & (positions < num_rows), positions, 2**30)
    indices = (positions // topk if case.permute_x else in_order, positions if case.permute_y else in_order, positions)
    weights = np.ones(num_rows, np.float32) if data.topk_weights is None else data.topk_weights
    bias = np.zeros((len(ranges), case.out_features), data.x.dtype) if data.bias is None else data.bias

    def outputs(x, w, dy):
        w = w if case.w_layout == "ekn" else w.swapaxes(1, 2)
        arrays = jax.tree.map(jnp.asarray, (x, w, weights.reshape(-1), bias))
        fixed = jax.tree.map(jnp.asarray, (indices, members, dy))
        y, (dx, dw, d_weights, dbias) = _plain_xla(precision, *fixed, *arrays)
        dw = dw if case.w_layout == "ekn" else dw.swapaxes(1, 2)
        return jax.tree.map(np.asarray, [y, dx, dw, d_weights.reshape(weights.shape), dbias])

    own = [outputs(data.x, data.w, data.dy)]
    if data.x.dtype == np.float32 and jax.default_backend() == "gpu" and precision is None:
        # XLA may or may not take TF32 then; this is what TF32 costs, which keeps 10 bits of each operand
        own.append(outputs(*map(_truncate_to_tf32, (data.x, data.w, data.dy))))
    return own


def _truncate_to_tf32(array):
    if array.dtype != np.float32:
        return array
    return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _round_cotangent(array, dtype):
    """The array; its cotangent is rounded to dtype, so that the backward products too are of operands in that dtype."""
    del dtype
    return array


def _keep_nothing(array, dtype):
    return _round_cotangent(array, dtype), None


def _round(dtype, _, cotangent):
    # not astype twice: XLA may leave such a pair out, to be more precise than asked
    info = jnp.finfo(dtype)
    return (jax.lax.reduce_precision(cotangent, info.nexp, info.nmant),)


_round_cotangent.defvjp(_keep_nothing, _round)


@functools.partial(jax.jit, static_argnums=0)
def _plain_xla(precision, indices, members, dy, *arrays):
    """y and gradients by a dense jnp product of all rows with every expert, in their dtype, float32 accumulated."""
    x_rows, y_rows, weight_rows = indices
    member_rows = members[:, :, None]

    def forward(x, w, weights, bias):
        x = x.at[x_rows].get(mode="fill", fill_value=0)
        products = jnp.einsum(
            "emk,ekn->emn", jnp.where(member_rows, x, 0), w, precision=precision, preferred_element_type=jnp.float32
        )
        # a wider result's cotangent is not rounded
        products = _round_cotangent(products, x.dtype if dy.dtype.itemsize == x.dtype.itemsize else jnp.float32)
        scales = weights.astype(jnp.float32).at[weight_rows].get(mode="fill", fill_value=0)
        scales = jnp.where(jnp.any(members, axis=0), scales, 0)
        products = (products + bias.astype(jnp.float32)[:, None]) * scales[None, :, None]
        y = jnp.sum(jnp.where(member_rows, products, 0), axis=0).astype(dy.dtype)
        return jnp.zeros_like(y).at[y_rows].set(y, mode="drop")

    y, *gradients = forward_and_backward(forward)(dy, *arrays)
    return y, gradients
