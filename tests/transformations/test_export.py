"""Programs made in one process and run in another: exported, compiled ahead of time, cached."""

import contextlib
import functools
import json

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support import oracle, processes
from tests.support.cases import make_data
from tests.support.closeness import assert_close
from tests.support.marks import PLAIN_JAX, TRITON, on
from tests.support.transforms import ORDER, WITH_EVERYTHING, expected_outputs, passes_of

TOKENS, FEATURES, HIDDEN, EXPERTS, TOPK = 24, 16, 32, 4, 2
KERNEL_CALL = "triton_kernel_call_ffi"
ON = [
    pytest.param(("cpu", "cuda"), id="cpu"),  # the program for CUDA is only inspected
    pytest.param(("cuda",), id="cuda", marks=pytest.mark.gpu),
]


# the tests' own process may have claimed most of a GPU's memory
BESIDE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def serve(params, x, quantization=None):
    routing = jgg.route(x @ params["router"], TOPK)
    return jgg.moe_mlp(x, params["up"], params["down"], routing, precision="highest", quantization=quantization)


def train(params, x, target):
    """The loss and the parameters after a step of gradient descent."""
    loss, gradients = jax.value_and_grad(lambda params: jnp.mean((serve(params, x) - target) ** 2))(params)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments():
    rng = np.random.default_rng(0)
    shapes = {"router": (FEATURES, EXPERTS), "up": (EXPERTS, 2 * HIDDEN, FEATURES), "down": (EXPERTS, FEATURES, HIDDEN)}
    params = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) / 4 for name, shape in shapes.items()}
    x, target = (jnp.asarray(rng.standard_normal((TOKENS, FEATURES)), jnp.float32) for _ in range(2))
    return params, x, target


@pytest.mark.thorough
@pytest.mark.parametrize("platforms", ON)
def test_steps_run_where_triton_is_not_installed(platforms, tmp_path):
    params, x, target = arguments()
    steps = {"train": (train, (params, x, target)), "serve": (serve, (params, x))}
    with jgg.target(90) if "cpu" in platforms else contextlib.nullcontext():
        for name, (step, inputs) in steps.items():
            exported = jgg.export(jax.jit(step), platforms=platforms)(*inputs)
            assert exported.platforms == platforms
            assert exported.mlir_module().count(f"@{KERNEL_CALL}") >= 2
            (tmp_path / f"{name}.program").write_bytes(exported.serialize())
            np.savez(tmp_path / f"{name}.npz", *jax.tree.leaves(inputs))
    processes.run_program("run_exported", tmp_path, *steps, **BESIDE)
    for name, (step, inputs) in steps.items():
        expected = jax.tree.leaves(jax.jit(step)(*inputs))
        with np.load(tmp_path / f"{name}.out.npz") as results:
            got = [results[f"arr_{i}"] for i in range(len(expected))]
        assert_close(got, expected)


@pytest.mark.sweep
def test_gradients_of_an_exported_function():
    params, x, _ = arguments()
    data = jgg.export(jax.jit(serve), platforms=("cpu", "cuda"))(params, x).serialize(vjp_order=1)
    restored = jax.export.deserialize(data)

    def loss(serve):
        return lambda params, x: jnp.sum(jnp.sin(serve(params, x)))

    got, expected = (jax.jit(jax.grad(loss(f), argnums=(0, 1)))(params, x) for f in (restored.call, serve))
    assert_close(got, expected)


def test_export_is_what_jax_export_refuses():
    """The name of the one check that is off is the one that JAX asks to turn off."""
    struct = jax.ShapeDtypeStruct
    shapes = struct((8, 16), "float32"), struct((2, 16, 4), "float32"), struct((2,), "int32")
    exported = jax.export.export(jax.jit(jgg.ragged_dot), platforms=("cuda",))
    with pytest.raises(ValueError, match=f"no compatibility guarantees(.|\n)*@{KERNEL_CALL}"):
        exported(*shapes)
    assert jgg.export(jax.jit(jgg.ragged_dot), platforms=("cuda",))(*shapes).out_avals[0].shape == (8, 4)


@pytest.mark.thorough
def test_shapes_known_when_it_runs():
    """One exported program for any number of rows, and of features; of any implementation it is the plain one."""
    m, k, n, tokens = jax.export.symbolic_shape("m, k, n, tokens")
    struct = jax.ShapeDtypeStruct
    rng = np.random.default_rng(0)

    def products(lhs, rhs, group_sizes, dy):
        y, vjp = jax.vjp(lambda lhs, rhs: jgg.ragged_dot(lhs, rhs, group_sizes, "highest"), lhs, rhs)
        return y, *vjp(dy)

    shapes = (m, k), (3, k, n), (m, n)
    lhs, rhs, dy = (struct(shape, "float32") for shape in shapes)
    exported = jgg.export(jax.jit(products), platforms=("cpu", "cuda"))(lhs, rhs, struct((3,), "int32"), dy)
    restored = jax.export.deserialize(exported.serialize())
    for sizes in {"m": 1, "k": 5, "n": 2}, {"m": 200, "k": 3, "n": 17}:
        lhs, rhs, dy = (
            rng.standard_normal([sizes.get(str(size), size) for size in shape]).astype("float32") for shape in shapes
        )
        group_sizes = np.array([sizes["m"] // 3, 0, sizes["m"] // 2], np.int32)
        given = {"x": lhs, "w": rhs, "group_sizes": group_sizes, "w_layout": "ekn"}
        dx, dw, *_ = oracle.gradients(dy, **given)
        assert_close(list(restored.call(lhs, rhs, group_sizes, dy)), [oracle.grouped_gemm(**given), dx, dw])

    params, x, _ = arguments()
    for recipe in None, jgg.Fp8(keeps_weights=True):
        server = functools.partial(serve, quantization=recipe)
        exported = jgg.export(jax.jit(server))(params, struct((tokens, FEATURES), x.dtype))
        assert_close(exported.call(params, x[:5]), jax.jit(server)(params, x[:5]))


@pytest.mark.parametrize(("quantize", "shape"), [(jgg.quantize_tokens, "tokens, k"), (jgg.quantize_weights, "e, n, k")])
def test_quantizing_shapes_known_when_it_runs(quantize, shape):
    def run(array):
        quantized = quantize(array)
        return quantized, quantized.dequantize(jnp.float32)

    symbols = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32")
    exported = jgg.export(jax.jit(run), platforms=("cpu", "cuda"))(symbols)
    for sizes in {"tokens": 3, "e": 2, "n": 1, "k": 300}, {"tokens": 130, "e": 1, "n": 128, "k": 5}:
        shape = [sizes.get(str(size), size) for size in symbols.shape]
        array = np.random.default_rng(0).standard_normal(shape).astype("float32")
        got, want = (jax.tree.leaves(results) for results in (exported.call(array), jax.jit(run)(array)))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("shapes", "implementation", "message"),
    [
        ("m,16 2,16,4", "triton", "implementation must be None or 'xla' for symbolic shapes, .* got 'triton'"),
        ("8,16 g,16,4", None, r"group_sizes must have a known number of groups, got \[g\]"),
    ],
)
def test_shapes_that_must_be_known(shapes, implementation, message):
    lhs, rhs = (jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32") for shape in shapes.split())
    group_sizes = jax.ShapeDtypeStruct(rhs.shape[:1], "int32")
    function = functools.partial(jgg.ragged_dot, implementation=implementation)
    with pytest.raises(ValueError, match=message):
        jgg.export(jax.jit(function))(lhs, rhs, group_sizes)


@on(PLAIN_JAX, None, TRITON)
def test_compiled_ahead_of_time(implementation):
    data = make_data(WITH_EVERYTHING, "float32")
    arrays = [jnp.asarray(getattr(data, name)) for name in ORDER]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    compiled = jax.jit(passes_of(WITH_EVERYTHING, implementation)).lower(*shapes).compile()
    expected = expected_outputs(WITH_EVERYTHING, *(getattr(data, name) for name in ORDER))
    assert_close(list(compiled(*arrays)), list(expected))


@pytest.mark.thorough
@on(None, TRITON)
def test_second_start_finds_the_compiled_program(implementation, tmp_path):
    arguments = "run_second_start", tmp_path, implementation
    first, second = (json.loads(processes.run_program(*arguments, **BESIDE)) for _ in range(2))
    assert (first["hits"], first["misses"]) == (0, 1)
    assert (second["hits"], second["misses"]) == (1, 0)
    assert second["program"] == first["program"]  # for CUDA, so that it is found there too
