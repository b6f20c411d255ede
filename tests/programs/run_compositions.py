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
from tests.support.closeness import distance

P = jax.P
MESHES = ((8,), (4, 2), (2, 2, 2))


def specs(rng, names, layers):
    """How parameters are split, by name: weights evenly, as they must be, and 12 tokens also over 8 devices."""

    def choose(*values):
        return values[rng.integers(len(values))]

    axes = [None, *names]
    by_experts = {"experts": choose(*axes)} if all(layer.experts % 4 == 0 for layer in layers) else {}
    first = by_experts.get("experts") if names[0] != "all" else None
    columns = choose(*(axis for axis in axes if axis != first or axis is None))
    if names[0] == "all":  # 8 devices: 16 features, and 8 or 24 hidden ones
        first = None
    return {
        "x": P(),
        "logits": choose(P(), P(names[0]), P(tuple(names)), P(names[-1]), P(None, names[0])),
        "w_gate_up": P(first, choose(None, columns)),
        "w_down": P(first, None, choose(None, columns)),
        "b_gate_up": P(first),
        "b_down": P(first),
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
            (y, got), (want_y, want) = run(None, place=place), run("plain")
            tolerance = 0.25 if any(layer.is_quantized for layer in program.layers) else 1e-4
            assert distance(y, want_y) < tolerance, what
            for name, expected in want.items():
                error = distance(got[name], expected) if np.any(expected) else float(np.any(got[name]))
                assert error < tolerance, f"{name} {error}: {what}"
        print(f"chain {seed}", flush=True)
    print("all right", flush=True)


if __name__ == "__main__":
    main(map(int, sys.argv[1:]))
