"""Data-parallel moe_mlp in jax.shard_map on four CPU devices; prints the implementations that were right."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from tests.support.moe_oracle import expected, make

DEVICES, EXPERTS = 4, 5
P = jax.P
SHARED = ("w_gate_up", "w_down", "b_gate_up", "b_down")


def gradients(implementation, mesh, floats, chosen, dy):
    """y and the gradients through shard_map; tokens are split, and those of the weights are sums over the devices."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P("data"), P("data"), {name: P() for name in SHARED}),
        out_specs=(P("data"), P()),
        check_vma=True,
    )
    def on_device(x, topk_weights, chosen, dy, shared):
        routing = jgg.Routing(topk_weights, chosen, *jgg.sort_by_expert(chosen, EXPERTS))
        y = jgg.moe_mlp(x, **shared, routing=routing, implementation=implementation, precision="highest")
        return y, jax.lax.psum(jnp.sum(y * dy), "data")

    def loss(floats):
        y, value = on_device(floats["x"], floats["topk_weights"], chosen, dy, {name: floats[name] for name in SHARED})
        return value, y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(floats)
    return y, grads


def main():
    assert jax.device_count() == DEVICES
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    floats, chosen, dy = make(biased=True, tokens=12, experts=EXPERTS)
    want_y, want = expected(floats, chosen, dy, "swiglu", False, "enk")
    for implementation in ("xla", None, "interpret"):
        y, grads = gradients(implementation, mesh, floats, jnp.asarray(chosen), dy)
        np.testing.assert_allclose(y, want_y, rtol=1e-4, atol=1e-5)
        for name, gradient in grads.items():
            np.testing.assert_allclose(gradient, want[name], rtol=1e-4, atol=1e-5, err_msg=name)
        print(implementation, flush=True)


if __name__ == "__main__":
    main()
