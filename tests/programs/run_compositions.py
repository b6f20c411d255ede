"""Layers together on eight CPU devices, with arrays split in ways that differ; prints what was right.

Takes a way and the numbers of the chains as arguments: "jit" for plain `jax.jit`, "sharding" for `sharded_moe_mlp`.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import dataclasses
import functools
import sys

import jax
import numpy as np

from jgg.sharding import MoESharding
from tests.support import compositions

P = jax.P
MESHES = ((8,), (4, 2), (2, 2, 2))


def specs(rng, names, layers):
    """How parameters are split, by name: weights evenly, as they must be, and 12 tokens also over 8 devices."""

    def choose(*values):
        return values[rng.integers(len(values))]

    experts = choose(None, *names) if all(layer.experts % 4 == 0 for layer in layers) else None
    if len(names) == 1:  # no 4 experts over 8 devices
        experts = None
    columns = choose(None, *(axis for axis in names if axis != experts))
    return {
        "x": P(),
        "logits": choose(P(), P(names[0]), P(tuple(names)), P(names[-1]), P(None, names[0])),
        "w_gate_up": P(experts, choose(None, columns)),
        "w_down": P(experts, None, choose(None, columns)),
        "b_gate_up": P(experts),
        "b_down": P(experts),
    }


def mesh_of(shape):
    names = ("all",) if len(shape) == 1 else ("a", "b", "c")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def by_jit(rng, program):
    """A way to run the program under plain jit, with arrays split as `specs` draws it: (what it is, layer, place)."""
    mesh = mesh_of(MESHES[rng.integers(len(MESHES))])
    chosen = specs(rng, mesh.axis_names, program.layers)

    def place(name, array):
        spec = chosen.get(name, P())
        spec = P(None, *spec) if program.loops == "scan" and name != "x" else spec
        return jax.lax.with_sharding_constraint(array, jax.NamedSharding(mesh, spec))

    return f"{mesh.shape} {chosen}", compositions.own_layer, place


def by_sharding(rng, program):
    """A way to run the program by `sharded_moe_mlp`, with axes that can split its tokens, experts and features."""
    mesh = mesh_of(MESHES[rng.integers(len(MESHES))])

    def drawn():
        roles = zip(rng.permutation(["data", "fsdp", "expert", "tensor"]), mesh.axis_names, strict=False)
        options = {"exchange": ("all_gather", "ragged_all_to_all"), "fsdp_splits": ("experts", "features")}
        options = {name: values[rng.integers(2)] for name, values in options.items()}
        axes = {str(role): axis for role, axis in roles if rng.integers(4)}
        return MoESharding(mesh, **axes, **options, prevent_cse=program.loops != "scan")

    def fits(sharding):
        experts, features = sharding.size(sharding.expert, sharding.fsdp), sharding.size(sharding.tensor)
        divides = all(layer.experts % experts == 0 and layer.hidden % features == 0 for layer in program.layers)
        return divides and compositions.TOKENS % sharding.size(*sharding.token_axes) == 0

    sharding = next(sharding for sharding in iter(drawn, None) if fits(sharding))
    return str(sharding), functools.partial(compositions.sharded_layer, sharding=sharding), lambda name, array: array


def main(way, *seeds):
    assert jax.device_count() == 8
    for seed in map(int, seeds):
        rng = np.random.default_rng([9, seed])
        for program in compositions.chain(seed):
            program = dataclasses.replace(program, jitted=True, batch=program.batch if way == "sharding" else None)
            what, layer, place = {"jit": by_jit, "sharding": by_sharding}[way](rng, program)
            got = compositions.results_and_gradients(program, layer, seed, place)
            want = compositions.results_and_gradients(program, compositions.plain_layer, seed)
            compositions.check(program, got, want, f"{seed}: {what} {program}")
        print(f"chain {seed}", flush=True)
    print("all right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
