"""Dense layers, by the kernels and by XLA: values and gradients, alone and under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import Target
from jgg.core.matrix import Factors, Matrix
from jgg.launching import dense_choice
from jgg.launching.dense_choice import Measured
from jgg.linear.dense import dense, dense_layer

ROWS, K, N, RANK = (2, 3), 24, 40, 3


def make(rows=ROWS, has_term=True, has_bias=True, dtype="float32", seed=0):
    """x, a matrix and a bias, and dy."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    factors = Factors(normal(K, RANK), normal(RANK, N)) if has_term else None
    return (
        normal(*rows, K),
        Matrix(dense=normal(K, N), factors=factors),
        normal(N) if has_bias else None,
        normal(*rows, N),
    )


def expected(x, matrix, bias):
    """The layer in plain JAX, with merged weights."""
    w = matrix.dense if matrix.factors is None else matrix.dense + matrix.factors.a @ matrix.factors.b
    return x @ w if bias is None else x @ w + bias[(None,) * (x.ndim - 1)]


def with_gradients(layer, x, matrix, bias, dy):
    y, pull_back = jax.vjp(layer, x, matrix, bias)
    return y, pull_back(dy)


def assert_same(got, want, tolerance=2e-5):
    for own, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert own.shape == wanted.shape
        np.testing.assert_allclose(own, wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max())


@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.interpret)])
@pytest.mark.parametrize(
    ("rows", "has_term", "has_bias"), [(ROWS, True, True), ((1, 1), False, False), ((5,), False, True)]
)
def test_values_and_gradients(rows, has_term, has_bias, implementation):
    arrays = make(rows, has_term, has_bias)
    got = jax.jit(functools.partial(with_gradients, functools.partial(dense, implementation=implementation)))(*arrays)
    with jax.default_matmul_precision("highest"):
        assert_same(got, with_gradients(expected, *arrays))


@pytest.mark.interpret
@pytest.mark.parametrize("shared", ["matrix", "nothing"])
def test_under_vmap(shared):
    """Rows of all elements are one group's, or each element is a group."""
    elements = [make(has_term=False, seed=seed) for seed in range(2)]
    x, matrix, bias, _ = jax.tree.map(lambda *each: jnp.stack(each), *elements)
    axes = (0, None, None) if shared == "matrix" else 0
    if shared == "matrix":
        matrix, bias = elements[0][1:3]
    layer = functools.partial(dense, implementation="interpret")
    assert_same(jax.vmap(layer, axes)(x, matrix, bias), jax.vmap(expected, axes)(x, matrix, bias))


@pytest.mark.interpret
def test_over_a_stack_of_layers_of_which_some_are_frozen():
    """In a scan, with the weights of one position frozen: its gradient is zero and the others' are right."""
    stack = [make(has_bias=False, seed=seed) for seed in range(2)]
    x = stack[0][0][..., :K]
    matrices = jax.tree.map(lambda *each: jnp.stack(each), *[each[1] for each in stack])

    def loss(matrices, layer):
        def step(x, matrix):
            frozen = matrix._replace(dense=jax.lax.stop_gradient(matrix.dense))
            return jnp.tanh(layer(layer(x, matrix, None)[..., :K], frozen, None))[..., :K], None

        return jnp.sum(jax.lax.scan(step, x, matrices)[0] ** 2)

    got = jax.grad(loss)(matrices, functools.partial(dense, implementation="interpret"))
    with jax.default_matmul_precision("highest"):
        assert_same(got, jax.grad(loss)(matrices, expected), 1e-4)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_loop_over_layers_keeps_no_copies_of_their_weights(implementation):
    matrix = Matrix(dense=jnp.ones((K, K)), factors=Factors(jnp.ones((K, RANK)), jnp.ones((RANK, K))))
    stack = jax.tree.map(lambda part: jnp.stack([part] * 2), matrix)

    def loss(x, stack):
        def step(x, matrix):
            return jnp.tanh(dense(x, matrix, implementation=implementation)), None

        return jnp.sum(jax.lax.scan(step, x, stack)[0])

    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((5, K)), stack)
    forward, _ = (eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == "scan")
    assert max(result.aval.size for result in forward.outvars) == 2 * 5 * K  # x of each layer


@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.interpret)])
def test_inside_shard_map_with_shared_weights(implementation):
    """Gradients of weights that all devices share are sums over the devices."""
    x, matrix, bias, dy = make(rows=(4,))
    tokens = jax.P("data")

    def loss(layer, x, matrix, bias, dy):
        return jnp.sum(layer(x, matrix, bias) * dy)

    def split(*arrays):
        own = functools.partial(loss, functools.partial(dense, implementation=implementation))
        return jax.shard_map(
            lambda *arrays: jax.lax.psum(own(*arrays), "data"),
            mesh=jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=(tokens, jax.P(), jax.P(), tokens),
            out_specs=jax.P(),
        )(*arrays)

    got = jax.jit(jax.grad(split, (0, 1, 2)))(x, matrix, bias, dy)
    with jax.default_matmul_precision("highest"):
        assert_same(got, jax.grad(functools.partial(loss, expected), (0, 1, 2))(x, matrix, bias, dy))


def test_derivatives_of_any_order_in_plain_jax():
    x, matrix, bias, _ = make()
    layer = functools.partial(dense, implementation="xla")
    _, tangent = jax.jvp(lambda x: layer(x, matrix, bias), (x,), (x,))
    assert_same(tangent, expected(x, matrix, None), 1e-4)


@pytest.mark.parametrize(("shape", "rows"), [((1, 1, 8), 2), ((3, 8), 3)])
def test_one_row_is_multiplied_as_two_by_xla(shape, rows):
    layer = functools.partial(dense, implementation="xla")
    traced = jax.make_jaxpr(lambda x, w: layer(x, Matrix(dense=w)))(jnp.zeros(shape), jnp.zeros((8, 5)))
    (operand,) = [eqn.invars[0].aval for eqn in traced.eqns if eqn.primitive.name == "dot_general"]
    assert operand.shape[-2:] == (rows, 8)


def test_weights_of_another_dtype():
    """Weights wider than x are rounded to its dtype, and their gradient has theirs."""
    x, matrix, bias, dy = make(has_term=False)
    layer = functools.partial(dense, implementation="xla")
    x, dy = x.astype("bfloat16"), dy.astype("bfloat16")
    y, (_, d_matrix, dbias) = with_gradients(layer, x, matrix, bias, dy)
    assert (y.dtype, d_matrix.dense.dtype, dbias.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)
    wide = with_gradients(expected, x.astype("float32"), matrix, bias, dy.astype("float32"))
    assert_same((y.astype("float32"), d_matrix), (wide[0], wide[1][1]), 2e-2)


H100 = Target(90, 132)
TABLE = (
    Measured(90, rows=8, k=2048, n=4096, has_term=None, kernels=12.0, xla=18.0),
    Measured(90, rows=8, k=2048, n=512, has_term=None, kernels=14.0, xla=8.0),
    Measured(90, rows=8192, k=2048, n=4096, has_term=True, kernels=700.0, xla=750.0),
    Measured(90, rows=8192, k=2048, n=4096, has_term=False, kernels=493.0, xla=490.0),
)


@pytest.mark.parametrize(
    ("rows", "k", "n", "has_term", "target", "dtype", "by_kernels"),
    [
        (4, 2880, 4096, False, H100, "bfloat16", True),
        (4, 2880, 512, False, H100, "bfloat16", False),
        (4000, 2048, 2048, True, H100, "float16", True),
        (4000, 2048, 2048, False, H100, "float16", False),
        (4, 2880, 4096, False, H100, "float32", False),
        (4, 2880, 4096, False, Target(80, 108), "bfloat16", False),
        (4, 2881, 4096, False, H100, "bfloat16", False),
    ],
)
def test_the_nearest_measurement_decides(rows, k, n, has_term, target, dtype, by_kernels, monkeypatch):
    monkeypatch.setattr(dense_choice, "_table", lambda: TABLE)
    x, w = jax.ShapeDtypeStruct((rows, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    factors = Factors(w, w) if has_term else None
    with jgg.target(target.compute_capability, target.num_sms):
        linear = dense_layer(x, Matrix(dense=w, factors=factors))
    assert linear.how.implementation == (None if by_kernels else "xla")


def test_what_is_asked_for_is_computed():
    """An implementation that is named computes all dense products."""
    x, w = jnp.zeros((4, K), "bfloat16"), jnp.zeros((K, N), "bfloat16")
    assert dense_layer(x, Matrix(dense=w), implementation="triton").how.implementation == "triton"


def test_the_table_is_readable():
    for entry in dense_choice._table():
        assert entry.kernels > 0
        assert entry.xla > 0


def test_the_default_precision_is_that_of_jax():
    x, w = jnp.zeros((4, K)), jnp.zeros((K, N))
    with jax.default_matmul_precision("highest"):
        assert dense_layer(x, Matrix(dense=w)).problem.precision == jax.lax.Precision.HIGHEST
    assert dense_layer(x, Matrix(dense=w)).problem.precision == jax.lax.Precision.DEFAULT
