"""Layers together under plain `jax.jit` on eight CPU devices, with split and padded arrays; prints what was right.

Takes the numbers of the chains as arguments.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import dataclasses
import functools
import sys

import jax
import numpy as np

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


def main(seeds):
    assert jax.device_count() == 8
    for seed in seeds:
        rng = np.random.default_rng([9, seed])
        for program in compositions.chain(seed):
            program = dataclasses.replace(program, jitted=True, batch=None)
            shape = MESHES[rng.integers(len(MESHES))]
            names = ("all",) if len(shape) == 1 else ("a", "b", "c")[: len(shape)]
            mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
            chosen = specs(rng, names, program.layers)
            what = f"{seed}: {shape} {chosen} {program}"

            def place(name, array, *, mesh=mesh, chosen=chosen, stacked=program.loops == "scan"):
                spec = chosen.get(name, P())
                spec = P(None, *spec) if stacked and name != "x" else spec
                return jax.lax.with_sharding_constraint(array, jax.NamedSharding(mesh, spec))

            run = functools.partial(compositions.results_and_gradients, program, seed=seed)
            compositions.check(program, run(None, place=place), run("plain"), what)
        print(f"chain {seed}", flush=True)
    print("all right", flush=True)


if __name__ == "__main__":
    main(map(int, sys.argv[1:]))
