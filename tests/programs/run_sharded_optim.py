"""Muon and 8-bit states on eight CPU devices against one: what they compute, and what the devices send each other.

With "few" as an argument it does only what is of single parameters by Muon, with "states" only 8-bit states, and with
"others" only a whole model's step.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import contextlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers

import jgg.models
import jgg.optim
from jgg.sharding import MoESharding
from tests.support.models import config_of

P = jax.P
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
AXES = ("a", "b", "c")
STACK = (3, 8, 16, 24)  # layers, experts, features of a matrix
# name: (shape, spec, collectives of one step, without the sums of squares)
CASES = {
    "experts where they live": (STACK, P(None, ("a", "b", "c")), set()),
    "layers and experts": ((2, 8, 16, 24), P("a", ("b", "c")), set()),
    "experts and rows": (STACK, P(None, "a", ("b", "c")), {"all-to-all"}),
    "experts, rows and columns": (STACK, P(None, "a", "b", "c"), {"all-to-all"}),
    "columns; work is shared along the others": (STACK, P(None, None, None, "b"), {"all-to-all", "all-gather"}),
    "rows, fewer experts than devices": ((3, 3, 16, 24), P(None, None, ("a", "b", "c")), {"all-to-all"}),
    "layers' matrices": ((4, 16, 24), P(None, ("a", "b", "c")), {"all-to-all"}),
    "a matrix": ((16, 24), P("b", "a"), {"all-to-all"}),
    "whole, which no axis can share": ((3, 5, 16, 24), P(), set()),
    "whole": (STACK, P(), {"all-gather"}),
}
# on Explicit axes, where JAX knows what is split before XLA does
EXPLICIT_CASES = "layers and experts", "columns; work is shared along the others", "layers' matrices"


def updates_of(optimizer, gradients, params, steps=2):
    state, updates = optimizer.init(params), None
    update = jax.jit(optimizer.update).lower(gradients, state, params).compile()
    for _ in range(steps):
        updates, state = update(gradients, state, params)
    return updates, state, update.as_text()


def random(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def collectives(program):
    """Kinds of collectives, with the most numbers that each moves."""
    found = {}
    for results, kind in re.findall(
        r" = (\S+|\(.*?\)) (all-to-all|all-gather|all-reduce|collective-permute)\(", program
    ):
        shapes = re.findall(r"\w+\[([\d,]*)\]", results)
        size = sum(int(np.prod([int(each) for each in dims.split(",") if each])) for dims in shapes)
        found[kind] = max(found.get(kind, 0), size)
    return found


def check_parameters(kind, names, is_told=True):
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(kind,) * 3)
    for seed, name in enumerate(names):
        shape, spec, wanted = CASES[name]
        options = {"ns_coeffs": "polar_express", "weight_decay": 0.1}
        g, p = {"w_down": random(shape, seed)}, {"w_down": random(shape, seed + 100)}
        one, state, _ = updates_of(jgg.optim.muon(0.1, **options), g, p)
        sharding = jax.NamedSharding(mesh, spec)
        g, p = (jax.device_put(each, sharding) for each in (g, p))
        with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
            several = jgg.optim.muon(0.1, **options, shardings={"w_down": sharding} if is_told else None)
            got, got_state, program = updates_of(several, g, p)
        np.testing.assert_allclose(got["w_down"], one["w_down"], atol=2e-3, err_msg=name)
        assert got["w_down"].sharding.is_equivalent_to(sharding, len(shape)), name
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), got_state, state)
        found = collectives(program)
        assert found.pop("all-reduce", 0) <= 2 * np.prod(shape[:-2]), name  # sums of two sizes
        assert set(found) == (wanted if kind == AUTO else wanted - {"all-gather"}), (name, found)
        assert max(found.values(), default=0) <= 8 * np.prod(shape[-3:]), (name, found)  # padded with zeros
        print(kind, name, found)


def check_axes_in_another_order():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AUTO,))
    numbers = {"kernel": MuonDimensionNumbers((1, 2), 3)}
    g = {"kernel": random((4, 2, 8, 6), 0)}
    one, *_ = updates_of(jgg.optim.muon(0.1, muon_weight_dimension_numbers=numbers), g, g)
    sharding = jax.NamedSharding(mesh, P(None, None, "a"))
    g = jax.device_put(g, sharding)
    got, *_ = updates_of(
        jgg.optim.muon(0.1, muon_weight_dimension_numbers=numbers, shardings={"kernel": sharding}), g, g
    )
    np.testing.assert_allclose(got["kernel"], one["kernel"], atol=2e-3)


def check_axes_of_both_kinds():
    """Types say what Explicit axes split, and XLA decides along the Auto axis."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(EXPLICIT, AUTO, EXPLICIT))
    for shape, spec in (
        ((2, *STACK[1:]), P("b", "a", None, "c")),
        (STACK[1:], P("a", "b", "c")),
        (STACK[2:], P("c", "b")),
    ):
        g = {"w_down": random(shape, 0)}
        one, *_ = updates_of(jgg.optim.muon(0.1), g, g)
        with jax.set_mesh(mesh):
            g = jax.device_put(g, jax.NamedSharding(mesh, spec))
            got, *_ = updates_of(jgg.optim.muon(0.1), g, g)
        np.testing.assert_allclose(got["w_down"], one["w_down"], atol=2e-3, err_msg=str(spec))


def check_states_in_8_bits(kind):
    """Codes are where their parameter is, exponents too if no block is split, and nothing but scalars is sent."""
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(kind,) * 3)
    for shape, spec, sent in (
        ((2, 8, 16, 768), P(None, "a", None, ("b", "c")), False),
        ((4, 96, 64), P(None, ("a", "b")), False),
        ((64, 1408), P(None, ("a", "b", "c")), False),
        ((64, 132), P("b", ("a", "c")), True),  # two blocks, and four devices
    ):
        if sent and kind == AUTO:  # XLA would put the exponents somewhere else after a step
            continue
        optimizer = jgg.optim.states_in_8_bits(optax.adamw(0.1))
        g, p = {"w": random(shape, 0)}, {"w": random(shape, 1)}
        one, state, _ = updates_of(optimizer, g, p)
        sharding = jax.NamedSharding(mesh, spec)
        g, p = (jax.device_put(each, sharding) for each in (g, p))
        with jax.set_mesh(mesh) if kind == EXPLICIT else contextlib.nullcontext():
            first = optimizer.init(p)
            got, got_state, program = updates_of(optimizer, g, p)
        np.testing.assert_allclose(got["w"], one["w"], rtol=1e-5, atol=1e-6)
        jax.tree.map(np.testing.assert_array_equal, got_state, state)
        of_exponents = P(*spec[:-1]) if sent else spec
        for each in (first, got_state):
            assert each.inner[0].mu["w"].sharding.is_equivalent_to(sharding, len(shape)), shape
            own = each.exponents[0].nu["w"]
            assert own.sharding.is_equivalent_to(jax.NamedSharding(mesh, of_exponents), own.ndim), (shape, own.sharding)
        assert bool(collectives(program)) == sent, (shape, collectives(program))
        print(kind, "8 bits", shape, collectives(program))


def check_model():
    """A whole model's step, with shardings and without, where XLA decides."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (8, 9)))
    config = jgg.models.model_config(config_of("qwen3_moe"))
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AUTO,) * 3)
    results = []
    for sharding, is_told in ((None, False), (MoESharding(mesh, fsdp="a", expert="b", data="c"), True)):
        model = jgg.models.Decoder(config, dtype="float32", sharding=sharding, rngs=nnx.Rngs(0))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        shardings = jax.tree.map(lambda p: p.sharding, params) if is_told else None
        optimizer = jgg.optim.muon(0.02, ns_steps=2, adam_learning_rate=1e-3, shardings=shardings)

        @jax.jit
        def step(params, state, rest, graphdef=graphdef, optimizer=optimizer):
            def loss(params):
                return nnx.merge(graphdef, params, rest).loss(tokens[:, :-1], tokens[:, 1:])

            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        state, losses = optimizer.init(params), []
        for _ in range(3):
            params, state, value = step(params, state, rest)
            losses.append(float(value))
        results.append(losses)
    np.testing.assert_allclose(results[1], results[0], rtol=5e-3)
    print("a model's losses", results)


def main(which="all"):
    if which in ("all", "states"):
        check_states_in_8_bits(AUTO)
        check_states_in_8_bits(EXPLICIT)
    if which in ("all", "few"):
        check_parameters(AUTO, CASES)
        check_parameters(EXPLICIT, EXPLICIT_CASES)
        check_parameters(EXPLICIT, EXPLICIT_CASES[1:2], is_told=False)  # the types of arrays say it
        check_axes_in_another_order()
        check_axes_of_both_kinds()
    if which in ("all", "others"):
        with jax.numpy_dtype_promotion("standard"):
            check_model()
    print("all right")


if __name__ == "__main__":
    main(*sys.argv[1:])
