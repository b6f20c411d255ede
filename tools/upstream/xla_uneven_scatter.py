"""A report for https://github.com/openxla/xla, which was not sent yet.

SPMD partitioner: a scatter whose updates are split unevenly adds padding to element [0, 0]

A scatter-add is wrong, without an error, where its updates are split over one axis of a mesh that has another axis, and
the devices along the first do not divide them. The partitioner pads the updates and the indices to equal parts. It pads
the indices with 0, which is in bounds, so what the padding of the updates happens to hold is added to the operand's
element [0, 0]. On a mesh of one axis it pads them with -1, out of bounds, and the result is right.

JAX reads `x[rows, columns]` by a gather, whose transpose is such a scatter, so gradients are wrong or NaN where a
result of the gather is padded and split afterwards. Seen with JAX 0.11.1, 0.11.2 and 0.12.0.1, on CPUs, with Shardy.
The program needs jax alone. It prints what each mesh gives and ends with 1 while one is wrong: on (4,) it is right; on
(4, 2) and (2, 4) element [0, 0] is 1.0, the exp(0) of the padding, or 2.0, rather than 0.0.
"""

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np

ROWS, COLUMNS = jnp.arange(3)[:, None], jnp.array([[1, 2], [3, 4], [5, 6]])


def add(updates: jax.Array, sharding: jax.NamedSharding | None = None) -> jax.Array:
    """Zeros [3, 8] with exp(updates) added at 6 elements other than [0, 0]."""
    if sharding is not None:
        updates = jax.lax.with_sharding_constraint(updates, sharding)
    return jnp.zeros((3, 8)).at[ROWS, COLUMNS].add(jnp.exp(updates))


def main() -> int:
    want, is_wrong = np.asarray(add(jnp.zeros((3, 2)))), False
    for shape, names in (((4,), ("a",)), ((4, 2), ("a", "b")), ((2, 4), ("a", "b"))):
        kinds = (jax.sharding.AxisType.Auto,) * len(shape)
        mesh = jax.make_mesh(shape, names, devices=jax.devices()[: np.prod(shape)], axis_types=kinds)
        got = np.asarray(jax.jit(add, static_argnums=1)(jnp.zeros((3, 2)), jax.NamedSharding(mesh, jax.P("a"))))
        places = np.argwhere(got != want).tolist()
        is_wrong |= bool(places)
        print(jax.__version__, shape, f"[0, 0] is {got[0, 0]}, not {want[0, 0]}" if places else "right", places)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
