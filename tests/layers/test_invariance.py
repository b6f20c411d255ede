"""A token's result does not depend, in its last bit, on the other tokens, on their number or order, or on padding.

On a GPU bits are compared. Without one, programs are lowered for a GPU without the kernels, and the test looks at what
XLA computes for each token: only what it rounds once, however it fuses.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.launching import triton
from jgg.layers import MoELayer
from tests.support.packed import random_packed

HIDDEN, FEATURES, EXPERTS, TOPK = 128, 256, 16, 3
V3 = {"score": "sigmoid", "use_selection_bias": True, "num_groups": 4, "topk_groups": 2, "scale": 2.5}
BIASES = {"score": "topk_softmax", "use_bias": True, "use_router_bias": True}
LORA = {"lora_rank": 4, "lora_targets": ("w_gate_up", "w_down", "w_router", "w_shared_gate_up"), "shared_features": 48}
# options of the layer, and how often XLA computes a float of each token, by operation: each result is rounded once, or
# is a highest score or a sum of two, which have one order
CASES = {
    "Qwen3-MoE": ({}, {}),
    "OLMoE": ({"normalize": False, "scale": 1.5}, {"multiply": 1}),  # the scale
    "gpt-oss": (BIASES | {"activation": "clamped_swiglu", "interleaved": True}, {"add": 1}),  # the router's bias
    "DeepSeek-V3": (V3 | {"shared_features": 48}, {"reduce": 1}),  # the sum of a group's two highest scores
    "Qwen2-MoE": ({"shared_features": 48, "use_shared_gate": True, "normalize": False}, {"multiply": 1}),
    "Llama-4": (
        {"topk": 1, "score": "sigmoid", "normalize": False, "scale_input": True, "shared_features": 48},
        {"multiply": 1},  # x times the weight
    ),
    "bias of softmax": ({"use_selection_bias": True}, {}),
    "groups": ({"num_groups": 4, "topk_groups": 2}, {"reduce": 1}),  # the highest score of a group
    "not gated": ({"activation": "ungated_relu_squared", "shared_features": 48}, {}),
    "LoRA": (LORA, {}),
}
MOVES = {"broadcast_in_dim", "gather", "optimization_barrier", "pad", "reshape", "select", "slice", "convert"}


def make(options):
    return MoELayer(FEATURES, **({"hidden_features": HIDDEN, "num_experts": EXPERTS, "topk": TOPK} | options))


def shapes_of(layer):
    return layer.shapes | layer.adapter_shapes | ({"bias": (EXPERTS,)} if layer.use_selection_bias else {})


def apply(layer, arrays, x, quantization=None, **more):
    params = {name: array for name, array in arrays.items() if name != "bias"}
    return layer.apply(params, x, arrays.get("bias"), quantization=quantization, **more)[0]


@pytest.fixture
def without_kernels(monkeypatch):
    """Lowers nothing instead of kernels, so that the compiler does not know their results."""

    def call(compute_capability, kernel, launch):
        results = {key: jnp.zeros(result.shape, result.dtype) for key, result in launch.result_types.items()}
        return jax.lax.optimization_barrier(results)

    monkeypatch.setattr(triton, "call", call)


def operations_on_tokens(text, num_tokens, topk):
    """How often a lowered program computes a float for each token or row, by operation, but for what moves floats."""
    counts = {}
    for line in text.splitlines():
        operation, types = re.search(r'= "?stablehlo\.(\w+)', line), re.findall(r"tensor<([^>]*)>", line)
        is_of_tokens = types and re.match(rf"({num_tokens}|{num_tokens * topk})x.*(f32|f16|bf16|f8\w*)$", types[-1])
        if operation and is_of_tokens and operation[1] not in MOVES:
            counts[operation[1]] = counts.get(operation[1], 0) + 1
    return counts


@pytest.mark.parametrize("quantization", [None, jgg.Fp8()], ids=["dense", "fp8"])
@pytest.mark.parametrize("num_tokens", [pytest.param(13, marks=pytest.mark.sweep), 1009])
@pytest.mark.parametrize("case", CASES)
def test_xla_sums_nothing_of_a_token(case, num_tokens, quantization, without_kernels):
    options, expected = CASES[case]
    layer = make(options)
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes_of(layer).items()}
    for dtype in ("bfloat16", "float16", "float32") if quantization is None else ("bfloat16",):
        x = jax.ShapeDtypeStruct((num_tokens, FEATURES), dtype)
        with jgg.target(90):
            traced = jax.jit(functools.partial(apply, layer, quantization=quantization)).trace(arrays, x)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert operations_on_tokens(text, num_tokens, layer.topk) == expected, dtype


def packed(array):
    """MXFP4 weights with the shape of experts' weights [E, K, N] and other values."""
    return random_packed(array.shape, axis=1)


FORMS = {
    "bfloat16": ("bfloat16", lambda array: array.astype("bfloat16"), None),
    "bfloat16, float32 parameters": ("bfloat16", lambda array: array, None),
    "float16": ("float16", lambda array: array.astype("float16"), None),
    "float32": ("float32", lambda array: array, None),
    "Fp8": ("bfloat16", lambda array: array.astype("bfloat16"), jgg.Fp8()),
    "Fp8, quantized": ("bfloat16", jgg.quantize_weights, jgg.Fp8()),
    "as stored": ("bfloat16", jgg.quantize_weights, None),
    "MXFP4": ("bfloat16", packed, None),
}
COMPARED = [*((case, "bfloat16") for case in CASES), *(("DeepSeek-V3", form) for form in FORMS), ("LoRA", "as stored")]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "form"), COMPARED)
def test_the_bits_of_a_token(case, form):
    layer, (dtype, prepared, quantization) = make(CASES[case][0]), FORMS[form]
    shapes = shapes_of(layer)
    last, *keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    arrays = {name: jax.random.normal(key, shapes[name]) / 8 for name, key in zip(shapes, keys, strict=True)}
    arrays |= {name: prepared(arrays[name]) for name in ("w_gate_up", "w_down")}
    x = jax.random.normal(last, (8192, FEATURES)).astype(dtype)
    compute = jax.jit(functools.partial(apply, layer, quantization=quantization))
    want = np.asarray(compute(arrays, x).astype("float32"))
    order = np.random.default_rng(0).permutation(len(x))
    batches = {f"the first {count}": np.arange(count) for count in (1, 17, 300)}
    batches |= {"one from the middle": order[-1:], "another order": order, "some twice": order[:300] // 2}
    for name, tokens in batches.items():
        got = np.asarray(compute(arrays, x[tokens]).astype("float32"))
        np.testing.assert_array_equal(got, want[tokens], err_msg=name)
    padded = compute(arrays, jnp.concatenate([x[:200], jnp.zeros_like(x[:100])])).astype("float32")
    np.testing.assert_array_equal(padded[:200], want[:200])
