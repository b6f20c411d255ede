"""Lowers grouped_gemm for a GPU that need not be here; prints what each compiled kernel takes.

Takes the compute capability as its argument and a folder in JAX_TRITON_DUMP_DIR, where jax-triton dumps the kernels.
It lowers what the heuristic chooses, routing and activations, with --all after it those that differ little from others
too, or the configurations of the tuned files named after it.
Each line printed is a JSON object: a kernel with the problem that it was compiled for, its bytes of shared memory, the
bytes that it spills to memory and its kinds of stores.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import triton

import jgg
from jgg.activations import ACTIVATIONS
from jgg.configs import tuned_files
from jgg.configs.heuristic import heuristic_config, hopper_config
from jgg.configs.kernel_configs import CONFIG_TYPES
from jgg.core.arguments import as_precision
from jgg.core.gpu_target import current_target
from jgg.core.problem import check_problem
from jgg.core.schedule import group_bounds
from jgg.launching import triton as triton_implementation
from jgg.launching.choice import How
from jgg.measuring.timing import product
from jgg.measuring.workloads import operands
from jgg.products.activate import ACTIVATE, ACTIVATE_BACKWARD, Activate, ActivateBackward
from jgg.products.add_gated import ADD_GATED, AddGated
from jgg.products.attend import ATTEND, Attend
from jgg.products.attend_latents import ATTEND_LATENTS, AttendLatents
from jgg.products.attend_one import ATTEND_ONE, AttendOne
from jgg.products.delta_rule import DELTA_RULE, DeltaRule
from jgg.products.delta_rule_backward import DELTA_RULE_BACKWARD, DeltaRuleBackward
from jgg.products.delta_rule_one import DELTA_RULE_ONE, DeltaRuleOne
from jgg.products.forward import FORWARD, Forward
from jgg.products.losses import LOSSES, Scored
from jgg.products.norm import NORM, NORM_BACKWARD, Norm, NormBackward
from jgg.products.project_few import PROJECT_FEW, ProjectFew
from jgg.products.rotary import ROTARY, ROTARY_BACKWARD, Rotary, RotaryBackward
from jgg.products.symmetric import SYMMETRIC, Symmetric
from jgg.products.up import UP

EXPERTS = 4
OPTIONS = {
    "plain": {},
    "up": {"permute_x": True},
    "down": {"permute_y": True, "weighted": True},
    "scaled": {"weighted": True, "biased": True},
    "everything": {"permute_x": True, "permute_y": True, "weighted": True, "biased": True},
}
KERNELS = ("forward_kernel", "dx_kernel", "dw_kernel")
HOPPER_KERNELS = ("hopper_kernel", "hopper_fp8_kernel")
SMALL_KERNELS = ("combine_kernel", "group_sums_kernel")
SIZES = ("REDUCED", "COLUMNS", "W_COLUMNS", "Y_COLUMNS", "LEFT", "RIGHT", "TOPK", "BAND")
DELTA_RULE_KERNELS = (
    "chunk_matrices_kernel",
    "delta_rule_kernel",
    "delta_rule_backward_kernel",
    "delta_rule_gradients_kernel",
)
LAYER_KERNELS = (
    *DELTA_RULE_KERNELS,
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
EXPERT_COUNTS = (8, 128, 512, 1024)
# dtype and precision, and the one whose kernels stand for those of the same configuration: they differ in the type or
# in repeated instructions
MODES = {
    ("bfloat16", None): None,
    ("float16", None): ("bfloat16", None),
    ("float32", None): None,
    ("float32", "high"): ("float32", None),
    ("float32", "highest"): None,
}


def arguments(rows, in_features, out_features, layout, options, dtype, precision):
    """Arrays (shapes and dtypes) and options of grouped_gemm."""
    options = OPTIONS[options]
    num_rows, topk = EXPERTS * rows, 2
    x_rows = num_rows // topk if options.get("permute_x") else num_rows
    w = (out_features, in_features) if layout == "enk" else (in_features, out_features)
    arrays = {
        "x": jax.ShapeDtypeStruct((x_rows, in_features), dtype),
        "w": jax.ShapeDtypeStruct((EXPERTS, *w), dtype),
        "topk_weights": jax.ShapeDtypeStruct((num_rows // topk, topk), "float32"),
        "bias": jax.ShapeDtypeStruct((EXPERTS, out_features), dtype),
        "group_sizes": jax.ShapeDtypeStruct((EXPERTS,), "int32"),
        "gather_indices": jax.ShapeDtypeStruct((num_rows,), "int32"),
    }
    if not options.get("weighted"):
        arrays["topk_weights"] = None
    if not options.get("biased"):
        arrays["bias"] = None
    static = {name: options.get(name, False) for name in ("permute_x", "permute_y")}
    return arrays, {"topk": topk, "w_layout": layout, "precision": precision, **static}


def chosen_configs(target, problem, dtype, precision):
    """The configurations that the heuristic chooses for the products of a problem, by their names."""
    arrays, static = arguments(*problem, dtype, precision)
    checked = check_problem(**arrays, **static)
    return {op: heuristic_config(CONFIG_TYPES[op], checked, target) for op in CONFIG_TYPES}


def every_problem():
    """Problems of all kinds that a heuristic might tell apart: (rows of an expert, K, N, layout, options)."""
    rows = (1, 16, 17, 33, 65, 500)
    features = (17, 64, 128, 136, 513, 4096, 8192)
    return itertools.product(rows, features, features, ("enk", "ekn"), OPTIONS)


def configs_of_problems(target, dtype, precision):
    """The configurations chosen for small problems, which together have all there are; most options come first."""
    narrow = ((64, 64), (128, 128), (64, 512), (512, 64))
    features = ((512, 512), (1024, 1024), (513, 513), *narrow, (512, 8192), (513, 8192))
    problems = itertools.product((256, 128, 64, 32, 16), features, ("enk", "ekn"), reversed(OPTIONS))
    problems = [(rows, *sizes, layout, options) for rows, sizes, layout, options in problems]
    return {problem: chosen_configs(target, problem, dtype, precision) for problem in problems}


def problems_to_lower(target, mode):
    """Few (problem, products) that together have every configuration of a mode, or one and those of no other."""
    configs = configs_of_problems(target, *mode)
    missing = {config for chosen in configs.values() for config in chosen.values()}
    if MODES[mode]:
        others = configs_of_problems(target, *MODES[mode]).values()
        missing.difference_update(*(chosen.values() for chosen in others))
        missing.add(next(iter(configs.values()))["forward"])
    while missing:
        problem = max(configs, key=lambda problem: len(missing.intersection(configs[problem].values())))
        yield problem, tuple(op for op, config in configs[problem].items() if config in missing)
        missing.difference_update(configs[problem].values())


def lower(compute_capability, problem, dtype, precision, products):
    arrays, static = arguments(*problem, dtype, precision)
    floats = {name: arrays.pop(name) for name in ("x", "w", "topk_weights", "bias")}

    def forward(floats, fixed):
        return jgg.grouped_gemm(**floats, **fixed, **static, implementation="triton")

    def compute(floats, fixed, dy):
        """What needs those products; jit leaves the others out."""
        y, vjp = jax.vjp(lambda floats: forward(floats, fixed), floats)
        (grads,) = vjp(dy)
        results = {
            "forward": y,
            "dx": (grads["x"], grads["topk_weights"]),
            "dw": (grads["w"], grads["bias"]),
        }
        return [results[name] for name in products]

    with jgg.target(compute_capability):
        dy = jax.eval_shape(forward, floats, arrays)
        jax.jit(compute).trace(floats, arrays, dy).lower(lowering_platforms=("cuda",))


def lower_entry(compute_capability, entry):
    shapes = jax.eval_shape(functools.partial(operands, entry.problem))
    with jgg.target(compute_capability):
        function = product(entry.op, entry.problem, "triton", entry.config)
        jax.jit(function).trace(shapes).lower(lowering_platforms=("cuda",))


def lower_routing(compute_capability, num_experts):
    with jgg.target(compute_capability):
        route = functools.partial(jgg.route, topk=8, implementation="triton")
        for num_tokens in (1, 32, 8192):
            logits = jax.ShapeDtypeStruct((num_tokens, num_experts), "float32")
            jax.jit(route).trace(logits).lower(lowering_platforms=("cuda",))
        arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, num_experts), (num_experts,))]
        biased = lambda logits, bias: route(logits, score="sigmoid", selection_bias=bias)  # noqa: E731
        jax.jit(biased).trace(*arrays).lower(lowering_platforms=("cuda",))


def lower_logits(compute_capability, num_tokens, num_experts, dtype, w_dtype, precision=None):
    """The router's projection, in each of its tiles."""
    x, w = jax.ShapeDtypeStruct((num_tokens, 2880), dtype), jax.ShapeDtypeStruct((2880, num_experts), w_dtype)
    with jgg.target(compute_capability):
        router = functools.partial(jgg.router_logits, implementation="triton", precision=precision)
        jax.jit(router).trace(x, w).lower(lowering_platforms=("cuda",))


def lower_add_gated(compute_capability, features, dtype):
    """The sum with the shared experts' rows, with a gate and without."""
    y, gate = jax.ShapeDtypeStruct((100, features), dtype), jax.ShapeDtypeStruct((100, 1), "float32")
    with jgg.target(compute_capability):
        add = functools.partial(ADD_GATED, How("triton", current_target()))
        for operands in (AddGated(y, y, gate), AddGated(y, y)):
            jax.jit(add).trace(operands).lower(lowering_platforms=("cuda",))


def lower_activation(compute_capability, name, interleaved, features, dtype):
    activation = ACTIVATIONS[name]
    rows = 1000
    with jgg.target(compute_capability):
        how, options = How("triton", current_target()), {"activation": activation, "interleaved": interleaved}

        def forward_and_backward(pre, z, weights):
            backward = ActivateBackward(pre, z, weights, weights > 0)
            return ACTIVATE(how, Activate(pre), **options), ACTIVATE_BACKWARD(
                how, backward, scale_hidden=True, **options
            )

        shapes = [
            ((rows, features * (1 + activation.is_gated)), dtype),
            ((rows, features), dtype),
            ((rows,), "float32"),
        ]
        arrays = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
        jax.jit(forward_and_backward).trace(*arrays).lower(lowering_platforms=("cuda",))


def lower_norm(compute_capability, features, dtype):
    """Norms with what is added before, forward and backward."""
    rows, scale = jax.ShapeDtypeStruct((8192, features), dtype), jax.ShapeDtypeStruct((features,), dtype)
    with jgg.target(compute_capability):
        how = How("triton", current_target())

        def compute(x, added, scale):
            total, y = NORM(how, Norm(x, added, scale), epsilon=1e-6)
            return NORM_BACKWARD(how, NormBackward(total, scale, y, added), epsilon=1e-6)

        jax.jit(compute).trace(rows, rows, scale).lower(lowering_platforms=("cuda",))


def lower_losses(compute_capability, vocabulary, **parameters):
    """The losses of targets by logits."""
    logits = jax.ShapeDtypeStruct((64, vocabulary), "float32")
    with jgg.target(compute_capability):
        losses = functools.partial(LOSSES, How("triton", current_target()), **parameters)
        operands = Scored(logits, jax.ShapeDtypeStruct((64,), "int32"))
        jax.jit(losses).trace(operands).lower(lowering_platforms=("cuda",))


def lower_rotary(compute_capability, heads, features, pairs, has_norm):
    """Queries, as many keys, and their norms, forward and backward."""
    rows, scale = ((8192, heads * features), "bfloat16"), ((features,), "bfloat16")
    shapes = [rows, rows, *[scale if has_norm else None] * 2, *[((4096, pairs), "float32")] * 2]
    parameters = {"head_features": features, "epsilon": 1e-6}
    with jgg.target(compute_capability):
        how = How("triton", current_target())

        def compute(operands):
            rotated = ROTARY(how, operands, **parameters)
            kept = operands if has_norm else operands._replace(q=None, k=None)
            return ROTARY_BACKWARD(how, RotaryBackward(*kept, *rotated), **parameters)

        operands = Rotary(*(shape and jax.ShapeDtypeStruct(*shape) for shape in shapes))
        jax.jit(compute).trace(operands).lower(lowering_platforms=("cuda",))


def lower_up(compute_capability, name, interleaved, w_layout, keeps):
    """The first product of a layer that gathers as it loads, and its activation."""
    activation = ACTIVATIONS[name]
    tokens, features, width, topk = 2048, 2048, 768 * (1 + activation.is_gated), 4
    shapes = {
        "x": ((tokens, features), "bfloat16"),
        "w": ((EXPERTS, *((width, features) if w_layout == "enk" else (features, width))), "bfloat16"),
        "group_sizes": ((EXPERTS,), "int32"),
        "gather_indices": ((tokens * topk,), "int32"),
    }
    with jgg.target(compute_capability):
        how = How("triton", current_target())

        def compute(arrays):
            problem = check_problem(**arrays, bias=None, topk=topk, permute_x=True, w_layout=w_layout)
            bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
            operands = Forward(arrays["x"], arrays["w"], bounds, arrays["gather_indices"])
            return UP(how, operands, problem=problem, activation=activation, interleaved=interleaved, keeps=keeps)

        arrays = {key: jax.ShapeDtypeStruct(*shape) for key, shape in shapes.items()}
        jax.jit(compute).trace(arrays).lower(lowering_platforms=("cuda",))


def lower_fp8(compute_capability, name, interleaved, gradient_dtype, hidden):
    """A layer in FP8, forward and backward."""
    activation = ACTIVATIONS[name]
    tokens, features, topk = 2048, 512, 4
    x = jax.ShapeDtypeStruct((tokens, features), "bfloat16")
    weights = [
        jax.ShapeDtypeStruct((EXPERTS, *shape), "bfloat16")
        for shape in ((hidden * (1 + activation.is_gated), features), (features, hidden))
    ]

    def compute(x, weights, logits):
        def forward(x, weights):
            routing = jgg.route(logits, topk, implementation="xla")
            return jgg.moe_mlp(
                x,
                *weights,
                routing,
                activation=activation,
                interleaved=interleaved,
                implementation="triton",
                quantization=jgg.Fp8(gradient_dtype, power_of_2_scales=interleaved),
            )

        y, vjp = jax.vjp(forward, x, weights)
        return y, vjp(y)

    with jgg.target(compute_capability):
        logits = jax.ShapeDtypeStruct((tokens, EXPERTS), "float32")
        jax.jit(compute).trace(x, weights, logits).lower(lowering_platforms=("cuda",))


def lower_fp8_product(compute_capability, out_dtype, options):
    """A product of quantized operands, as a GPU without the warp-specialized kernel makes it too."""
    arrays, static = arguments(500, 512, 768, "enk", options, "bfloat16", None)
    shapes = {name: array for name, array in arrays.items() if array is not None}

    def compute(arrays):
        quantized = {"x": jgg.quantize_tokens(arrays["x"]), "w": jgg.quantize_weights(arrays["w"])}
        return jgg.grouped_gemm(
            **arrays | quantized, **static, preferred_element_type=out_dtype, implementation="triton"
        )

    with jgg.target(compute_capability):
        jax.jit(compute).trace(shapes).lower(lowering_platforms=("cuda",))


def lower_attend(compute_capability, heads, kv_heads, features, has_window, dtype):
    """Attention of whole sequences, or, with a window, of those packed in rows."""
    batch, length = 2, 1000
    key = jax.ShapeDtypeStruct((1, batch, length, kv_heads, features), dtype)
    operands = Attend(jax.ShapeDtypeStruct((batch, length, heads, features), dtype), key, key)
    if has_window:
        starts, is_local = jax.ShapeDtypeStruct((batch, length), "int32"), jax.ShapeDtypeStruct((), "bool")
        sinks = jax.ShapeDtypeStruct((heads,), "float32")
        operands = operands._replace(starts=starts, is_local=is_local, sinks=sinks)
    with jgg.target(compute_capability):
        attend = functools.partial(ATTEND, How("triton", current_target()), scale=0.1)
        attend = functools.partial(attend, window=128 if has_window else None)
        jax.jit(attend).trace(operands).lower(lowering_platforms=("cuda",))


def lower_attend_one(compute_capability, heads, kv_heads, features, has_window, dtype):
    """Attention of one token to a cache that takes several programs."""
    batch, capacity, layers = 3, 1000, 2
    query, key = (batch, heads, features), (batch, kv_heads, features)
    cache = layers, batch, capacity, kv_heads, features
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, key, key, cache, cache)]
    arrays += [jax.ShapeDtypeStruct(shape, "int32") for shape in ((), (batch,))]
    more = [jax.ShapeDtypeStruct((), "bool"), jax.ShapeDtypeStruct((heads,), "float32")]
    with jgg.target(compute_capability):
        attend = functools.partial(ATTEND_ONE, How("triton", current_target()), scale=0.1)
        attend = functools.partial(attend, window=128 if has_window else None)
        operands = AttendOne(*arrays, *(more if has_window else ()))
        jax.jit(attend).trace(operands).lower(lowering_platforms=("cuda",))


def lower_delta_rule(compute_capability, features, dtype):
    """The gated delta rule of packed sequences and its gradients, and of one token."""
    batch, length, key_heads, heads, layers = 2, 1000, 2, 4, 3
    arrays = [((key_heads, features), dtype)] * 2 + [((heads, features), dtype)] + [((heads,), "float32")] * 2
    of_tokens = [jax.ShapeDtypeStruct((batch, length, *shape), kind) for shape, kind in arrays]
    of_one = [jax.ShapeDtypeStruct((batch, *shape), kind) for shape, kind in arrays]
    state = jax.ShapeDtypeStruct((batch, heads, features, features), "float32")
    operands = DeltaRule(*of_tokens, state, jax.ShapeDtypeStruct((batch, length), "bool"))
    states = jax.ShapeDtypeStruct((layers, *state.shape), "float32")
    one = DeltaRuleOne(*of_one, states, jax.ShapeDtypeStruct((), "int32"))
    with jgg.target(compute_capability):
        how = How("triton", current_target())
        forward = functools.partial(DELTA_RULE, how, keeps=True, scale=0.1, epsilon=1e-6)
        y, last_state, *kept = jax.eval_shape(forward, operands)
        backward = functools.partial(DELTA_RULE_BACKWARD, how, scale=0.1, epsilon=1e-6)
        jax.jit(forward).trace(operands).lower(lowering_platforms=("cuda",))
        gradients = DeltaRuleBackward(*operands, *kept, y, last_state)
        jax.jit(backward).trace(gradients).lower(lowering_platforms=("cuda",))
        step = functools.partial(DELTA_RULE_ONE, how, scale=0.1, epsilon=1e-6)
        jax.jit(step).trace(one).lower(lowering_platforms=("cuda",))


def lower_attend_latents(compute_capability, heads, rank, rest, dtype):
    """Attention of one token to a cache of latents."""
    query, cache = (3, heads, rank + rest), (2, 3, 1000, 1, rank + rest)
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in (query, cache)]
    arrays += [jax.ShapeDtypeStruct(shape, "int32") for shape in ((), (3,))]
    with jgg.target(compute_capability):
        attend = functools.partial(ATTEND_LATENTS, How("triton", current_target()), scale=0.1, rank=rank)
        jax.jit(attend).trace(AttendLatents(*arrays)).lower(lowering_platforms=("cuda",))


def lower_project_few(compute_capability, rows, features, dtype):
    """Queries, keys and values of few tokens, with biases and without."""
    columns = 4096, 512, 512
    x = jax.ShapeDtypeStruct((rows, features), dtype)
    matrices = [jax.ShapeDtypeStruct((features, size), dtype) for size in columns]
    biases = [jax.ShapeDtypeStruct((size,), dtype) for size in columns] if rows > 1 else []
    with jgg.target(compute_capability):
        project = functools.partial(PROJECT_FEW, How("triton", current_target()))
        jax.jit(project).trace(ProjectFew(x, *matrices, *biases)).lower(lowering_platforms=("cuda",))


def lower_symmetric(compute_capability, groups, size, reduced, dtype, out_dtype, precision=None, kernel="plain"):
    """A symmetric product with another matrix added."""
    left, add = (jax.ShapeDtypeStruct((*groups, size, columns), dtype) for columns in (reduced, size))
    config = None if kernel == "plain" else hopper_config(CONFIG_TYPES["forward"], "enk")
    with jgg.target(compute_capability):
        compute = functools.partial(SYMMETRIC, How("triton", current_target()), config=config)
        compute = functools.partial(compute, dtype=jnp.dtype(out_dtype), precision=as_precision(precision))
        operands = Symmetric(left, jax.ShapeDtypeStruct((3,), "float32"), left, add)
        jax.jit(compute).trace(operands).lower(lowering_platforms=("cuda",))


def lower_stored(compute_capability, kind, w_layout, rows):
    """A product that gathers few rows, or many, of weights in MXFP4 or FP8 that is not multiplied in FP8."""
    in_features, out_features = 2880, 5760
    arrays, static = arguments(rows, in_features, out_features, w_layout, "up", "bfloat16", None)
    floats = {key: arrays.pop(key) for key in ("x", "w", "topk_weights", "bias")}
    axis = 1 if w_layout == "ekn" else 2
    values, scales = ([*floats["w"].shape] for _ in range(2))
    if kind == "packed":
        values[axis] //= 2
        scales[axis] //= 32
        dtypes = "uint8", "uint8"
    else:
        scales[1:] = [-(-size // 128) for size in scales[1:]]
        dtypes = "float8_e4m3fn", "float32"
    w = jgg.QuantizedArray(*map(jax.ShapeDtypeStruct, (tuple(values), tuple(scales)), dtypes))
    problem = check_problem(**floats, **arrays, **static)

    def compute(x, w, group_sizes, gather_indices):
        bounds = group_bounds(group_sizes, problem.num_rows)
        how = How("triton", current_target())
        return FORWARD(how, Forward(x, w, bounds, gather_indices), problem=problem)

    with jgg.target(compute_capability):
        jax.jit(compute).trace(floats["x"], w, **arrays).lower(lowering_platforms=("cuda",))


def layer_kernels(compute_capability, takes_all):
    """The same of routing and of each activation; those of one projection have the curves of the gated ones."""
    for num_experts in EXPERT_COUNTS if takes_all else EXPERT_COUNTS[::3]:
        yield ["route", num_experts], functools.partial(lower_routing, compute_capability, num_experts)
    logits = [
        (8192, 128, "bfloat16", "float32"),
        (1, 128, "bfloat16", "bfloat16"),
        (2048, 128, "bfloat16", "bfloat16"),
        (32_768, 256, "bfloat16", "float32"),
        (512, 130, "float16", "float32"),
        (8192, 8, "float16", "float16"),
        (8192, 128, "float32", "float32"),
        (1, 17, "float32", "float32"),
        (2880, 128, "float32", "float32", "highest"),
    ]
    for case in logits if takes_all else logits[:2]:
        yield ["logits", *case], functools.partial(lower_logits, compute_capability, *case)
    for case in ((2048, "bfloat16"), (17, "float32")) if takes_all else ((2880, "bfloat16"),):
        yield ["add_gated", *case], functools.partial(lower_add_gated, compute_capability, *case)
    attention = [(64, 8, 64, True, "bfloat16"), (32, 4, 128, False, "float32"), (16, 16, 256, False, "bfloat16")]
    attention.append((16, 2, 512, True, "bfloat16"))
    for case in attention if takes_all else attention[:1]:
        yield ["attend_one", *case], functools.partial(lower_attend_one, compute_capability, *case)
        yield ["attend", *case], functools.partial(lower_attend, compute_capability, *case)
    for case in ((128, "bfloat16"), (40, "float16")) if takes_all else ((128, "bfloat16"),):
        yield ["delta_rule", *case], functools.partial(lower_delta_rule, compute_capability, *case)
    latents = [(20, 512, 64, "bfloat16"), (128, 512, 64, "bfloat16"), (16, 256, 32, "float32")]
    for case in latents if takes_all else latents[:1]:
        yield ["attend_latents", *case], functools.partial(lower_attend_latents, compute_capability, *case)
    projections = [(1, 2048, "bfloat16"), (64, 2880, "bfloat16"), (3, 96, "float32"), (17, 100, "float16")]
    for case in projections if takes_all else projections[:1]:
        yield ["project_few", *case], functools.partial(lower_project_few, compute_capability, *case)
    gated = [name for name, activation in ACTIVATIONS.items() if activation.is_gated]
    cases = [(name, True, 96, "bfloat16") for name in gated]
    cases += [
        ("swiglu", False, 768, "bfloat16"),
        ("swiglu", False, 17, "float32"),
        ("ungated_relu_squared", False, 96, "float16"),
    ]
    for case in cases:
        yield ["activation", *case], functools.partial(lower_activation, compute_capability, *case)
    norms = [(2880, "bfloat16"), (8192, "float32"), (17, "float32"), (8192, "bfloat16")]
    for case in norms if takes_all else norms[:2]:
        yield ["norm", *case], functools.partial(lower_norm, compute_capability, *case)
    for size, scale, *softcap in ((151936, 1.0), (262144, 1.0, 30.0), (49155, 0.3))[: 3 if takes_all else 2]:
        parameters = {"scale": scale} | ({"softcap": softcap[0]} if softcap else {})
        yield ["losses", size, scale, *softcap], functools.partial(lower_losses, compute_capability, size, **parameters)
    rotary = [(32, 128, 64, True), (64, 64, 32, False), (8, 128, 32, True), (2, 256, 128, True), (3, 80, 40, True)]
    for case in rotary if takes_all else rotary[:2]:
        yield ["rotary", *case], functools.partial(lower_rotary, compute_capability, *case)
    for case in (("ekn", 4), ("enk", 4), ("ekn", 500), ("enk", 500)):
        yield ["packed", *case], functools.partial(lower_stored, compute_capability, "packed", *case)
    # of at most 256 rows, or with float32 results: Hopper's kernel has others
    symmetric = [((EXPERTS,), 256, 2048, "bfloat16", "bfloat16"), ((2, EXPERTS), 1536, 1536, "bfloat16", "float32")]
    symmetric += [((), 513, 513, "float16", "float16"), ((EXPERTS,), 64, 2048, "bfloat16", "bfloat16")]
    symmetric += [((EXPERTS,), 768, 2048, "float32", "float32", precision) for precision in (None, "high", "highest")]
    for case in symmetric if takes_all else symmetric[:1]:
        yield ["symmetric", *case], functools.partial(lower_symmetric, compute_capability, *case)
    if compute_capability >= 89:
        for case in (("ekn", 4), ("enk", 32)):
            yield ["stored", *case], functools.partial(lower_stored, compute_capability, "fp8", *case)
        for case in (("swiglu", False, "float8_e4m3fn", 4096), ("clamped_swiglu", True, "float8_e4m3fn", 256)):
            yield ["fp8", *case], functools.partial(lower_fp8, compute_capability, *case)
        for case in (("float32", "plain"), ("float32", "everything")):
            yield ["fp8 product", *case], functools.partial(lower_fp8_product, compute_capability, *case)
    if compute_capability == 90:
        cases = [("swiglu", False, "ekn", True), ("clamped_swiglu", True, "enk", False)]
        cases += [("swiglu", False, "enk", False), ("ungated_relu_squared", False, "ekn", False)]
        for case in cases if takes_all else cases[:1]:
            yield ["up", *case], functools.partial(lower_up, compute_capability, *case)
        cases = [((EXPERTS,), 1536, 2048, "bfloat16", "bfloat16"), ((), 136, 72, "float16", "bfloat16")]
        for case in cases if takes_all else cases[:1]:
            symmetric = functools.partial(lower_symmetric, compute_capability, *case, kernel="hopper")
            yield ["symmetric", *case, "hopper"], symmetric


def kind(name, launch, takes_all):
    """What decides how a kernel is compiled: of sizes, whether rows are aligned and a tile takes more than a step."""
    constants = {key: value for key, value in launch.constants.items() if key not in SIZES}
    if name in HOPPER_KERNELS:  # which take six seconds to compile, and no more memory with a bias or weights
        of_interest = ("RAGGED_M", "ACTIVATES")
        if takes_all:
            of_interest += ("GATHERS", "HAS_PIECES", "BLOCK_COLUMNS", "STAGES", "Y_IS_TRANSPOSED")
            of_interest += ("GATED", "INTERLEAVED", "CURVE")
        constants = {key: value for key, value in constants.items() if key in of_interest}
        sizes = {key: result.dtype.itemsize for key, result in launch.result_types.items()}
        return repr((name, constants, sizes, launch.operands["left"].dtype.name.removeprefix("b")))
    aligned = {key: launch.constants[key] % 16 == 0 for key in SIZES if key in launch.constants}
    has_steps = launch.constants.get("REDUCED", 0) > launch.constants.get("BLOCK_REDUCED", 0)
    dtypes = {key: array.dtype for key, array in (launch.arrays | launch.result_types).items()}
    options = [*launch.descriptors], launch.num_warps, launch.num_stages
    return repr((name, constants, aligned, has_steps, dtypes, options))


def leave_out_repeated_kernels(takes_all=True):
    """Compiles one kernel of each kind, or of the Hopper kernels few kinds."""
    call_kernel, seen = triton_implementation.call, set()

    def call(compute_capability, kernel, launch):
        name = kernel.__name__
        if name in (*KERNELS, *SMALL_KERNELS, *HOPPER_KERNELS):
            if kind(name, launch, takes_all) in seen:
                return {key: jnp.zeros(result.shape, result.dtype) for key, result in launch.result_types.items()}
            seen.add(kind(name, launch, takes_all))
        return call_kernel(compute_capability, kernel, launch)

    triton_implementation.call = call


def assemble(folder, compute_capability):
    """Name, shared memory, spills and instructions to store of the kernel dumped in a folder."""
    (ptx,), (info,) = folder.glob("*.ptx"), folder.glob("*.compile_info")
    assembler = "ptxas-blackwell" if compute_capability >= 100 else "ptxas"
    architecture = re.search(r"\.target (\w+)", ptx.read_text())[1]
    done = subprocess.run(
        [
            Path(triton.__file__).parent / "backends/nvidia/bin" / assembler,
            "-v",
            f"-arch={architecture}",
            ptx,
            "-o",
            folder / "binary",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spills, done.stderr
    shared_memory = int(info.read_text().split(":")[-1])
    stores = sorted(set(re.findall(r"st\.global[\w.]*", ptx.read_text())))
    return {"kernel": ptx.stem, "shared_memory": shared_memory, "spills": sum(map(int, spills)), "stores": stores}


def heuristic_kernels(compute_capability, takes_all):
    """(what a kernel is for, the function that lowers it) of each configuration of the heuristic."""
    with jgg.target(compute_capability):
        target = current_target()
    for dtype, precision in MODES:
        if dtype == "float32" and not takes_all:
            continue
        if dtype == "float32" and (compute_capability == 80 or (precision == "highest" and compute_capability > 89)):
            continue  # the same kernels are compiled for 8.9, where less shared memory must be enough for them
        for problem, products in problems_to_lower(target, (dtype, precision)):
            what = [*problem, dtype, precision]
            yield what, functools.partial(lower, compute_capability, problem, dtype, precision, products)


def tuned_kernels(compute_capability, path):
    """The same of each configuration in a file, whatever its order of tiles, for a problem of sizes that all share."""
    sizes = {"num_rows": 4096, "num_experts": EXPERTS, "in_features": 512, "out_features": 512, "topk": 2}
    entries = {}
    for entry in tuned_files.parse(path):
        problem = dataclasses.replace(entry.problem, **sizes)
        entry = dataclasses.replace(entry, problem=problem, config=dataclasses.replace(entry.config, band=8))
        entries[entry.op, problem, entry.config] = entry
    for entry in entries.values():
        yield entry.as_json(), functools.partial(lower_entry, compute_capability, entry)


def main():
    compute_capability = int(sys.argv[1])
    dumped = Path(os.environ["JAX_TRITON_DUMP_DIR"])
    takes_all = "--all" in sys.argv[2:]
    leave_out_repeated_kernels(len(sys.argv) > 2)
    kernels = [tuned_kernels(compute_capability, Path(file)) for file in sys.argv[2:] if not takes_all]
    if not kernels:
        kernels = [heuristic_kernels(compute_capability, takes_all), layer_kernels(compute_capability, takes_all)]
    for problem, lower_it in itertools.chain.from_iterable(kernels):
        before = set(dumped.iterdir())
        lower_it()
        for folder in set(dumped.iterdir()) - before:
            print(json.dumps({"problem": problem, **assemble(folder, compute_capability)}), flush=True)


if __name__ == "__main__":
    main()
