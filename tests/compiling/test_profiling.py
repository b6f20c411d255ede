"""What XLA and a profiler know of the products: names with shape and pass, FLOPs and bytes."""

import json
import re

import jax
import jax.numpy as jnp

import jgg
from tests.support.passes import forward_and_backward

M, K, N, E = 64, 32, 48, 4
DY, *SHAPES = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((M, N), (M, K), (E, N, K))]
SIZES = jnp.array([10, 20, 4, 30])
FLOPS, BYTES = 2 * M * K * N, 2 * (M * K + E * N * K + M * N)
PASSES = ("forward", "dx", "dw")


def product(x, w):
    return jgg.grouped_gemm(x, w, SIZES)


def kernel_calls(function, *shapes):
    """(place in the program, cost) of each kernel in a program lowered for CUDA."""
    with jgg.target(90):
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    program = lowered.as_text(debug_info=True)
    locations = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", program, re.MULTILINE))
    for call in re.findall(r".*custom_call @triton_kernel_call_ffi.*", program):
        cost = re.search(r'cost_estimate_json = "(.*?)", opaque', call)[1].replace("\\22", '"')
        yield place(re.search(r"loc\((#loc\d+)\)$", call)[1], locations), json.loads(cost)


def place(location, locations):
    """A location and the locations it names; one of them has the scopes."""
    text = locations.get(location, "")
    return " ".join([text, *(place(inner, locations) for inner in re.findall(r"#loc\d+", text))])


def test_kernels_have_names_and_costs():
    calls = list(kernel_calls(forward_and_backward(product), DY, *SHAPES))
    for name, (location, cost) in zip(PASSES, calls, strict=True):
        assert f"jgg.{name}[M={M},K={K},N={N},E={E},bfloat16]" in location
        assert cost == {"flops": FLOPS, "bytes_accessed": BYTES}


def test_kernels_of_the_layer_have_names():
    def loss(x, w_gate_up, w_down, logits):
        return jnp.sum(jgg.moe_mlp(x, w_gate_up, w_down, jgg.route(logits, 2)).astype(jnp.float32))

    shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((32, K), (E, 2 * N, K), (E, K, N), (32, E))]
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    places = "\n".join(place for place, _ in kernel_calls(step, *shapes))
    up, down, transposed = (f"[M=64,K={k},N={n},E={E},bfloat16]" for k, n in ((K, 2 * N), (N, K), (K, N)))
    backward = "jgg.moe_mlp.backward/jgg."
    for name in (
        f"jgg.up{up}",
        f"jgg.forward{down}",
        f"{backward}forward{transposed}",
        f"{backward}dw{transposed}",
        f"{backward}dx{up}",
        f"{backward}dw{up}",
    ):
        assert name in places


def test_a_batch_is_named_by_what_runs():
    x = jax.ShapeDtypeStruct((3, M, K), "bfloat16")
    calls = kernel_calls(jax.vmap(lambda x, w: jgg.grouped_gemm(x, w, SIZES), (0, None)), x, SHAPES[1])
    assert any(f"jgg.forward[M={3 * M},K={K},N={N},E={E},bfloat16]" in place for place, _ in calls)


def test_names_on_a_cpu(keyed_by_names):
    program = jax.jit(forward_and_backward(product)).lower(DY, *SHAPES).compile()
    names = set(re.findall(r'op_name="[^"]*?jgg\.(\w+)\[', program.as_text()))
    assert names == set(PASSES)
