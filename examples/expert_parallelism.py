"""Experts on several devices: tokens go to them and come back, by all-gather or by ragged all-to-all.

    python examples/expert_parallelism.py    # on all GPUs, or on eight virtual devices of a CPU

Splits tokens over all devices and experts over four of eight, and compares with one device.
"""

import functools
import os

# has no effect on GPUs
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

import jgg
from jgg.sharding import MoESharding, sharded_moe_mlp

TOKENS, FEATURES, HIDDEN, EXPERTS, TOPK = 512, 32, 16, 16, 2


def make_arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (TOKENS, FEATURES), (TOKENS, EXPERTS), (EXPERTS, 2 * HIDDEN, FEATURES), (EXPERTS, FEATURES, HIDDEN)
    return [jax.random.normal(key, shape) / shape[-1] ** 0.5 for key, shape in zip(keys, shapes, strict=True)]


def one_device(x, logits, w_gate_up, w_down):
    return jgg.moe_mlp(x, w_gate_up, w_down, jgg.route(logits, TOPK), precision="highest"), 0


def several_devices(sharding, x, logits, w_gate_up, w_down):
    routing = jgg.route(logits, TOPK)  # each device routes its own tokens
    return sharded_moe_mlp(
        x, w_gate_up, w_down, routing.topk_weights, routing.topk_indices, sharding=sharding, precision="highest"
    )


def gradients(function, arrays):
    """Computes the gradients of all arrays, and how many rows found no room."""

    def loss(*arrays):
        y, overflow = function(*arrays)
        return jnp.sum(jnp.sin(y)), overflow

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)


def main():
    devices = jax.device_count()
    expert = 4 if devices % 4 == 0 else devices
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((devices // expert, expert), ("data", "expert"), axis_types=kinds)
    print(f"{devices} devices, experts over {expert}: mesh {dict(mesh.shape)}")
    arrays = make_arrays()
    want, _ = gradients(one_device, arrays)
    for exchange, buffer_factor in (("all_gather", None), ("ragged_all_to_all", None), ("ragged_all_to_all", 1.0)):
        sharding = MoESharding(mesh, data="data", expert="expert", exchange=exchange, buffer_factor=buffer_factor)
        tokens, experts = (sharding.named(spec) for spec in (sharding.token_spec, jax.P("expert")))
        split = jax.device_put(arrays, [tokens, tokens, experts, experts])
        got, overflow = gradients(functools.partial(several_devices, sharding), split)
        error = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(got, want, strict=True))
        room = "room for all rows" if buffer_factor is None else f"room for {buffer_factor:g} x the even share"
        print(f"{exchange}, {room}: {int(overflow)} of {TOKENS * TOPK} rows dropped, gradients differ by {error:.1e}")


if __name__ == "__main__":
    main()
