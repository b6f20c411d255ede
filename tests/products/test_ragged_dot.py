"""ragged_dot and ragged_dot_general compared with jax.lax's, which they replace."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support import oracle
from tests.support.closeness import largest_error
from tests.support.marks import INTERPRET, TRITON, on, thorough_but
from tests.support.passes import forward_and_backward

SIZES = (3, 0, 5)  # of 11 rows


def numbers(contracted, batch, ragged, group):
    return jax.lax.RaggedDotDimensionNumbers((contracted, batch), ragged, group)


BASIC = numbers(((1,), (1,)), ((), ()), [0], [0])
# name: (shapes of lhs, rhs and group_sizes, dimension numbers), of a free ragged dimension and of a contracted one
FREE = {
    "[m,k] [g,k,n]": ((11, 6), (3, 6, 7), (3,), BASIC),
    "[m,k] [g,n,k]": ((11, 6), (3, 7, 6), (3,), numbers(((1,), (2,)), ((), ()), [0], [0])),
    "[k,m] [k,g,n]": ((6, 11), (6, 3, 7), (3,), numbers(((0,), (0,)), ((), ()), [1], [1])),
    "[m,k] [k,n,g]": ((11, 6), (6, 7, 3), (3,), numbers(((1,), (0,)), ((), ()), [0], [2])),
    "[m,k] [g,k]": ((11, 6), (3, 6), (3,), numbers(((1,), (1,)), ((), ()), [0], [0])),
    "[m] [g,n]": ((11,), (3, 6), (3,), numbers(((), ()), ((), ()), [0], [0])),
    "[b,m,k] [g,b,k,n] [b,g]": ((2, 11, 6), (3, 2, 6, 7), (2, 3), numbers(((2,), (2,)), ((0,), (1,)), [1], [0])),
    "[b,m,k] [b,g,n,k] [g]": ((2, 11, 6), (2, 3, 7, 6), (3,), numbers(((2,), (3,)), ((0,), (0,)), [1], [1])),
    "[x,m,k] [g,k,n] [x,g]": ((2, 11, 6), (3, 6, 7), (2, 3), numbers(((2,), (1,)), ((), ()), [1], [0])),
    "[m,y,k] [g,k,n]": ((11, 2, 6), (3, 6, 7), (3,), numbers(((2,), (1,)), ((), ()), [0], [0])),
    "[b,x,m,y,j,k] [g,k,b,n,o,j] [b,x,g]": (
        (2, 4, 11, 3, 3, 6),
        (3, 6, 2, 7, 4, 3),
        (2, 4, 3),
        numbers(((5, 4), (1, 5)), ((0,), (2,)), [2], [0]),
    ),
}
CONTRACTED = {
    "[k,m] [k,n]": ((11, 6), (11, 7), (3,), numbers(((0,), (0,)), ((), ()), [0], [])),
    "[m,k] [n,k]": ((6, 11), (7, 11), (3,), numbers(((1,), (1,)), ((), ()), [1], [])),
    "[b,k,m] [k,b,n] [b,g]": ((2, 11, 6), (11, 2, 7), (2, 3), numbers(((1,), (0,)), ((0,), (1,)), [1], [])),
    "[x,k,m] [k,x,n] [x,g]": ((4, 11, 6), (11, 4, 7), (4, 3), numbers(((0, 1), (1, 0)), ((), ()), [1], [])),
    "[x,k,y,m,b] [k,x,b,y,n] [g]": (
        (4, 11, 3, 6, 2),
        (11, 4, 2, 3, 7),
        (3,),
        numbers(((0, 1, 2), (1, 0, 3)), ((4,), (2,)), [1], []),
    ),
}
CASES = FREE | CONTRACTED
# each kind of dimension, alone and with all the others
QUICK = {
    *("[m,k] [g,k,n]", "[k,m] [k,g,n]", "[m] [g,n]", "[b,m,k] [g,b,k,n] [b,g]", "[b,x,m,y,j,k] [g,k,b,n,o,j] [b,x,g]"),
    *("[k,m] [k,n]", "[x,k,y,m,b] [k,x,b,y,n] [g]"),
}
# of lhs, of rhs and preferred_element_type
DTYPES = [
    ("bfloat16", "bfloat16", None),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float32"),
    ("bfloat16", "float32", None),
    ("float32", "float16", None),
    ("float32", "bfloat16", "bfloat16"),
    ("float16", "bfloat16", None),
    ("bfloat16", "float16", "float32"),
    ("float32", "float32", "float16"),
]
CASES_OF_DTYPES = {
    f"{name}-{'-'.join(map(str, dtypes))}": (CASES[name], dtypes)
    for name, some in (("[m,k] [g,k,n]", DTYPES), ("[k,m] [k,n]", DTYPES[1::2]))
    for dtypes in some
}
QUICK_DTYPES = list(CASES_OF_DTYPES)[::4]


def run(function, lhs, rhs, ct):
    """The product and the gradients in lhs and rhs."""
    return jax.jit(forward_and_backward(function))(ct, lhs, rhs)


def assert_right(case, dtypes, implementation):
    """The values and dtypes of jax.lax, to twice its error, and of gradients that it lacks to a rounding."""
    *shapes, sizes_shape, dimension_numbers = case
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal(s), dtype) for s, dtype in zip(shapes, dtypes, strict=False))
    group_sizes = np.broadcast_to(np.array(SIZES, np.int32), sizes_shape).copy()
    if group_sizes.ndim > 1:
        group_sizes[1] = (0, 9, 1)
    options = {"precision": "highest", "preferred_element_type": dtypes[2]}

    def function(module, **more):
        def multiply(lhs, rhs):
            sizes = jnp.asarray(group_sizes)
            return module.ragged_dot_general(lhs, rhs, sizes, dimension_numbers, **options, **more)

        return multiply

    reference = function(jax.lax)
    out = jax.eval_shape(reference, lhs, rhs)
    ct = jnp.asarray(rng.standard_normal(out.shape), out.dtype)
    got = run(function(jgg, implementation=implementation), lhs, rhs, ct)
    wanted = oracle.ragged_dot_general(lhs, rhs, group_sizes, dimension_numbers)(lhs, rhs, ct)
    has_gradients = dimension_numbers.rhs_group_dimensions != ()
    # on a CPU, since not all of them are implemented for GPUs
    on_cpu = jax.device_put((lhs, rhs, ct), jax.local_devices(backend="cpu")[0])
    own = run(reference, *on_cpu) if has_gradients else (reference(*on_cpu[:2]), None, None)
    types = [(out.shape, out.dtype), (lhs.shape, lhs.dtype), (rhs.shape, rhs.dtype)]
    for name, array, want, other, expected in zip(("out", "lhs", "rhs"), got, wanted, own, types, strict=True):
        assert (array.shape, array.dtype) == expected, name
        bound = float(jnp.finfo(array.dtype).eps) if other is None else 2 * largest_error(other, want)
        assert largest_error(array, want) <= 1e-5 + bound, name


@on(None, TRITON)
@pytest.mark.parametrize("case", thorough_but(QUICK, CASES, pytest.mark.sweep))
def test_every_order_of_dimensions(case, implementation):
    assert_right(case, ("float32", "float32", None), implementation)


@on(None, TRITON)
@pytest.mark.parametrize("case", thorough_but(QUICK_DTYPES, CASES_OF_DTYPES, pytest.mark.sweep))
def test_dtypes(case, implementation):
    assert_right(*case, implementation)


@on("xla", INTERPRET)
@pytest.mark.parametrize("name", ["[m,k] [g,n,k]", "[k,m] [k,n]"])
def test_implementations(name, implementation):
    assert_right(CASES[name], ("float16", "float32", None), implementation)


def test_forward_mode_of_the_sum_over_rows():
    """In plain JAX the product that is itself a gradient has derivatives of every kind."""
    rng = np.random.default_rng(0)
    lhs, rhs, d_lhs, d_rhs = (rng.standard_normal(shape).astype(np.float32) for shape in ((11, 6), (11, 7)) * 2)
    dimension_numbers = CASES["[k,m] [k,n]"][-1]
    function = functools.partial(general, sizes=SIZES, dimension_numbers=dimension_numbers, implementation="xla")
    _, got = jax.jit(lambda *arrays: jax.jvp(function, arrays[:2], arrays[2:]))(lhs, rhs, d_lhs, d_rhs)
    products = oracle.ragged_dot_general(lhs, rhs, np.array(SIZES), dimension_numbers)
    want = products(d_lhs, rhs, got)[0] + products(lhs, d_rhs, got)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["[k,m] [k,g,n]", "[m,y,k] [g,k,n]", "[m,k] [n,k]"])
def test_rows_of_no_group_reach_nothing(name):
    """Not even NaN, in either ragged operand or in the cotangent; sizes out of range are clamped."""
    lhs_shape, rhs_shape, _, dimension_numbers = CASES[name]
    rng = np.random.default_rng(0)
    lhs, rhs = (rng.standard_normal(shape).astype(np.float32) for shape in (lhs_shape, rhs_shape))
    sizes = np.array([3, -(2**31), 5], np.int32)
    products = oracle.ragged_dot_general(lhs, rhs, sizes, dimension_numbers)
    out = products(lhs, rhs, np.zeros(jax.eval_shape(lambda: general(lhs, rhs, sizes, dimension_numbers)).shape))[0]
    ct = rng.standard_normal(out.shape).astype(np.float32)
    wanted = products(lhs, rhs, ct)
    (ragged,) = dimension_numbers.lhs_ragged_dimensions
    is_free = dimension_numbers.rhs_group_dimensions != ()
    poisoned = [lhs, ct] if is_free else [lhs, rhs]
    for array, axis in zip(poisoned, (ragged, 0 if is_free else 1), strict=True):
        np.moveaxis(array, axis, 0)[8:] = np.nan
    got = run(lambda lhs, rhs: general(lhs, rhs, sizes, dimension_numbers), lhs, rhs, ct)
    for array, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(array, want, rtol=1e-5, atol=1e-5)


def general(lhs, rhs, sizes, dimension_numbers, **options):
    return jgg.ragged_dot_general(lhs, rhs, jnp.asarray(sizes), dimension_numbers, precision="highest", **options)


def test_offset_into_the_groups():
    """rhs of some groups only, in an order of its own and of another dtype; jax.lax has the argument, but not this."""
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((11, 6)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((2, 7, 6)), jnp.float32)
    options = {"precision": "highest", "group_offset": jnp.array([1])}
    sizes = jnp.asarray((2, *SIZES))
    got = jgg.ragged_dot_general(lhs, rhs, sizes, CASES["[m,k] [g,n,k]"][-1], **options)
    want = oracle.ragged_dot(np.asarray(lhs, np.float64), rhs.swapaxes(1, 2), np.asarray(sizes), 1)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    same = jgg.ragged_dot(lhs, rhs.swapaxes(1, 2), sizes, **options)
    np.testing.assert_allclose(same, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["ragged_dot", "ragged_dot_general"])
def test_signatures_of_jax(name):
    def parameters(module):
        return [(p.name, p.default, p.kind) for p in inspect.signature(getattr(module, name)).parameters.values()]

    assert parameters(jgg)[:-1] == parameters(jax.lax)
    assert parameters(jgg)[-1] == ("implementation", None, inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize(
    ("name", "transposes"), [("[m,k] [g,k,n]", 0), ("[m,k] [g,n,k]", 0), ("[k,m] [k,n]", 0), ("[k,m] [k,g,n]", 4)]
)
def test_no_copy_of_what_kernels_read_as_it_is(name, transposes):
    """One kernel for the product and one for each gradient, and what they take is not transposed before."""
    *shapes, sizes_shape, dimension_numbers = CASES[name]
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    sizes = jnp.zeros(sizes_shape, jnp.int32)
    product = functools.partial(
        jgg.ragged_dot_general, group_sizes=sizes, ragged_dot_dimension_numbers=dimension_numbers
    )
    dy = jax.eval_shape(product, lhs, rhs)
    program = str(jax.make_jaxpr(forward_and_backward(product))(dy, lhs, rhs))
    assert program.count("how=") == 3
    assert program.count("= transpose[") == transposes


@on("xla", None, INTERPRET, TRITON)
def test_cotangent_of_a_wider_result_is_not_rounded(implementation):
    """float32 cotangents that float16 does not hold, whose gradients it does."""
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape) * 1e-3, jnp.float16) for shape in ((8, 6), (3, 6, 7)))
    ct = jnp.asarray(rng.standard_normal((8, 7)) * 1e6, jnp.float32)

    def multiply(lhs, rhs):
        return jgg.ragged_dot(lhs, rhs, jnp.asarray(SIZES), "highest", jnp.float32, implementation=implementation)

    wanted = oracle.ragged_dot_general(lhs, rhs, np.array(SIZES), BASIC)(lhs, rhs, ct)
    for array, want in zip(run(multiply, lhs, rhs, ct), wanted, strict=True):
        assert largest_error(array, want) <= 1e-5 + float(jnp.finfo(array.dtype).eps)
