"""Layers that share x, with LoRA or few rows: what each gives alone, also under JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.core.matrix import Factors, Matrix
from jgg.launching.choice import How
from jgg.linear.dense import dense
from jgg.linear.several import dense_several
from jgg.products.project_few import MOST_ROWS, MOST_ROWS_WITH_TERMS, PROJECT_FEW, ProjectFew
from tests.linear.test_dense import assert_same, expected
from tests.support.closeness import float64
from tests.support.marks import KERNELS

K, FEATURES, RANKS = 24, (40, 17, 8), (3, 1, 5)


def make(rows=(2, 3), ranks=RANKS, seed=0, has_biases=False):
    """x, matrices and biases, one of them None unless `has_biases`, and dy of each layer."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    matrices = tuple(
        Matrix(dense=normal(K, n), factors=None if rank is None else Factors(normal(K, rank), normal(rank, n)))
        for n, rank in zip(FEATURES, ranks, strict=True)
    )
    biases = normal(FEATURES[0]), normal(FEATURES[1]) if has_biases else None, normal(FEATURES[2])
    return normal(*rows, K), matrices, biases, tuple(normal(*rows, n) for n in FEATURES)


def with_gradients(layers, x, matrices, biases, dy):
    y, pull_back = jax.vjp(layers, x, matrices, biases)
    return y, pull_back(dy)


def each_alone(x, matrices, biases, layer=expected):
    return tuple(layer(x, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True))


several = functools.partial(dense_several, implementation="interpret")


@pytest.mark.parametrize(
    ("ranks", "implementation"),
    [
        (RANKS, None),
        pytest.param(RANKS, "interpret", marks=pytest.mark.interpret),
        pytest.param((3, None, 5), "interpret", marks=pytest.mark.interpret),  # not all have LoRA: each alone
        pytest.param((None, None, None), "interpret", marks=pytest.mark.interpret),  # one kernel
    ],
)
def test_values_and_gradients(ranks, implementation):
    arrays = make(ranks=ranks, has_biases=not any(ranks))
    layers = functools.partial(dense_several, implementation=implementation)
    run = jax.jit(with_gradients, static_argnums=0)
    got = run(layers, *arrays)
    with jax.default_matmul_precision("highest"):
        assert_same(got, run(each_alone, *arrays))


@KERNELS
@pytest.mark.parametrize(
    ("num_rows", "dtype", "ranks"),
    [
        (1, "float16", (None,) * 3),
        (MOST_ROWS, "float32", (None,) * 3),
        (3, "float16", RANKS),
        (MOST_ROWS_WITH_TERMS - 7, "float16", (30, 8, 30)),  # two tiles of rows, and two steps of the terms
    ],
)
def test_few_rows_by_one_kernel(num_rows, dtype, ranks, implementation):
    x, matrices, biases, _ = jax.tree.map(lambda array: array.astype(dtype), make((num_rows,), ranks, has_biases=True))
    operands = ProjectFew(x, *(matrix.dense for matrix in matrices), *biases)
    has_terms = ranks[0] is not None
    if has_terms:
        rows = jnp.asarray(np.random.default_rng(1).standard_normal((num_rows, sum(ranks))), dtype)
        operands = operands._replace(low_rows=rows, **_terms(matrices))
    how = How(implementation, current_target())
    got = jax.jit(functools.partial(PROJECT_FEW, how))(operands)
    ends = np.cumsum(ranks) if has_terms else [0] * 3
    for y, matrix, bias, end in zip(got, matrices, biases, ends, strict=True):
        want = float64(x) @ float64(matrix.dense) + (0 if bias is None else float64(bias))
        if has_terms:
            b = float64(matrix.factors.b)
            want += float64(operands.low_rows)[:, end - len(b) : end] @ b
        np.testing.assert_allclose(float64(y), want, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-4)
    last = operands._replace(x=x[-1:], low_rows=operands.low_rows[-1:] if has_terms else None)
    alone = jax.jit(functools.partial(PROJECT_FEW, how))(last)
    for y, own in zip(got, alone, strict=True):
        np.testing.assert_array_equal(own[0], y[-1])


def _terms(matrices):
    return {f"low_{name}": matrix.factors.b for name, matrix in zip("qkv", matrices, strict=True)}


@KERNELS
def test_few_rows_with_adapters(implementation):
    arrays = jax.tree.map(lambda array: array.astype(jnp.float16), make(has_biases=True))
    few = functools.partial(dense_several, implementation=implementation)
    got = jax.jit(functools.partial(with_gradients, few))(*arrays)
    with jax.default_matmul_precision("highest"):
        want = with_gradients(each_alone, *jax.tree.map(lambda array: array.astype(jnp.float32), arrays))
    assert_same(got, want, 2e-2)


@pytest.mark.parametrize(
    ("num_rows", "kernels"),
    [
        (MOST_ROWS_WITH_TERMS, ["forward_kernel", "project_few_kernel"]),
        (MOST_ROWS_WITH_TERMS + 1, ["forward_kernel"] * 4),
    ],
)
def test_one_kernel_multiplies_few_rows_with_adapters(num_rows, kernels, launched):
    x, matrices, biases, _ = jax.tree.map(lambda array: array.astype(jnp.bfloat16), make((num_rows,), has_biases=True))
    with jgg.target(90, 132):
        few = jax.jit(functools.partial(dense_several, implementation="triton"))
        few.trace(x, matrices, biases).lower(lowering_platforms=("cuda",))
    assert [kernel for kernel, _ in launched] == kernels


@pytest.mark.interpret
def test_adapters_of_several_dtypes():
    x, matrices, biases, dy = make()
    first, *others = matrices
    matrices = (jax.tree.map(lambda array: array.astype(jnp.float16), first), *others)
    arrays = x.astype(jnp.float16), matrices, biases, tuple(own.astype(jnp.float16) for own in dy)
    got = jax.jit(functools.partial(with_gradients, several))(*arrays)
    want = with_gradients(functools.partial(each_alone, layer=functools.partial(dense, implementation="xla")), *arrays)
    assert jax.tree.map(lambda array: array.dtype, got) == jax.tree.map(lambda array: array.dtype, want)
    assert_same(got, want, 5e-3)


@pytest.mark.interpret
@pytest.mark.parametrize("ranks", [RANKS, (None, None, None)])
def test_under_vmap(ranks):
    elements = [make(rows=(3,), ranks=ranks, seed=seed)[:3] for seed in range(2)]
    arrays = jax.tree.map(lambda *each: jnp.stack(each), *elements)
    assert_same(jax.jit(jax.vmap(several))(*arrays), jax.jit(jax.vmap(each_alone))(*arrays))


@pytest.mark.interpret
@pytest.mark.parametrize("remat", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_over_a_stack_of_layers_with_frozen_weights(remat):
    elements = [make(rows=(5,), seed=seed) for seed in range(2)]
    x = elements[0][0]
    matrices, biases = jax.tree.map(lambda *each: jnp.stack(each), *[element[1:3] for element in elements])

    def loss(factors, layers):
        def step(x, inputs):
            factors, matrices, biases = inputs
            pairs = zip(jax.lax.stop_gradient(matrices), factors, strict=True)
            q, k, v = layers(x, tuple(frozen._replace(factors=own) for frozen, own in pairs), biases)
            return jnp.tanh(q[:, :K] + k.sum(1, keepdims=True) + v.sum(1, keepdims=True)), None

        step = jax.checkpoint(step, prevent_cse=False) if remat else step
        return jnp.sum(jax.lax.scan(step, x, (factors, matrices, biases))[0] ** 2)

    factors = tuple(matrix.factors for matrix in matrices)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    got = gradient(factors, several)
    with jax.default_matmul_precision("highest"):
        assert_same(got, gradient(factors, each_alone), 1e-4)


def test_inside_shard_map():
    x, matrices, biases, dy = make(rows=(4,))

    def loss(layers, *arrays):
        return sum(jnp.sum(y * own) for y, own in zip(layers(*arrays[:3]), arrays[3], strict=True))

    def split(*arrays):
        return jax.shard_map(
            lambda *arrays: jax.lax.psum(loss(several, *arrays), "data"),
            mesh=jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=(jax.P("data"), jax.P(), jax.P(), jax.P("data")),
            out_specs=jax.P(),
        )(*arrays)

    got = jax.jit(jax.grad(split, (0, 1, 2)))(x, matrices, biases, dy)
    with jax.default_matmul_precision("highest"):
        assert_same(got, jax.jit(jax.grad(functools.partial(loss, each_alone), (0, 1, 2)))(x, matrices, biases, dy))


def test_x_is_read_once_for_all_factors(launched):
    x, matrices, biases, dy = jax.tree.map(lambda array: array.astype(jnp.bfloat16), make(rows=(4096,)))

    def count(layers):
        before = len(launched)
        with jgg.target(90, 132):
            run = jax.jit(functools.partial(with_gradients, layers))
            run.trace(x, matrices, biases, dy).lower(lowering_platforms=("cuda",))
        return len(launched) - before

    alone = functools.partial(each_alone, layer=functools.partial(dense, implementation="triton"))
    # one launch rather than three for x @ a, for the gradient of a, and for the gradient of x
    assert count(functools.partial(dense_several, implementation="triton")) == count(alone) - 3 * 2


def test_a_mesh_can_split_what_is_reduced_for_x_evenly(launched):
    x, matrices, biases, dy = jax.tree.map(lambda array: array.astype(jnp.bfloat16), make(rows=(64,)))
    with jgg.target(90, 132):
        run = jax.jit(functools.partial(with_gradients, functools.partial(dense_several, implementation="triton")))
        run.trace(x, matrices, biases, dy).lower(lowering_platforms=("cuda",))
    columns = {array.shape[-1] for _, launch in launched for array in launch.arrays.values() if array.ndim}
    assert 48 in columns and sum(FEATURES[1:]) + sum(RANKS) == 34
