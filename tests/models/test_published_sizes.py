"""At the sizes of published models, kernels compute what they compute at the size of a test."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgg
import jgg.models
from benchmarks.model_configs import CONFIGS, config_of

_LAYERS = {"gemma-4-26b-a4b": 6, "qwen3.5-35b-a3b": 4}  # so that each kind of layer is there
# what an operation may do beside its kernel: fill what the kernel writes to, and give it float32
_BESIDE_KERNELS = {"broadcast_in_dim", "reshape", "convert_element_type", "reduce_precision"}


def computed_by_xla(compute, *arguments):
    """The operations of jgg that compute floats with XLA on an H100, and what they compute."""
    with jgg.target(90):
        lowered = jax.jit(compute).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    places = dict(re.findall(r'(#loc\d+) = loc\("([^"]*)"', lowered))
    lines = (line for line in lowered.splitlines() if re.search(r"x(bf16|f32)>", line))
    found = (re.search(r"loc\((#loc\d+)\)", line) for line in lines)
    steps = (re.search(r"jgg\.(\w+)\[[^]]*\](?:/.*)?/(\w+)$", places.get(place[1], "")) for place in found if place)
    return {step.groups() for step in steps if step and step[2] not in _BESIDE_KERNELS}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("launched")
def test_no_operation_leaves_its_work_to_xla(name):
    config = config_of(name, _LAYERS.get(name, 2), is_small=False)
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = nnx.eval_shape(lambda: jgg.models.Decoder(config, batch_invariant=True, rngs=nnx.Rngs(0), **dtypes))
    graphdef, state = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def losses(state, tokens):
        return nnx.merge(graphdef, state).losses(tokens, tokens)

    def decoded(state, tokens):
        model = nnx.merge(graphdef, state)
        x, _ = model.run_layers(tokens[:, :1], tokens[:, :1], model.empty_caches(2, 32))
        return model.logits(x)

    assert computed_by_xla(losses, state, tokens) == set()
    assert computed_by_xla(decoded, state, tokens) == set()
