"""grouped_gemm and moe_mlp on four CPU devices: data-parallel in jax.shard_map, split by jax.jit, and under vmap.

Takes implementations as arguments, which must be "None" for the default one. Prints what was right.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from tests.support import moe_oracle, oracle
from tests.support.cases import Case, make_data
from tests.support.closeness import assert_close
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
    """What is split over two devices is gathered for the interpreter; split rows are refused, as for kernels."""
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


def check_products(mesh, implementations):
    """Data-parallel products."""
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

    for implementation in implementations:
        (_, y), gradients = forward_and_backward(implementation, mesh)(floats, arrays)
        np.testing.assert_allclose(y, np.concatenate(expected_y), rtol=1e-5, atol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
        if implementation == "interpret":
            check_interpreted_under_jit_alone(parts[0], expected_y[0])
        print(f"products, {implementation}", flush=True)


EXPERTS = 5
SHARED_OF_MLP = ("w_gate_up", "w_down", "b_gate_up", "b_down")


def gradients_of_mlp(implementation, mesh, floats, chosen, dy):
    """y and the gradients through shard_map; tokens are split, and those of the weights are sums over the devices."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P("data"), P("data"), {name: P() for name in SHARED_OF_MLP}),
        out_specs=(P("data"), P()),
        check_vma=True,
    )
    def on_device(x, topk_weights, chosen, dy, shared):
        routing = jgg.Routing(topk_weights, chosen, *jgg.sort_by_expert(chosen, EXPERTS))
        y = jgg.moe_mlp(x, **shared, routing=routing, implementation=implementation, precision="highest")
        return y, jax.lax.psum(jnp.sum(y * dy), "data")

    def loss(floats):
        y, value = on_device(
            floats["x"], floats["topk_weights"], chosen, dy, {name: floats[name] for name in SHARED_OF_MLP}
        )
        return value, y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)
    return y, grads


def check_mlp(mesh, implementations):
    """Data-parallel layers."""
    floats, chosen, dy = moe_oracle.make(biased=True, tokens=12, experts=EXPERTS)
    want_y, want = moe_oracle.expected(floats, chosen, dy, "swiglu", False, "enk")
    for implementation in implementations:
        y, grads = gradients_of_mlp(implementation, mesh, floats, jnp.asarray(chosen), dy)
        assert_close((y, grads), (want_y, want), 1e-4)
        print(f"layers, {implementation}", flush=True)


def loss_of_sequences(weights, x, logits, implementation):
    """The loss of all sequences, which share the weights."""

    def one(x, logits):
        routing = jgg.route(logits, 2)
        return jgg.moe_mlp(x, *weights, routing, implementation=implementation, precision="highest")

    return jnp.sum(jnp.sin(jax.vmap(one)(x, logits)))


def check_vmap(implementations):
    """vmap over sequences that an explicit mesh of two devices splits: each device runs its own part."""
    sequences, tokens, features, hidden = 4, 6, 8, 5
    rng = np.random.default_rng(0)
    shapes = (EXPERTS, 2 * hidden, features), (EXPERTS, features, hidden)
    weights = [jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32) for shape in shapes]
    shapes = (sequences, tokens, features), (sequences, tokens, EXPERTS)
    batch = [jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32) for shape in shapes]

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    step = jax.jit(jax.grad(loss_of_sequences, argnums=(0, 1, 2)), static_argnums=3)
    expected = step(weights, *batch, "xla")
    for implementation in {"xla", None}.intersection(implementations):
        with jax.set_mesh(mesh):
            split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
            shared = jax.device_put(weights, jax.NamedSharding(mesh, jax.P()))
            got = step(shared, *split, implementation)
        assert got[1].sharding.spec[0] == "data"
        assert_close(jax.tree.map(np.asarray, got), expected)
        print(f"vmap, {implementation}", flush=True)


def main(*names):
    implementations = [None if name == "None" else name for name in names]
    assert jax.device_count() == DEVICES
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    check_products(mesh, implementations)
    check_mlp(mesh, implementations)
    check_vmap(implementations)
    print("all right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
