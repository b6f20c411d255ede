"""Programs of whole models that are exported once for any number of sequences and tokens."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgg.models
from tests.support.models import loaded, reference

FAMILY = "glm4_moe"


def exported(function, model, *types):
    """function(model, *arrays), exported for arrays of these types, as a function of the arrays."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)

    def run(leaves, *arrays):
        return function(nnx.merge(graphdef, structure.unflatten(leaves)), *arrays)

    with jgg.target(90):  # also where a GPU is known, for which there are kernels of known sizes
        program = jgg.export(jax.jit(run), platforms=("cpu",))(leaves, *types)
    return lambda *arrays: program.call(leaves, *arrays)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_logits_of_symbolic_shapes():
    expected = reference(FAMILY)
    shape = jax.export.symbolic_shape("batch, length")
    run = exported(lambda model, *arrays: model(*arrays), loaded(FAMILY), int32(*shape), int32(*shape))
    tokens = jnp.asarray(expected["tokens"], jnp.int32)
    np.testing.assert_allclose(run(tokens, jnp.zeros_like(tokens)), expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_decoding_with_caches_of_symbolic_shapes():
    expected, model = reference(FAMILY), loaded(FAMILY)
    batch, capacity = jax.export.symbolic_shape("batch, capacity")

    def step(model, tokens, positions, caches):
        x, caches = model.run_layers(tokens, positions, caches)
        return model.logits(x), caches

    caches = model.empty_caches(2, 3)
    types = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct((len(array), batch, capacity, *array.shape[3:]), array.dtype), caches
    )
    run = exported(step, model, int32(batch, 1), int32(batch, 1), types)
    for position in range(3):
        tokens = jnp.asarray(expected["tokens"][:, position : position + 1], jnp.int32)
        logits, caches = run(tokens, jnp.full((2, 1), position, jnp.int32), caches)
        np.testing.assert_allclose(logits[:, 0], expected["logits"][:, position], rtol=0, atol=1e-4)
