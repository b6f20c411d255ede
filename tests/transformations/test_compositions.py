"""Layers that are right alone are right together: any parameters frozen, in any layer, in any order of programs."""

import pytest

from tests.support import compositions, processes

# few programs to compile, in which gradients were zero while the backward rule asked JAX which of them are trained
QUICK, THOROUGH = (3, 7, 8), (10,)


def chains():
    """(implementation, seed): few in `make test`, more in CI and on a GPU, many in the sweep."""
    for seed in range(100):
        mark = () if seed in QUICK else pytest.mark.thorough if seed in THOROUGH else pytest.mark.sweep
        yield pytest.param(None, seed, marks=mark)
    for seed in range(24):
        yield pytest.param("triton", seed, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("implementation", "seed"), [*chains()])
def test_programs_after_each_other(implementation, seed):
    for number, program in enumerate(compositions.chain(seed)):
        got, want = (compositions.results_and_gradients(program, each, seed) for each in (implementation, "plain"))
        compositions.check(program, got, want, f"program {number}: {program}")


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param((3,), marks=pytest.mark.thorough, id="few"),
        pytest.param(range(10, 40), marks=pytest.mark.sweep, id="many"),
    ],
)
def test_programs_on_eight_devices(seeds):
    """Under plain jit, with weights, logits and tokens split or padded in ways that differ from program to program."""
    assert "all right" in processes.run_program("run_compositions", *seeds, timeout=1800)
