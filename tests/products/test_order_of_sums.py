"""One row, one result: no configuration, and no number of rows, gives a row of a product other bits.

On a CPU the tests read what would be launched: no launch splits the axis that is reduced, and steps that are scaled
have one length. On a GPU they compare bits.
"""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core import versions
from jgg.core.activations import ACTIVATIONS
from jgg.core.gpu_target import Target, current_target
from jgg.core.quantized import Format, quantize
from jgg.core.schedule import group_bounds
from jgg.launching import heuristic, tuned_files
from jgg.launching.choice import How
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.launching.tuned_configs import choose_config
from jgg.products.forward import FORWARD, Forward
from jgg.products.launches.activations import Hidden
from jgg.products.launches.plans import plan_forward, plan_up
from jgg.products.low_rank import LowRankTerm
from jgg.products.up import UP
from jgg.tuning.workloads import gemm, operands
from tests.support.configurations import ROWS, all_configs
from tests.support.packed import random_packed

GROUPS = (70, 0, 133, 5)
MANY = {"permute_x": True, "permute_y": True, "weighted": True, "biased": True, "rank": 72}
CASES = {
    "bfloat16": {},
    "bfloat16, ekn, all": {"w_layout": "ekn", **MANY},
    "bfloat16, one group": {"groups": (208,)},
    "bfloat16, few columns": {"out_features": 16},
    "bfloat16, odd": {"in_features": 97, "out_features": 50, **MANY},
    "float16, all": {"dtype": "float16", **MANY},
    "fp8": {"dtype": "fp8", "out_features": 512, "in_features": 464},
    "fp8, all": {"dtype": "fp8", "out_features": 512, **MANY},
}


def make(in_features=448, out_features=272, rank=0, groups=GROUPS, **options):
    sizes = {"num_rows": sum(groups), "num_experts": len(groups)}
    problem = gemm(in_features=in_features, out_features=out_features, **sizes, **options)
    arrays = operands(problem) | {"group_sizes": jnp.asarray(groups, jnp.int32)}
    if rank:
        dtype, layout = problem.out_dtype, "enk" if problem.is_quantized else problem.w_layout
        shape = (out_features, rank) if layout == "enk" else (rank, out_features)
        keys = jax.random.split(jax.random.key(1))
        rows = jax.random.normal(keys[0], (problem.num_rows, rank), dtype)
        matrices = jax.random.normal(keys[1], (problem.num_experts, *shape), dtype)
        arrays["low_rank"] = LowRankTerm(rows, matrices / jnp.asarray(8, dtype))
    return problem, arrays


def product(problem, arrays, config=None, implementation="triton"):
    own = {key: arrays.get(key) for key in ("gather_indices", "topk_weights", "bias", "low_rank")}
    bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
    how = How(implementation, current_target())
    return FORWARD(how, Forward(arrays["x"], arrays["w"], bounds, **own), config, problem=problem)


def bits(array):
    return np.asarray(array).view(f"uint{8 * array.dtype.itemsize}")


def compiled(functions, *arguments):
    """The functions' results; Triton compiles several kernels at a time."""
    with ThreadPoolExecutor(8) as threads:
        programs = list(threads.map(lambda function: jax.jit(function).lower(*arguments).compile(), functions))
    return [program(*arguments) for program in programs]


def differing(results):
    """For each result the share of elements with other bits than in the first."""
    first, *_ = results = [bits(result) for result in results]
    return [float((result != first).mean()) for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_every_configuration_gives_the_same_bits(name):
    problem, arrays = make(**CASES[name])
    configs = all_configs(problem, current_target())
    results = compiled([functools.partial(product, problem, config=config) for config in configs], arrays)
    others = {config: share for config, share in zip(configs, differing(results), strict=True) if share}
    assert not others


STORED = {
    "deepseek's blocks": {"block": (128, 128)},
    "deepseek's blocks, ekn": {"block": (128, 128), "w_layout": "ekn"},
    "deepseek's blocks, float16": {"block": (128, 128), "dtype": "float16"},
    "blocks of 32": {"block": (1, 32)},
    "blocks of 32, ekn": {"block": (32, 1), "w_layout": "ekn"},
    "scales of columns": {"block": (128, 1), "w_layout": "ekn"},
    "packed": {"axis": -1},
    "packed, ekn": {"axis": -2, "w_layout": "ekn"},
    "packed, ekn, float16": {"axis": -2, "w_layout": "ekn", "dtype": "float16"},
    "rows": {"of_x": True, "out_features": 16},
    "rows, ekn": {"of_x": True, "out_features": 64, "w_layout": "ekn"},
    "rows, wide": {"of_x": True, "out_features": 160},
}
EACH = (1, 16, 32, 64, 160)  # rows of a group


def make_stored(block=None, axis=None, of_x=False, rows=EACH[-1], **options):
    """A problem with groups of that many rows, the first of those of larger groups."""
    experts = 4
    sizes = {"num_rows": rows * experts, "num_experts": experts, "in_features": 448}
    problem = gemm(**sizes | {"out_features": 288} | options)
    largest = operands(dataclasses.replace(problem, num_rows=EACH[-1] * experts))
    x = largest["x"].reshape(experts, EACH[-1], -1)[:, :rows].reshape(rows * experts, -1)
    w = largest["w"]
    if of_x:
        x = quantize(x, (1, 128), Format())
    else:
        w = random_packed(problem.w_shape, axis) if axis else quantize(w, block, Format())
    return problem, {"x": x, "w": w, "group_sizes": jnp.full((experts,), rows, jnp.int32)}


def of_w(options):
    """What `plan_forward` is told of w."""
    block = options.get("block") or ((32, 1) if options["axis"] == -2 else (1, 32))
    return {"w_block": block, "w_is_packed": "axis" in options}


def first_rows(y, rows):
    return y.reshape(4, -1, y.shape[1])[:, :rows].reshape(rows * 4, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", STORED)
def test_few_rows_get_the_bits_of_many(name):
    """Few rows read weights in their stored form, or a quantized x; for many, weights are dequantized first."""
    problems = [make_stored(rows=rows, **STORED[name]) for rows in EACH]
    with ThreadPoolExecutor(8) as threads:
        programs = list(
            threads.map(lambda case: jax.jit(functools.partial(product, case[0])).lower(case[1]).compile(), problems)
        )
    results = [program(arrays) for program, (_, arrays) in zip(programs, problems, strict=True)]
    for rows, result in zip(EACH, results, strict=True):
        assert differing([first_rows(results[-1], rows), result])[1] == 0, rows


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek's blocks", "deepseek's blocks, ekn", "packed, ekn", "packed, ekn, float16"])
def test_tiles_of_stored_weights_give_the_bits_of_dense_ones(name):
    problem, arrays = make_stored(**STORED[name])
    configs = [
        KernelConfigForward.of_tile(tile, problem.w_layout, num_warps=4, num_stages=stages, programs_per_sm=programs)
        for _, tile, stages, programs in heuristic._TILES_OF_STORED
    ]
    plans = [plan_forward(problem, current_target(), config, **of_w(STORED[name])) for config in configs]
    assert [plan.config for plan in plans] == configs and not any(plan.dequantizes for plan in plans)
    results = compiled([functools.partial(product, problem, config=config) for config in configs], arrays)
    dense = arrays | {"w": arrays["w"].dequantize(problem.dtype)}
    assert not any(differing([product(problem, dense), *results]))


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["swiglu", "geglu_tanh", "clamped_swiglu", "ungated_relu_squared", "ungated_gelu"])
def test_an_activation_has_the_same_bits_in_the_product_and_alone(name, dtype, interleaved):
    activation = ACTIVATIONS[name]
    if interleaved and not activation.is_gated:
        pytest.skip("has no pairs")
    problem, arrays = make(dtype=dtype, out_features=512, biased=True, permute_x=True)
    bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
    own = {"bounds": bounds, "gather_indices": arrays["gather_indices"], "bias": arrays["bias"]}
    hidden = Hidden(activation, interleaved)

    def activated(arrays, config=None):
        of_product = Forward(arrays["x"], arrays["w"], **own)
        return UP(How("triton", current_target()), of_product, config, problem=problem, hidden=hidden).hidden

    plain = KernelConfigForward(block_m=64, num_warps=4, num_stages=2)
    one, other = compiled([activated, functools.partial(activated, config=plain)], arrays)
    assert not differing([one, other])[1]


MLPS = {
    "bfloat16": {},
    "float16, biases, LoRA": {"dtype": "float16", "biased": True, "rank": 8},
    "ekn, interleaved": {"w_layout": "ekn", "interleaved": True, "activation": "clamped_swiglu", "biased": True},
    "fp8, LoRA": {"quantization": jgg.Fp8(), "rank": 24},
    "fp8 as stored, LoRA": {"stored": "fp8", "rank": 8},
    "mxfp4 as stored, biases": {"stored": "mxfp4", "w_layout": "ekn", "biased": True},
}
TOKENS, EXPERTS, TOPK, FEATURES, HIDDEN = (1, 40, 600, 2048), 16, 4, 512, 256


def mlp_arguments(dtype="bfloat16", w_layout="enk", stored=None, biased=False, rank=0, **options):
    """Arguments of moe_mlp but the tokens and the routing, and its options."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape):
        return jax.random.normal(next(keys), shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)

    arrays, options = {}, options | {"w_layout": w_layout, "implementation": "triton"}
    for name, (columns, reduced) in {"gate_up": (2 * HIDDEN, FEATURES), "down": (FEATURES, HIDDEN)}.items():
        shape = (columns, reduced) if w_layout == "enk" else (reduced, columns)
        w = normal(EXPERTS, *shape)
        if stored == "mxfp4":
            w = random_packed(w.shape, -1 if w_layout == "enk" else -2)
        arrays[f"w_{name}"] = jgg.quantize_weights(w) if stored == "fp8" else w
        if biased:
            arrays[f"b_{name}"] = normal(EXPERTS, columns)
        if rank:
            arrays[f"low_rank_{name}"] = jgg.LowRank(normal(EXPERTS, rank, reduced), normal(EXPERTS, columns, rank))
    return arrays, options


@pytest.mark.gpu
@pytest.mark.parametrize("name", MLPS)
def test_a_token_has_the_same_bits_beside_any_number_of_others(name):
    arrays, options = mlp_arguments(**MLPS[name])
    tokens = jax.random.normal(jax.random.key(1), (TOKENS[-1], FEATURES), MLPS[name].get("dtype", "bfloat16"))
    logits = jax.random.normal(jax.random.key(2), (TOKENS[-1], EXPERTS))
    routing = jgg.route(logits, TOPK)

    def mlp(count):
        def compute(arrays, tokens, weights, choices):
            order = jgg.sort_by_expert(choices[:count], EXPERTS)
            return jgg.moe_mlp(
                tokens[:count], **arrays, routing=jgg.Routing(weights[:count], choices[:count], *order), **options
            )

        return compute

    given = arrays, tokens, routing.topk_weights, routing.topk_indices
    results = compiled([mlp(count) for count in TOKENS], *given)
    for count, result in zip(TOKENS, results, strict=True):
        assert not differing([results[-1][:count], result])[1], count


TARGETS = {80: 108, 89: 142, 90: 132, 100: 148}
ON_EACH = pytest.mark.parametrize(
    "capability", [pytest.param(each, marks=[pytest.mark.sweep] * (each != 90)) for each in TARGETS]
)
# Hopper, and the one with the least shared memory
ON_SOME = pytest.mark.parametrize(
    "capability", [pytest.param(each, marks=[pytest.mark.sweep] * (each not in (89, 90))) for each in TARGETS]
)


def shapes_of(function, **options):
    """What `make` or `make_stored` makes, its arrays as shapes and dtypes alone."""
    problems = []

    def arrays():
        problem, own = function(**options)
        problems.append(problem)
        return own

    shapes = jax.eval_shape(arrays)
    return problems[0], shapes


@ON_EACH
@pytest.mark.parametrize("name", CASES)
def test_no_configuration_splits_the_reduced_axis(name, capability, launched):
    """Each launch multiplies whole rows by whole columns of w, once, and writes y itself rather than parts of a sum."""
    problem, arrays = shapes_of(make, **CASES[name])
    target = Target(capability, TARGETS[capability])
    with jgg.target(capability, TARGETS[capability]):
        for config in all_configs(problem, target):
            launched.clear()
            run = jax.jit(functools.partial(product, problem, config=config))
            run.trace(arrays).lower(lowering_platforms=("cuda",))
            launches = [
                launch
                for kernel, launch in launched
                if kernel in ("forward_kernel", "hopper_kernel", "hopper_fp8_kernel")
            ]
            assert len(launches) == 1
            (launch,) = launches
            assert launch.constants["REDUCED"] == problem.in_features
            assert [result.shape for result in launch.outputs.values()] == [problem.y_shape]


def test_a_configuration_has_no_field_that_could_split_the_reduced_axis():
    fields = {field.name for field in dataclasses.fields(KernelConfigForward)}
    assert fields == {
        *("block_m", "block_n", "block_k", "num_warps", "num_stages", "band", "programs_per_sm", "kernel"),
        *("use_tma_load_x", "use_tma_load_w", "fuse_gather", "fuse_scatter"),
    }


@ON_SOME
def test_in_fp8_one_kernel_activates_for_every_number_of_rows_or_for_none(capability):
    """It does not round sums before it activates them, which a kernel after the product can only do."""
    target, ways = Target(capability, TARGETS[capability]), {name: set() for name in ACTIVATIONS}
    problem, _ = shapes_of(make, **CASES["fp8"], permute_x=True)
    for rows in ROWS:
        of_rows = dataclasses.replace(problem, num_rows=rows * problem.num_experts)
        kernels = {config.kernel for config in all_configs(of_rows, target)}
        assert len(kernels) <= 1  # none on GPUs that do not multiply in FP8
        for name, activation in ACTIVATIONS.items():
            plan = plan_up(of_rows, target, Hidden(activation, interleaved=False, stored_as=Format()))
            ways[name].add((plan is None, *kernels))
    assert all(len(each) == 1 for each in ways.values()), ways


def test_in_fp8_a_tuned_configuration_of_another_kernel_is_not_used(tmp_path, monkeypatch):
    problem, target = (
        gemm(num_rows=4096, in_features=512, out_features=512, num_experts=8, dtype="fp8"),
        Target(90, 132),
    )
    entry = next(entry for path in tuned_files.shipped_files() for entry in tuned_files.parse(path))
    plain = KernelConfigForward(block_m=64, block_k=128, num_warps=4, num_stages=2)
    entry = dataclasses.replace(entry, problem=problem, config=plain, compute_capability=90)
    tuned_files.merge(tmp_path / "tuned.json", entry)
    monkeypatch.setenv("JGG_TUNED", str(tmp_path / "tuned.json"))
    assert choose_config(KernelConfigForward, problem, target).kernel == "hopper"
    monkeypatch.setattr(versions, "installed", {"triton": "9.9"}.get)  # which compiles no kernel for Hopper
    assert choose_config(KernelConfigForward, problem, target) == plain


@ON_SOME
@pytest.mark.parametrize("name", [name for name in STORED if "rows" in name])
def test_steps_that_are_scaled_have_one_length(name, capability):
    """Else few rows of a quantized x, whose steps are scaled one by one, would be added up in another order."""
    target, ways = Target(capability, TARGETS[capability]), set()
    problem, _ = shapes_of(make_stored, **STORED[name])
    for rows in ROWS:
        plan = plan_forward(dataclasses.replace(problem, num_rows=4 * rows), target, x_is_quantized=True)
        ways.add((plan.dequantizes, plan.dequantizes or plan.config.block_k))
    assert len(ways) == 1


@ON_SOME
@pytest.mark.parametrize("name", [name for name in STORED if "rows" not in name])
def test_weights_are_dequantized_where_they_multiply_in_16_bits(name, capability):
    """So that tiles of few rows, and those with w on the left, take w from registers, in an order that is known."""
    options, target = STORED[name], Target(capability, TARGETS[capability])
    problem, _ = shapes_of(make_stored, **options)
    for rows in ROWS:
        of_rows = dataclasses.replace(problem, num_rows=4 * rows)
        plan = plan_forward(of_rows, target, **of_w(options))
        assert plan.dequantizes or plan.config.block_m <= 32 or (capability == 90 and plan.config.block_n >= 64)
