"""Layers that are right alone are right together: any parameters frozen, in any layer, in any order of programs."""

import functools

import pytest

from tests.support import compositions, processes

# few programs to compile, in which gradients were zero while the backward rule asked JAX which of them are trained
QUICK = 3, 7, 8


def chains():
    """(implementation, seed): few in CI, more on a GPU, many in the sweep."""
    for seed in range(100):
        yield pytest.param(None, seed, marks=() if seed in QUICK else pytest.mark.sweep)
    for seed in range(24):
        yield pytest.param("triton", seed, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("implementation", "seed"), [*chains()])
def test_programs_after_each_other(implementation, seed):
    for number, program in enumerate(compositions.chain(seed)):
        layers = functools.partial(compositions.own_layer, implementation=implementation), compositions.plain_layer
        got, want = (compositions.results_and_gradients(program, layer, seed) for layer in layers)
        compositions.check(program, got, want, f"program {number}: {program}")


@pytest.mark.parametrize(
    ("way", "seeds"),
    [
        pytest.param("jit", (3,), marks=pytest.mark.thorough, id="few"),
        pytest.param("jit", range(10, 40), marks=pytest.mark.sweep, id="many"),
        pytest.param("sharding", (23,), marks=pytest.mark.sweep, id="few with sharding"),
        pytest.param("sharding", range(10, 40), marks=pytest.mark.sweep, id="many with sharding"),
    ],
)
def test_programs_on_eight_devices(way, seeds):
    """Split in ways that differ from program to program: by plain jit, also padded, or each layer by a MoESharding."""
    assert "all right" in processes.run_program("run_compositions", way, *seeds, timeout=1800)
