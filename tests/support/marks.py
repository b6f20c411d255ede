"""Which tests run where: the implementations, and what is not needed at every change."""

import pytest

# JAX transforms its own operations here, which few changes can break; tests/products/test_contract.py has it in CI too
PLAIN_JAX = pytest.param("xla", marks=pytest.mark.sweep)
INTERPRET = pytest.param("interpret", marks=pytest.mark.interpret)
# of a transformation or a layer of products that tests/products and test_generated_layer.py interpret in CI
RARELY_INTERPRET = pytest.param("interpret", marks=[pytest.mark.interpret, pytest.mark.sweep])
TRITON = pytest.param("triton", marks=pytest.mark.gpu)


def on(*implementations):
    """Runs a test with each of these as its `implementation`."""
    return pytest.mark.parametrize("implementation", implementations)


EVERYWHERE = on(None, PLAIN_JAX, INTERPRET, TRITON)
RARELY_INTERPRETED = on(None, PLAIN_JAX, RARELY_INTERPRET, TRITON)
KERNELS = on(INTERPRET, TRITON)


def thorough_but(quick, cases, mark=pytest.mark.thorough):
    """Parameters from cases by name, or from names; those not among the quick ones are marked thorough, or as given."""
    values = cases.values() if isinstance(cases, dict) else cases
    return [
        pytest.param(value, id=str(name), marks=[mark] * (name not in quick))
        for name, value in zip(cases, values, strict=True)
    ]


def each_nth(step, cases):
    """Parameters from cases, of which each nth runs in CI; the others are left to the sweep."""
    by_name = {case.name: case for case in cases}
    return thorough_but(list(by_name)[::step], by_name, pytest.mark.sweep)
