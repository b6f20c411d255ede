"""What the plain JAX implementation does not do: make an operand dense, copy weights, grow with the experts."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jgg
from tests.support.marks import PLAIN_JAX, on, thorough_but
from tests.support.passes import forward_and_backward

ROWS, IN, OUT, TOPK = 512, 64, 96, 2
OPTIONS = {"plain": {}, "everything": {"topk": TOPK, "permute_x": True, "permute_y": True}}


def compiled(num_experts, dtype, options, w_layout, backward, implementation):
    def struct(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    floats = {
        "x": struct(ROWS // TOPK if options else ROWS, IN),
        "w": struct(num_experts, *((OUT, IN) if w_layout == "enk" else (IN, OUT))),
    }
    fixed = {"group_sizes": struct(num_experts, dtype="int32")}
    if options:
        floats["topk_weights"] = struct(ROWS // TOPK, TOPK, dtype="float32")
        floats["bias"] = struct(num_experts, OUT)
        fixed["gather_indices"] = struct(ROWS, dtype="int32")

    def forward(floats, fixed):
        return jgg.grouped_gemm(**floats, **fixed, **options, w_layout=w_layout, implementation=implementation)

    def backward_too(floats, fixed, dy):
        return forward_and_backward(lambda floats: forward(floats, fixed))(dy, floats)

    if backward:
        return jax.jit(backward_too).lower(floats, fixed, struct(ROWS, OUT)).compile()
    return jax.jit(forward).lower(floats, fixed).compile()


def largest_array(text):
    """Elements of the largest array anywhere in a compiled program."""
    shapes = re.findall(r"\b(?:f32|bf16|f16|s32|pred)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_largest_array_sees_a_dense_operand():
    """The measure of the tests below, on a program that multiplies all rows by every expert's weights."""

    def dense(x, w, members):
        return jnp.einsum("emk,enk->mn", jnp.where(members[:, :, None], x, 0), w)

    arguments = jnp.ones((ROWS, IN)), jnp.ones((8, OUT, IN)), jnp.ones((8, ROWS), bool)
    program = jax.jit(dense).lower(*arguments).compile()
    assert largest_array(program.as_text()) >= 8 * ROWS * IN
    assert program.memory_analysis().temp_size_in_bytes >= 8 * ROWS * IN * 4


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("num_experts", [8, 128])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.sweep), "bfloat16"])
@pytest.mark.parametrize(("options", "w_layout"), [("plain", "enk"), ("everything", "ekn")])
@on(PLAIN_JAX, None)
def test_memory(implementation, options, w_layout, dtype, num_experts, backward):
    program = compiled(num_experts, dtype, OPTIONS[options], w_layout, backward, implementation)
    memory = program.memory_analysis()
    in_and_out = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.temp_size_in_bytes < 2 * in_and_out
    # No [E, M, K] or [E, M, N], nor anything else larger than the largest argument.
    largest_argument = max(num_experts * IN * OUT, ROWS * OUT)
    assert largest_array(program.as_text()) <= largest_argument


def layer(quantization, differentiates):
    def forward(x, weights, logits):
        routing = jgg.route(logits, TOPK)
        return jgg.moe_mlp(x, *weights, routing, quantization=quantization, implementation="xla").astype(jnp.float32)

    return jax.grad(lambda *arrays: jnp.sum(forward(*arrays)), argnums=(0, 1, 2)) if differentiates else forward


def quantized_product(x, weights, logits):
    sizes = jnp.zeros(logits.shape[1], jnp.int32)
    return jgg.grouped_gemm(jgg.quantize_tokens(x), weights, sizes, implementation="xla")


def temporaries(function, num_experts, weights=lambda array: array):
    """Bytes that a compiled program needs besides arguments, with this many experts of 3 * 128 * 256 weights."""
    arrays = [jax.ShapeDtypeStruct((num_experts, *shape), "bfloat16") for shape in ((512, 128), (128, 256))]
    rest = jax.ShapeDtypeStruct((16, 128), "bfloat16"), jax.ShapeDtypeStruct((16, num_experts), "float32")
    program = jax.jit(function).lower(rest[0], weights(arrays), rest[1]).compile()
    return program.memory_analysis().temp_size_in_bytes


QUANTIZED_W = lambda arrays: jax.eval_shape(jgg.quantize_weights, arrays[0])  # noqa: E731


# name: (function, bytes of a weight that it may take, its weights)
GROWTHS = {
    "layer": (layer(None, False), 0.1, list),
    "layer backward": (layer(None, True), 0.1, list),
    "Fp8": (layer(jgg.Fp8(), False), 0.1, list),
    "Fp8 backward": (layer(jgg.Fp8(), True), 0.1, list),
    "kept weights": (layer(jgg.Fp8(keeps_weights=True), True), 2.1, list),  # kept in FP8, also transposed
    "quantized product": (quantized_product, 1.1, QUANTIZED_W),  # as integers of 8 bits, which a CPU copies them to
    "quantize_weights": (lambda x, weights, logits: jgg.quantize_weights(weights[0]), 1.1, list),
}
QUICK = "layer backward", "quantized product", "quantize_weights"


@pytest.mark.parametrize("case", thorough_but(QUICK, GROWTHS, pytest.mark.sweep))
def test_temporaries_do_not_grow_with_the_experts(case):
    function, bytes_of_a_weight, weights = case
    few, many = 8, 40
    growth = temporaries(function, many, weights) - temporaries(function, few, weights)
    assert growth <= bytes_of_a_weight * (many - few) * 3 * 128 * 256
