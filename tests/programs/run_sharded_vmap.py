"""vmap over sequences that an explicit mesh of two CPU devices splits; prints the implementations that were right."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from tests.support.closeness import assert_close

SEQUENCES, TOKENS, FEATURES, HIDDEN, EXPERTS = 4, 6, 8, 5, 4


def loss(weights, x, logits, implementation):
    """The loss of all sequences, which share the weights."""

    def one(x, logits):
        routing = jgg.route(logits, 2)
        return jgg.moe_mlp(x, *weights, routing, implementation=implementation, precision="highest")

    return jnp.sum(jnp.sin(jax.vmap(one)(x, logits)))


def main():
    rng = np.random.default_rng(0)
    shapes = (EXPERTS, 2 * HIDDEN, FEATURES), (EXPERTS, FEATURES, HIDDEN)
    weights = [jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32) for shape in shapes]
    shapes = (SEQUENCES, TOKENS, FEATURES), (SEQUENCES, TOKENS, EXPERTS)
    batch = [jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32) for shape in shapes]

    mesh = jax.make_mesh((2,), ("data",))
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    expected = step(weights, *batch, "xla")
    for implementation in ("xla", None):
        with jax.set_mesh(mesh):
            split = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
            shared = jax.device_put(weights, jax.NamedSharding(mesh, jax.P()))
            got = step(shared, *split, implementation)
        assert got[1].sharding.spec[0] == "data"
        assert_close(jax.tree.map(np.asarray, got), expected)
        print(implementation, flush=True)


if __name__ == "__main__":
    main()
