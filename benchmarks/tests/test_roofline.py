"""The least time of layers and models, by numbers that were computed by hand."""

import dataclasses

import pytest

import jgg
from benchmarks import layer_roofline, model_configs, models
from benchmarks.layer import FORWARD, FORWARD_BACKWARD, LayerProblem
from benchmarks.layer_roofline import Part, dense_times, least_layer_seconds, parts_of
from benchmarks.lora import LoraProblem
from benchmarks.model_roofline import (
    Speeds,
    Tensor,
    least_decode_seconds,
    least_prefill_seconds,
    least_training_seconds,
    tensors_of,
)
from jgg.tuning import workloads

# T 12, H 16, I 8, E 4, k 2: x, y and their gradients have 192 elements, routed rows of H 384, of I 192, of 2 I 384,
# w_gate_up 1,024 and w_down 512 in all, w_router 64. Three experts have rows, so 768 and 384 elements are read.
TINY = workloads.Layer("tiny", tokens=12, hidden=16, expert_intermediate=8, experts=4, topk=2)
FORWARD_BYTES = {
    "router": 2 * (192 + 64) + 8 * 24,
    "up": 2 * (192 + 768 + 192),
    "down": 2 * (192 + 384 + 384),
    "combination": 2 * (384 + 192),
}
BOTH_BYTES = FORWARD_BYTES | {
    "up": 2 * (192 + 768 + 192 + 384),
    "dX of down": 2 * (192 + 384 + 384 + 384),
    "dX of up": 2 * (384 + 768 + 384),
    "combination of dX": 2 * (384 + 192),
    "dW of down": 2 * (192 + 192 + 512),
    "dW of up": 2 * (192 + 384 + 1024),
    "router's gradients": 2 * (192 + 2 * 64),
}


def bytes_of(problem, which, experts=3):
    return {part.name: part.num_bytes for part in parts_of(problem, which, experts)}


@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
def test_bytes_of_a_layer(w_layout):
    problem = LayerProblem(TINY, "bfloat16", w_layout)
    assert bytes_of(problem, FORWARD) == FORWARD_BYTES
    assert bytes_of(problem, FORWARD_BACKWARD) == BOTH_BYTES
    assert bytes_of(problem, FORWARD, experts=None)["up"] == 2 * (192 + 1024 + 192)


def test_float32_parameters_are_cast_once_and_their_gradients_are_float32():
    problem = LayerProblem(TINY, "bfloat16").in_flax()
    cast = {"weights converted": (4 + 2) * (768 + 384)}
    assert bytes_of(problem, FORWARD) == FORWARD_BYTES | cast | {"router": 2 * 192 + 4 * 64 + 8 * 24}
    assert bytes_of(problem, FORWARD_BACKWARD) == BOTH_BYTES | cast | {
        "router": 2 * 192 + 4 * 64 + 8 * 24,
        "dW of down": 2 * (192 + 192) + 4 * 512,
        "dW of up": 2 * (192 + 384) + 4 * 1024,
        "router's gradients": 2 * 192 + 2 * 4 * 64,
    }
    assert bytes_of(LayerProblem(TINY, "bfloat16").in_flax("bfloat16"), FORWARD_BACKWARD) == BOTH_BYTES


def test_operands_in_fp8_have_8_bits_and_scales():
    problem = LayerProblem(TINY, "bfloat16", quantization=jgg.Fp8())
    tokens, hidden, pre_activation = 192 + 4 * 12, 192 + 4 * 24, 384 + 4 * 24  # a row has one scale
    w_gate_up, w_down = 768 + 4 * 3, 384 + 4 * 3  # a matrix too
    assert bytes_of(problem, FORWARD_BACKWARD) == BOTH_BYTES | {
        "weights converted": 2 * (768 + 384) + w_gate_up + w_down,
        "x quantized": 2 * 192 + tokens,
        "up": tokens + w_gate_up + hidden + pre_activation,
        "down": hidden + w_down + 2 * 384,
        "dy quantized": 2 * 192 + tokens,
        "dX of down": tokens + w_down + pre_activation + pre_activation + 2 * 384,
        "dX of up": pre_activation + w_gate_up + 2 * 384,
        "dW of down": 2 * 192 + hidden + 2 * 512,
    }
    float32 = bytes_of(problem.in_flax(), FORWARD_BACKWARD)
    assert float32["weights converted"] == 4 * (768 + 384) + w_gate_up + w_down  # read without a cast
    assert float32["dW of up"] == 2 * (192 + 384) + 4 * 1024


def test_the_least_time_of_a_layer_is_a_sum_of_that_of_its_passes():
    parts = [Part("up", 6000, "up forward"), Part("down", 2000, "down forward"), Part("combination", 1000)]
    dense = {"up forward": 4.0, "down forward": 3.0}
    assert least_layer_seconds(parts, 1000.0, dense) == 6 + 3 + 1
    assert least_layer_seconds(parts, None, dense) is None
    assert least_layer_seconds(parts, 1000.0, {"up forward": 4.0}) is None


def test_dense_products_have_names(monkeypatch):
    timed = []
    monkeypatch.setattr(layer_roofline, "_time_dense", lambda op, gemm, _: timed.append((op, gemm)) or 1.0)
    problem = LayerProblem(TINY, "bfloat16", quantization=jgg.Fp8())
    names = {f"{gemm} {op}" for gemm in ("up", "down") for op in ("forward", "dx", "dw")}
    assert dense_times(problem, 0).keys() == names
    assert {part.product for part in parts_of(problem, FORWARD_BACKWARD)} == names | {""}
    assert {(gemm.num_experts, gemm.num_rows, gemm.dtype.name) for _, gemm in timed} == {(1, 24, "bfloat16")}
    timed.clear()
    assert dense_times(problem, 0, is_in_fp8=True).keys() == {name for name in names if not name.endswith("dw")}
    shapes = [(op, gemm.in_features, gemm.out_features, gemm.dtype.itemsize) for op, gemm in timed]
    assert shapes == [("forward", 16, 16, 1), ("forward", 8, 16, 1), ("forward", 16, 16, 1), ("forward", 16, 8, 1)]


def test_adapters_beside_frozen_weights_read_and_write_more():
    frozen, rank_3 = ({part.name: part.num_bytes for part in LoraProblem(TINY, rank).parts()} for rank in (None, 3))
    assert frozen["routing"] == 12 * (4 * 4 + 8 * 2)
    assert not {name for name in frozen if name.startswith("dW")}
    assert {name: rank_3[name] - frozen.get(name, 0) for name in rank_3 if rank_3[name] != frozen.get(name)} == {
        "up": 2 * (4 * 3 * 32 + 24 * 3),  # a and b are read, x aᵀ is stored
        "down": 2 * (4 * 3 * 24 + 24 * 3),
        "dX of up": 2 * 4 * 3 * 32,
        "dX of down": 2 * 4 * 3 * 24,
        "da and db of up": 2 * (192 + 384 + 2 * 24 * 3 + 4 * 3 * 32),
        "da and db of down": 2 * (192 + 192 + 2 * 24 * 3 + 4 * 3 * 24),
    }
    trained = {part.name for part in LoraProblem(TINY, is_trained=True).parts()}
    assert trained - frozen.keys() == {"dW of down", "dW of up"}


# A model of 2 layers with 4 heads of 16 features, 2 of keys and values, and 2 of 8 experts for each token.
MODEL = model_configs.config_of("qwen3-30b-a3b", None, is_small=True)
TENSORS = [
    Tensor(1000, 2000, is_of_experts=False, is_matrix=True, is_head=False),
    Tensor(8000, 8100, is_of_experts=True, is_matrix=True, is_head=False),
    Tensor(500, 1000, is_of_experts=False, is_matrix=True, is_head=True),
    Tensor(10, 20, is_of_experts=False, is_matrix=False, is_head=False),
]
MATRICES = 2 * 1000 / 1e6 + 2 * (2 / 8) * 8000 / 2e6  # seconds of a token, without logits
LOGITS = 2 * 500 / 1e6
ATTENTION = 2 * 4 * 4 * 16 / 1e6  # of a pair of positions
SLOW, FAST = Speeds(copy=1e3, dense=1e6, dense_of_experts=2e6), Speeds(copy=1e12, dense=1e6, dense_of_experts=2e6)


def read(tokens):
    return 2000 + 1000 + 20 + 8100 * (1 - 0.75**tokens)


def test_the_least_time_of_training():
    tokens, pairs = 3 * 4, 3 * (1 + 2 + 3 + 4)
    for is_lora, passes, times_moved in ((True, 2, 2), (False, 3, 10)):
        least = least_training_seconds(MODEL, TENSORS, FAST, 3, 4, is_lora)
        assert least == pytest.approx(passes * tokens * (MATRICES + LOGITS) + 3 * pairs * ATTENTION)
        least = least_training_seconds(MODEL, TENSORS, SLOW, 3, 4, is_lora)
        assert least == pytest.approx(times_moved * read(tokens) / 1e3)


def test_the_least_time_of_generation():
    least = least_prefill_seconds(MODEL, TENSORS, FAST, 3, 4)
    assert least == pytest.approx(12 * MATRICES + 3 * LOGITS + 3 * (1 + 2 + 3 + 4) * ATTENTION)
    assert least_prefill_seconds(MODEL, TENSORS, SLOW, 3, 4) == pytest.approx(read(12) / 1e3)
    least = least_decode_seconds(MODEL, TENSORS, FAST, 3, 4)
    assert least == pytest.approx(3 * (MATRICES + LOGITS + 5 * ATTENTION))
    cache = 2 * 2 * 3 * (2 * 4) * 2 * 16  # keys and values of 3 sequences, 4 positions in each of 2 layers
    assert least_decode_seconds(MODEL, TENSORS, SLOW, 3, 4) == pytest.approx((read(3) + cache) / 1e3)


def test_a_token_attends_to_no_more_positions_than_a_window_has():
    first, second = MODEL.mixers
    windowed = dataclasses.replace(MODEL, mixers=(dataclasses.replace(first, window=2), second))
    whole, part = (least_prefill_seconds(model, [], FAST, 1, 4) for model in (MODEL, windowed))
    assert whole == pytest.approx((10 + 10) * ATTENTION / 2)
    assert part == pytest.approx((1 + 2 + 2 + 2 + 10) * ATTENTION / 2)


def test_parameters_that_a_step_reads():
    model = models.random_model(MODEL, "fp8")
    tensors = tensors_of(model)
    (head,) = (tensor for tensor in tensors if tensor.is_head)
    assert (head.num_elements, head.num_bytes) == (64 * 256, 2 * 64 * 256)
    up, down = sorted((tensor for tensor in tensors if tensor.is_of_experts), key=lambda tensor: -tensor.num_elements)
    assert (up.num_elements, up.num_bytes) == (2 * 8 * 64 * 64, 2 * 8 * (64 * 64 + 4))  # a scale for each matrix
    assert (down.num_elements, down.num_bytes) == (2 * 8 * 32 * 64, 2 * 8 * (32 * 64 + 4))
    attention = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64)
    others = [tensor for tensor in tensors if tensor.is_matrix and not (tensor.is_head or tensor.is_of_experts)]
    assert sum(tensor.num_elements for tensor in others) == attention + 2 * 64 * 8  # and the router; no embedding
