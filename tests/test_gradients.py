"""grouped_gemm under JAX's transformations: every one of them gives the oracle's values."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import EVERYTHING, Case, make_data
from comparison import oracle_arguments, small_configs
from jax.test_util import check_grads

import jgg

IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        None,
        pytest.param("interpret", marks=pytest.mark.interpret),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)
SMALL = {"group_sizes": (3, 0, 6, 1), "in_features": 4, "out_features": 5}
# rows past the last group too
WITH_EVERYTHING = Case("everything", num_rows=12, **SMALL, **EVERYTHING)
PLAIN = Case("plain", num_rows=12, w_layout="ekn", **SMALL)
IN_ORDER = Case("in-order", num_rows=12, gather="random", weighted=True, biased=True, **SMALL)
CASES = pytest.mark.parametrize("case", [WITH_EVERYTHING, PLAIN], ids=lambda case: case.name)
NAMES = ("x", "w", "topk_weights", "bias")


def differentiable(case, implementation):
    """grouped_gemm of a case as a function of its arrays, and the arrays to differentiate it at."""
    data = make_data(case, "float32")
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}
    fixed = jax.tree.map(jnp.asarray, {"group_sizes": data.group_sizes, "gather_indices": data.gather_indices})

    def function(arrays):
        return jgg.grouped_gemm(
            **arrays,
            **fixed,
            **case.options,
            **configs,
            implementation=implementation,
            precision="highest",
        )

    arrays = {name: getattr(data, name) for name in NAMES if getattr(data, name) is not None}
    return function, jax.tree.map(jnp.asarray, arrays), data


def expected_gradients(case, data, dy):
    gradients = oracle.gradients(dy, **oracle_arguments(case, data))
    return {name: g for name, g in zip(NAMES, gradients, strict=True) if g is not None}


def assert_close(got, expected, tolerance=1e-5):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), got, expected)


@CASES
def test_xla_to_second_order(case):
    function, arrays, _ = differentiable(case, "xla")
    check_grads(function, (arrays,), order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2, eps=1e-2)


@CASES
@IMPLEMENTATIONS
def test_reverse_mode(case, implementation):
    function, arrays, _ = differentiable(case, implementation)
    check_grads(function, (arrays,), order=1, modes=("rev",), atol=1e-2, rtol=1e-2, eps=1e-2)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_one_argument(name, implementation):
    function, arrays, data = differentiable(WITH_EVERYTHING, implementation)
    rest = {other: array for other, array in arrays.items() if other != name}

    @jax.jit
    def gradient(array):
        return jax.vjp(lambda array: function({**rest, name: array}), array)[1](jnp.asarray(data.dy))

    assert_close(gradient(arrays[name])[0], expected_gradients(WITH_EVERYTHING, data, data.dy)[name])


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


def forward_and_backward(case, implementation):
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}

    def function(x, w, topk_weights, bias, group_sizes, gather_indices, dy):
        def forward(x, w, topk_weights, bias):
            return jgg.grouped_gemm(
                x,
                w,
                group_sizes,
                gather_indices=gather_indices,
                topk_weights=topk_weights,
                bias=bias,
                **case.options,
                **configs,
                implementation=implementation,
                precision="highest",
            )

        y, vjp = jax.vjp(forward, x, w, topk_weights, bias)
        return y, *vjp(dy)

    return function


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


ORDER = (*NAMES, "group_sizes", "gather_indices", "dy")


@IMPLEMENTATIONS
def test_vmap_over_everything(implementation):
    batch = batch_of(WITH_EVERYTHING, 3)
    function = jax.jit(jax.vmap(forward_and_backward(WITH_EVERYTHING, implementation)))
    got = function(*(batch[name] for name in ORDER))
    for i in range(3):
        expected = expected_outputs(WITH_EVERYTHING, *(np.asarray(batch[name][i]) for name in ORDER))
        assert_close([output[i] for output in got], list(expected))


@IMPLEMENTATIONS
def test_vmap_over_rows_only(implementation):
    batch = batch_of(WITH_EVERYTHING, 2)
    shared = {"w", "topk_weights", "bias", "group_sizes", "gather_indices"}
    arguments = [batch[name][0] if name in shared else batch[name] for name in ORDER]
    in_axes = [None if name in shared else 0 for name in ORDER]
    function = jax.jit(jax.vmap(forward_and_backward(WITH_EVERYTHING, implementation), in_axes))
    got = function(*arguments)
    for i in range(2):
        one = [np.asarray(a if axis is None else a[i]) for a, axis in zip(arguments, in_axes, strict=True)]
        assert_close([output[i] for output in got], list(expected_outputs(WITH_EVERYTHING, *one)))


@IMPLEMENTATIONS
def test_gradient_of_shared_weights_through_vmap(implementation):
    batch = batch_of(WITH_EVERYTHING, 2)
    shared = {name: batch[name][0] for name in ("topk_weights", "bias", "group_sizes", "gather_indices")}
    configs = dict(small_configs()) if implementation in ("interpret", "triton") else {}

    @jax.jit
    def gradient(w):
        def forward(x, dy):
            options = {**shared, **WITH_EVERYTHING.options, **configs, "implementation": implementation}
            return jnp.sum(jgg.grouped_gemm(x, w, **options, precision="highest") * dy)

        return jnp.sum(jax.vmap(forward)(batch["x"], batch["dy"]))

    got = jax.grad(gradient)(batch["w"][0])
    arguments = {**shared, **WITH_EVERYTHING.options, "w": batch["w"][0]}
    expected = sum(
        oracle.gradients(np.asarray(batch["dy"][i]), **jax.tree.map(np.asarray, arguments | {"x": batch["x"][i]})).w
        for i in range(2)
    )
    assert_close(got, expected)


@IMPLEMENTATIONS
def test_nested_vmap(implementation):
    outer, inner = 2, 3
    batch = batch_of(IN_ORDER, outer * inner)
    nested = {name: array.reshape(outer, inner, *array.shape[1:]) for name, array in batch.items()}
    # the outer axis has its own weights, the inner one its own rows
    arguments = [nested["w"][:, 0] if name == "w" else nested[name] for name in ORDER]
    inner_axes = [None if name == "w" else 0 for name in ORDER]
    function = forward_and_backward(IN_ORDER, implementation)
    got = jax.jit(jax.vmap(jax.vmap(function, inner_axes)))(*arguments)
    for i in range(outer):
        for j in range(inner):
            one = [np.asarray(a[i] if axis is None else a[i, j]) for a, axis in zip(arguments, inner_axes, strict=True)]
            assert_close([output[i, j] for output in got], list(expected_outputs(IN_ORDER, *one)))


@IMPLEMENTATIONS
def test_checkpoint_saves_what_a_policy_names(implementation, capsys):
    function, arrays, data = differentiable(WITH_EVERYTHING, implementation)

    def loss(arrays):
        return jnp.sum(jnp.sin(function(jax.tree.map(jnp.sin, arrays))) * data.dy)

    expected = jax.grad(loss)(arrays)
    saved = {}
    for name in ("jgg_x", "another"):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        checkpointed = jax.checkpoint(loss, policy=policy)
        assert_close(jax.jit(jax.grad(checkpointed))(arrays), expected)
        jax.ad_checkpoint.print_saved_residuals(checkpointed, arrays)
        lines = capsys.readouterr().out.splitlines()
        saved[name] = [line for line in lines if line.startswith("f32[6,4] output of")]
    # plain JAX keeps what JAX wants, under no name
    assert len(saved["jgg_x"]) == (implementation != "xla")
    assert not saved["another"]


@IMPLEMENTATIONS
def test_scan_over_layers(implementation):
    case = Case("layer", (3, 0, 6, 1), num_rows=12, in_features=4, out_features=4)
    layers = [make_data(case, "float32", seed) for seed in range(3)]
    x, dy, group_sizes = layers[0].x, layers[0].dy, jnp.asarray(layers[0].group_sizes)

    @jax.jit
    def run(x, w):
        def layer(x, w):
            return jgg.grouped_gemm(x, w, group_sizes, implementation=implementation, precision="highest"), None

        y, vjp = jax.vjp(lambda x, w: jax.lax.scan(layer, x, w)[0], x, w)
        return y, *vjp(jnp.asarray(dy))

    y, dx, dw = run(x, jnp.stack([layer.w for layer in layers]))
    inputs = [x]
    for layer in layers:
        inputs.append(oracle.grouped_gemm(inputs[-1], layer.w, layer.group_sizes))
    assert_close(y, inputs.pop())
    for i, layer in reversed(list(enumerate(layers))):
        gradients = oracle.gradients(dy, inputs.pop(), layer.w, layer.group_sizes)
        assert_close(dw[i], gradients.w)
        dy = gradients.x
    assert_close(dx, dy)


@IMPLEMENTATIONS
def test_donated_rows(implementation):
    case = Case("donation", (13, 0, 6, 1), num_rows=24, in_features=16, out_features=16)
    function, arrays, data = differentiable(case, implementation)
    # y has the shape of x and may take its memory, but not before the last row of x has been read
    donating = jax.jit(lambda x, w: function({"x": x, "w": w}), donate_argnums=0)
    y = donating(arrays["x"], arrays["w"])
    assert arrays["x"].is_deleted()
    assert_close(y, oracle.grouped_gemm(data.x, data.w, data.group_sizes))


def test_export_for_cpu_and_cuda():
    function = forward_and_backward(WITH_EVERYTHING, None)
    data = make_data(WITH_EVERYTHING, "float32")
    arguments = [jnp.asarray(getattr(data, name)) for name in ORDER]
    with jgg.target(90):
        exported = jax.export.export(
            jax.jit(function),
            platforms=("cpu", "cuda"),
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")],
        )(*arguments)
    # the program for CUDA is in there
    assert "triton_kernel_call_ffi" in exported.mlir_module()
    restored = jax.export.deserialize(exported.serialize())
    assert set(restored.platforms) == {"cpu", "cuda"}
    expected = expected_outputs(WITH_EVERYTHING, *(getattr(data, name) for name in ORDER))
    assert_close(list(restored.call(*arguments)), list(expected))


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["run_sharded.py", "run_sharded_moe.py"])
def test_shard_map_over_several_devices(name):
    """In a process of its own, since the number of devices is fixed when JAX starts."""
    script = Path(__file__).parent / name
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["xla", "None", "interpret"]
