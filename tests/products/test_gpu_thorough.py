"""The program of tens of thousands of cases finds none in a few, and finds what is made wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.programs import gpu_thorough


@pytest.mark.sweep
def test_a_few_cases(capsys):
    few = ["--implementation=xla", "--configurations=1", "--cases=9", "--garbage=6", "--repeats=2", "--threads=1"]
    assert gpu_thorough.main(few) == 0
    assert "garbage: 6 run, 0 failed" in capsys.readouterr().out


def test_wrong_results_are_found():
    configuration = gpu_thorough.configuration_of(0, "xla")
    values = configuration.draw(gpu_thorough.key_of(0, 0, 0), 0.0)
    outputs = configuration.run(configuration.fill(), values)
    assert np.all(np.asarray(configuration.wrong(values, outputs)) <= 1)
    for index, output in enumerate(outputs):
        if output is not None:
            for wrong in (output.at[(-1,) * output.ndim].add(1), jnp.full_like(output, jnp.nan)):
                changed = [*outputs[:index], wrong, *outputs[index + 1 :]]
                assert np.asarray(configuration.wrong(values, changed))[index] > 1
