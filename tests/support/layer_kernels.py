"""Kernels of layers other than the products of `grouped_gemm`: their names, and cases that together lower all."""

import functools

from jgg.core.activations import ACTIVATIONS
from tests.support.lowered_layers import (
    lower_activation,
    lower_add_gated,
    lower_attend,
    lower_attend_latents,
    lower_attend_one,
    lower_delta_rule,
    lower_fp8,
    lower_fp8_product,
    lower_hopper_symmetric,
    lower_logits,
    lower_losses,
    lower_norm,
    lower_project_few,
    lower_rotary,
    lower_routing,
    lower_stored,
    lower_symmetric,
    lower_up,
)
from tests.support.lowering import EXPERTS

DELTA_RULE_KERNELS = (
    "chunk_matrices_kernel",
    "delta_rule_kernel",
    "delta_rule_backward_kernel",
    "delta_rule_gradients_kernel",
)
LAYER_KERNELS = (
    *DELTA_RULE_KERNELS,
    "delta_rule_in_order_kernel",
    "delta_rule_one_kernel",
    "activate_kernel",
    "activate_backward_kernel",
    "top_k_kernel",
    "route_few_kernel",
    "logits_kernel",
    "score_kernel",
    "weigh_kernel",
    "add_gated_kernel",
    "sort_few_kernel",
    "count_experts_kernel",
    "sum_counts_kernel",
    "place_rows_kernel",
    "norm_kernel",
    "norm_backward_kernel",
    "rotary_kernel",
    "rotary_backward_kernel",
    "attend_kernel",
    "attend_latents_kernel",
    "attend_latents_one_kernel",
    "attend_one_kernel",
    "add_parts_kernel",
    "unpack_kernel",
    "project_few_kernel",
    "losses_kernel",
    "symmetric_kernel",
)
FP8_KERNELS = (
    "quantize_rows_kernel",
    "quantize_weights_kernel",
    "activate_fp8_kernel",
    "activate_backward_fp8_kernel",
)
ATTENTION = [
    (64, 8, 64, True, "bfloat16"),
    (32, 4, 128, False, "float32"),
    (16, 16, 256, False, "bfloat16"),
    (16, 2, 512, True, "bfloat16"),
]
FP8_ATTENTION = [  # of caches
    (32, 4, 128, True, "bfloat16", "float8_e4m3fn"),
    *((*case, "float8_e4m3fn") for case in ATTENTION if case[-1] == "bfloat16"),
]
# name: (function, how many of its cases CI compiles, *cases)
LAYERS = {
    "route": (lower_routing, 1, (1024,), (8,), (128,), (512,)),
    "logits": (
        lower_logits,
        1,
        (8192, 128, "bfloat16", "float32"),
        (1, 128, "bfloat16", "bfloat16"),
        (2048, 128, "bfloat16", "bfloat16"),
        (32_768, 256, "bfloat16", "float32"),
        (512, 130, "float16", "float32"),
        (8192, 8, "float16", "float16"),
        (8192, 128, "float32", "float32"),
        (1, 17, "float32", "float32"),
        (2880, 128, "float32", "float32", "highest"),
    ),
    "add_gated": (lower_add_gated, 1, (2880, "bfloat16"), (2048, "bfloat16"), (17, "float32")),
    "attend_one": (lower_attend_one, 1, *ATTENTION),
    "attend": (lower_attend, 1, *ATTENTION),
    "delta_rule": (lower_delta_rule, 1, (128, "bfloat16"), (40, "float16")),
    "attend_latents": (
        lower_attend_latents,
        1,
        (20, 512, 64, "bfloat16"),
        (128, 512, 64, "bfloat16"),
        (16, 256, 32, "float32"),
    ),
    "project_few": (
        lower_project_few,
        1,
        (1, 2048, "bfloat16"),
        (64, 2880, "bfloat16"),
        (3, 96, "float32"),
        (17, 100, "float16"),
        (100, 100, "float16"),
        (256, 2880, "bfloat16"),
    ),
    "activation": (  # those of one projection have the curves of the gated ones
        lower_activation,
        2,
        ("swiglu", False, 768, "bfloat16"),
        ("swiglu", False, 17, "float32"),
        ("ungated_relu_squared", False, 96, "float16"),
        *((name, True, 96, "bfloat16") for name, activation in ACTIVATIONS.items() if activation.is_gated),
    ),
    "norm": (lower_norm, 1, (2880, "bfloat16"), (8192, "float32"), (17, "float32"), (8192, "bfloat16")),
    "losses": (lower_losses, 1, (151936, 1.0), (262144, 1.0, 30.0), (49155, 0.3)),
    "rotary": (
        lower_rotary,
        1,
        (32, 128, 64, True),
        (64, 64, 32, False),
        (8, 128, 32, True),
        (2, 256, 128, True),
        (2, 256, 32, True),
        (3, 80, 40, True),
    ),
    "packed": (
        functools.partial(lower_stored, "packed"),
        2,
        *(("ekn", rows) for rows in (16, 100, 500)),
        *(("enk", rows) for rows in (32, 100, 500, 4)),
        *(("ekn", rows) for rows in (4, 32)),
    ),
    "symmetric": (  # of at most 256 rows, or with float32 results: Hopper's kernel has others
        lower_symmetric,
        1,
        ((EXPERTS,), 256, 2048, "bfloat16", "bfloat16"),
        ((2, EXPERTS), 1536, 1536, "bfloat16", "float32"),
        ((), 513, 513, "float16", "float16"),
        ((EXPERTS,), 64, 2048, "bfloat16", "bfloat16"),
        *(((EXPERTS,), 768, 2048, "float32", "float32", precision) for precision in (None, "high", "highest")),
    ),
}
FP8_LAYERS = {
    "attend_one fp8": (lower_attend_one, 1, *FP8_ATTENTION),
    "attend fp8": (lower_attend, 1, *FP8_ATTENTION),
    "stored": (functools.partial(lower_stored, "fp8"), 1, ("ekn", 16), ("enk", 32), ("ekn", 4), ("ekn", 100)),
    "fp8": (
        lower_fp8,
        1,
        ("swiglu", False, "float8_e4m3fn", 4096),
        ("clamped_swiglu", True, "float8_e4m3fn", 256),
    ),
    "fp8 product": (lower_fp8_product, 1, ("float32", "plain"), ("float32", "everything")),
}
HOPPER_LAYERS = {
    "up": (
        lower_up,
        1,
        ("swiglu", False, "ekn", True),
        ("clamped_swiglu", True, "enk", False),
        ("swiglu", False, "enk", False),
        ("ungated_relu_squared", False, "ekn", False),
    ),
    "hopper_symmetric": (
        lower_hopper_symmetric,
        1,
        ((EXPERTS,), 1536, 2048, "bfloat16", "bfloat16"),
        ((), 136, 72, "float16", "bfloat16"),
    ),
}


def layer_kernels(compute_capability, takes_all):
    """(what a kernel is for, the function that lowers it) of layers; without takes_all those that stand for others."""
    layers = LAYERS
    layers = layers | FP8_LAYERS if compute_capability >= 89 else layers
    layers = layers | HOPPER_LAYERS if compute_capability == 90 else layers
    for name, (function, few, *cases) in layers.items():
        for case in cases if takes_all else cases[:few]:
            yield [name, *case], functools.partial(function, *case)
