"""Generated cases: any shapes, flags and values, forward and every derivative, against the float64 oracles."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import jgg
from tests.support import comparison, oracle
from tests.support.closeness import assert_close
from tests.support.comparison import assert_matches, oracle_arguments, small_configs
from tests.support.generated import (
    ARRAYS,
    FLOATS,
    batched_names,
    batches,
    examples,
    is_merged,
    on,
    runs_in,
    stacked,
    static_case,
    values,
)

SMALL = {"most_rows": 40, "most_experts": 17}


def parametrize(*params):
    return pytest.mark.parametrize(("implementation", "number"), list(itertools.chain(*params)))


@parametrize(
    on("xla", 12),
    on(None, 6),
    on("interpret", 2, lambda number: runs_in("interpret", number, **SMALL)),
    on("triton", 20),
)
def test_grouped_gemm(implementation, number):
    """With values of its own, and garbage among sizes and indices."""
    is_slow = implementation == "interpret"
    case, dtype = static_case(number, **(SMALL if is_slow else {}))

    @examples(2 if is_slow else 8)
    @given(values(case, dtype))
    def check(drawn):
        precision = _precision(implementation)
        outputs = comparison.run(drawn.case, drawn.data, implementation, precision=precision)
        assert_matches(drawn.case, drawn.data, outputs, precision)

    check()


def _merges_in_kernels(number):
    """Whether a batch becomes more groups of one launch, with rows of several tiles."""
    case, _ = static_case(number, **SMALL)
    merges = is_merged(number, **SMALL) and "w" in batched_names(number, case)
    return merges and case.num_rows > 16 and runs_in("interpret", number, **SMALL)


@parametrize(on("xla", 3), on(None, 6), on("interpret", 1, _merges_in_kernels), on("triton", 15))
def test_vmap(implementation, number):
    """Any subset of the arrays with a batch axis; each element is what it would be alone."""
    static, _ = static_case(number, **SMALL)
    names = batched_names(number, static)
    axes = tuple(0 if name in names else None for name in ARRAYS)

    @examples(2 if implementation == "interpret" else 8)
    @given(batches(number, **SMALL))
    def check(elements):
        arguments = [
            stacked(name, elements) if name in names else jax.tree.map(jnp.asarray, getattr(elements[0].data, name))
            for name in ARRAYS
        ]
        outputs = _vmapped(implementation, static.out_dtype, tuple(static.options.items()), axes)(*arguments)
        outputs = jax.tree.map(np.asarray, outputs)
        for index, element in enumerate(elements):
            own = [None if output is None else output[index] for output in outputs]
            assert_matches(element.case, element.data, own, _precision(implementation))

    check()


def _precision(implementation):
    return "highest" if implementation == "triton" else None


@functools.cache
def _vmapped(implementation, out_dtype, options, axes):
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}
    options = {**dict(options), "preferred_element_type": out_dtype, "precision": _precision(implementation)}
    function = comparison.passes_of_grouped_gemm(implementation, options, configs)

    def flat(x, w, topk_weights, bias, group_sizes, gather_indices, dy):
        y, gradients = function((x, w, topk_weights, bias), group_sizes, gather_indices, dy)
        return [y, *gradients]

    return jax.jit(jax.vmap(flat, axes))


def _is_float32(number):
    case, dtype = static_case(number, **SMALL)
    return dtype == "float32" and case.out_dtype in (None, "float32") and len(case.group_sizes) > 0


@parametrize(on("xla", 4, _is_float32))
def test_forward_mode_and_second_order(implementation, number):
    """Both are sums of the oracle's own values: y and the gradients are linear in each array."""
    drawn = values(*static_case(number, **SMALL), garbage=False)

    @examples(5)
    @given(drawn, drawn)
    def check(one, other):
        case, arrays = one.case, one.data
        present = [name for name in FLOATS if getattr(arrays, name) is not None]
        primals, tangents = ({name: np.nan_to_num(getattr(a, name)) for name in present} for a in (arrays, other.data))
        dy = np.nan_to_num(arrays.dy)
        got = _derivatives(tuple(case.options.items()))(
            primals, tangents, dy, *jax.tree.map(jnp.asarray, (arrays.group_sizes, arrays.gather_indices))
        )
        arguments = oracle_arguments(case, arrays) | primals
        y_tangent, hessian = _expected_derivatives(arguments, tangents, dy)
        assert_close(got, (y_tangent, hessian, hessian), 2e-5, least_scale=1)

    check()


@functools.cache
def _derivatives(options):
    """A function for the tangent of y and, in two ways, the second derivative of sum(dy * y) times the tangents."""

    @jax.jit
    def derivatives(primals, tangents, dy, group_sizes, gather_indices):
        def y(arrays):
            return jgg.grouped_gemm(
                **arrays,
                group_sizes=group_sizes,
                gather_indices=gather_indices,
                **dict(options),
                implementation="xla",
                precision="highest",
            )

        def gradient(arrays):
            return jax.grad(lambda arrays: jnp.sum(y(arrays) * dy))(arrays)

        def along_tangents(arrays):
            terms = jax.tree.map(lambda g, t: jnp.sum(g * t), gradient(arrays), tangents)
            return sum(jax.tree.leaves(terms), jnp.float32(0))

        _, y_tangent = jax.jvp(y, (primals,), (tangents,))
        _, forward_over_reverse = jax.jvp(gradient, (primals,), (tangents,))
        return y_tangent, forward_over_reverse, jax.grad(along_tangents)(primals)

    return derivatives


def _expected_derivatives(arguments, tangents, dy):
    """The same by the oracle, with one array after the other replaced by its tangent."""
    y_tangent = 0
    hessian = {name: np.zeros(array.shape) for name, array in tangents.items()}
    linear_in = {"x": ("w", "topk_weights"), "w": ("x", "topk_weights"), "topk_weights": ("x", "w", "bias")}
    for name, tangent in tangents.items():
        changed = arguments | {name: tangent}
        # y = (x @ w + bias) * weights: what of it depends on one array leaves the other term out
        if name in ("x", "w") and "bias" in tangents:
            changed["bias"] = np.zeros_like(arguments["bias"])
        elif name == "bias":
            changed["x"] = np.zeros_like(arguments["x"])
        y_tangent = y_tangent + oracle.grouped_gemm(**changed)
        gradients = oracle.gradients(dy, **changed)
        for other in linear_in.get(name, ("topk_weights",)):
            if other in hessian:
                hessian[other] += getattr(gradients, other)
    return y_tangent, hessian
