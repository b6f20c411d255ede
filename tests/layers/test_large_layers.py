"""Whole layers with their router at real sizes: their memory, and few and many tokens."""

import dataclasses

import jax
import pytest

from benchmarks import layer as measuring
from jgg.tuning.workloads import load_layers


def gpu_layer(name, **changes):
    problem = measuring.LayerProblem(dataclasses.replace(load_layers()[name], **changes), "bfloat16")
    return problem, problem.operands()


@pytest.mark.gpu
@pytest.mark.large
def test_temporaries_of_a_training_step():
    """At most pre-activation, its gradient, hidden, its gradient and one array [M, H] are held at once."""
    problem, arrays = gpu_layer("qwen3-30b-a3b")
    layer, memory = problem.layer, measuring.measure_memory(problem, arrays)
    row_bytes = 2 * (2 * 2 * layer.expert_intermediate + 2 * layer.expert_intermediate + layer.hidden)
    assert memory.temporaries < 1.1 * problem.num_rows * row_bytes
    assert memory.total < 1.25 * problem.memory_limit


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("tokens", [1, 131_072])
def test_few_and_many_tokens(tokens):
    problem, arrays = gpu_layer("qwen3-30b-a3b", tokens=tokens, hidden=512, expert_intermediate=128)
    results = jax.jit(measuring.layer_function(problem, measuring.FORWARD_BACKWARD))(arrays)
    reference = measuring.LayerReference.of(problem, measuring.FORWARD_BACKWARD, arrays, results["topk_indices"])
    measurement = reference.check(results)
    assert measurement.status == "right", measurement
