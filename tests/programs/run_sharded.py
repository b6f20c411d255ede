"""grouped_gemm on four CPU devices, data-parallel in jax.shard_map and interpreted under jax.jit alone.

Prints the implementations that were right.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from tests.support import oracle
from tests.support.cases import Case, make_data
from tests.support.comparison import small_configs

DEVICES = 4
P = jax.P
CASE = Case(
    "sharded",
    (3, 0, 6, 1),
    num_rows=12,
    in_features=4,
    out_features=5,
    topk=2,
    permute_x=True,
    permute_y=True,
    gather="random",
    weighted=True,
    biased=True,
)
ROWS = ("x", "topk_weights", "group_sizes", "gather_indices", "dy")  # every device has its own
SHARED = ("w", "bias")


def forward_and_backward(implementation, mesh):
    """Gradients of all arrays through shard_map: those of the shared ones are sums over the devices."""
    configs = dict(small_configs()) if implementation == "interpret" else {}

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=({name: P("data") for name in ROWS}, {name: P() for name in SHARED}),
        out_specs=(P("data"), P()),
        check_vma=True,
    )
    def on_device(rows, shared):
        dy = rows.pop("dy")
        y = jgg.grouped_gemm(
            **rows, **shared, **CASE.options, **configs, implementation=implementation, precision="highest"
        )
        return y, jax.lax.psum(jnp.sum(y * dy), "data")

    def loss(floats, fixed):
        rows = {name: floats[name] for name in ("x", "topk_weights")} | fixed
        y, value = on_device(rows, {name: floats[name] for name in SHARED})
        return value, y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def check_interpreted_under_jit_alone(part, want):
    """What is split over two devices is gathered for the interpreter, and rows are refused as they are for kernels."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @jax.jit
    def y(x, w):
        arguments = {name: getattr(part, name) for name in ("topk_weights", "group_sizes", "gather_indices", "bias")}
        configs = dict(small_configs())
        return jgg.grouped_gemm(
            x, w, **arguments, **CASE.options, **configs, implementation="interpret", precision="highest"
        )

    def split(array, *spec):
        return jax.device_put(array, jax.NamedSharding(mesh, P(*spec)))

    got = y(split(part.x, None, "data"), split(part.w, "data"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    try:
        y(split(part.x, "data"), split(part.w))
    except jax.errors.JaxRuntimeError as error:
        assert "must not be split over its rows" in str(error), error
    else:
        raise AssertionError("gathered rows without a word")


def main():
    assert jax.device_count() == DEVICES
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parts = [make_data(CASE, "float32", seed) for seed in range(DEVICES)]
    for i, part in enumerate(parts):
        part.group_sizes[:] = np.roll(part.group_sizes, i)
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ROWS}
    arrays |= {name: getattr(parts[0], name) for name in SHARED}
    floats = {name: arrays.pop(name) for name in ("x", "w", "topk_weights", "bias")}

    expected_y, expected = [], []
    for part in parts:
        arguments = {name: getattr(part, name) for name in ROWS if name != "dy"}
        arguments |= {name: floats[name] for name in SHARED} | CASE.options
        expected_y.append(oracle.grouped_gemm(**arguments))
        expected.append(oracle.gradients(part.dy, **arguments))
    expected = {
        "x": np.concatenate([gradients.x for gradients in expected]),
        "w": sum(gradients.w for gradients in expected),
        "topk_weights": np.concatenate([gradients.topk_weights for gradients in expected]),
        "bias": sum(gradients.bias for gradients in expected),
    }

    for implementation in ("xla", None, "interpret"):
        (_, y), gradients = forward_and_backward(implementation, mesh)(floats, arrays)
        np.testing.assert_allclose(y, np.concatenate(expected_y), rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        if implementation == "interpret":
            check_interpreted_under_jit_alone(parts[0], expected_y[0])
        print(implementation, flush=True)


if __name__ == "__main__":
    main()
