"""An expert's first product and its activation: one kernel or two, with and without the pre-activation as a result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.activations import ACTIVATIONS
from jgg.core.gpu_target import current_target
from jgg.core.problem_checks import check_problem
from jgg.core.quantized import Format
from jgg.core.schedule import group_bounds
from jgg.launching.choice import How
from jgg.launching.heuristic import hopper_config
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.launching.tuned_configs import choose_config
from jgg.products.activate import ACTIVATE, Activate, Hidden
from jgg.products.forward import FORWARD, Forward
from jgg.products.up import UP

TOKENS, TOPK, SIZES = 700, 2, (300, 0, 1, 640, 190, 129)  # of 1400 rows 140 are of no group


def operands(activation, w_layout="enk", hidden=200, features=192, dtype="bfloat16", biased=False):
    rng = np.random.default_rng(hidden)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[-1] ** 0.25, dtype)  # noqa: E731
    width = hidden * (1 + activation.is_gated)
    w = normal(len(SIZES), width, features)
    return {
        "x": normal(TOKENS, features),
        "w": w if w_layout == "enk" else jnp.swapaxes(w, 1, 2),
        "group_sizes": jnp.asarray(SIZES, jnp.int32),
        "gather_indices": jnp.asarray(rng.permutation(TOKENS * TOPK), jnp.int32),
        "bias": normal(len(SIZES), width) if biased else None,
    }


def compute(
    arrays, activation, implementation, w_layout="enk", gathers=True, config=None, interleaved=False, keeps=False
):
    """The results; of a problem whose x is in token order, gathered in the kernel or copied before."""
    problem = check_problem(
        **{key: arrays[key] for key in ("x", "w", "bias", "group_sizes", "gather_indices")},
        topk=TOPK,
        permute_x=True,
        w_layout=w_layout,
    )
    if implementation == "triton":
        config = config or choose_config(KernelConfigForward, problem, current_target())
        config = dataclasses.replace(config, fuse_gather=gathers)
    how = How(implementation, current_target())
    bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
    of_up = Forward(arrays["x"], arrays["w"], bounds, arrays["gather_indices"], bias=arrays["bias"])
    return UP(how, of_up, config, problem=problem, hidden=Hidden(activation, interleaved, keeps))


def assert_equal(got, want, tolerance):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(g.astype(jnp.float32), w.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(
    ("name", "interleaved", "w_layout", "hidden", "gathers", "biased"),
    [
        ("swiglu", False, "enk", 200, True, False),
        ("swiglu", False, "ekn", 200, False, True),
        ("swiglu", False, "ekn", 296, True, False),
        ("swiglu", False, "enk", 132, True, True),  # half a row is no multiple of 16 bytes
        ("swiglu", False, "ekn", 132, True, False),
        ("clamped_swiglu", True, "enk", 200, True, True),
        ("clamped_swiglu", True, "enk", 264, False, False),
        ("clamped_swiglu", True, "ekn", 296, True, False),
        ("clamped_swiglu", False, "ekn", 264, True, True),
        ("geglu", False, "enk", 136, True, False),
        ("geglu", False, "ekn", 200, False, False),
        ("geglu_tanh", False, "ekn", 136, True, False),
        ("reglu", False, "ekn", 72, True, False),
        ("ungated_relu_squared", False, "enk", 264, True, True),
        ("ungated_gelu_tanh", False, "ekn", 160, False, False),
    ],
)
def test_results_are_those_of_plain_jax(name, interleaved, w_layout, hidden, gathers, biased, keeps, dtype, tolerance):
    activation = ACTIVATIONS[name]
    arrays = operands(activation, w_layout, hidden, dtype=dtype, biased=biased)
    options = {"w_layout": w_layout, "gathers": gathers, "interleaved": interleaved, "keeps": keeps}
    got = compute(arrays, activation, "triton", **options)
    want = compute(arrays, activation, "xla", **options)
    assert (got.kept is not None) == keeps
    assert_equal(got, want, tolerance)
    outside = np.asarray(got.hidden[sum(SIZES) :], np.float32)
    assert outside.shape[0] == 140
    assert (outside == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [256, 128])
def test_both_layouts_of_w_give_the_same_bits(columns):
    activation, results = ACTIVATIONS["swiglu"], []
    for w_layout in ("enk", "ekn"):
        arrays = operands(activation, w_layout, hidden=296, biased=True)
        config = hopper_config(KernelConfigForward, w_layout, columns)
        options = {"w_layout": w_layout, "config": config, "interleaved": False, "keeps": True}
        results.append(compute(arrays, activation, "triton", **options))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_one_kernel_where_it_spills_no_registers(launched):
    """And where TMA can store rows of hidden features."""

    def is_one(name, keeps, w_layout="enk", interleaved=False, hidden=1024, compute_capability=90):
        activation = ACTIVATIONS[name]
        arrays = jax.eval_shape(lambda: operands(activation, w_layout, hidden, features=2048))
        options = {"w_layout": w_layout, "interleaved": interleaved, "keeps": keeps}
        launched.clear()
        with jgg.target(compute_capability):
            function = jax.jit(lambda arrays: compute(arrays, activation, "triton", **options))
            function.trace(arrays).lower(lowering_platforms=("cuda",))
        return len(launched) == 1

    assert is_one("swiglu", keeps=True)
    assert not is_one("ungated_gelu", keeps=False)
    assert is_one("ungated_relu_squared", keeps=False, w_layout="ekn")
    assert is_one("swiglu", keeps=True, w_layout="ekn", interleaved=True)
    assert is_one("swiglu", keeps=False, w_layout="ekn")
    assert not is_one("swiglu", keeps=False, hidden=1028)
    assert not is_one("swiglu", keeps=False, w_layout="ekn", hidden=1028)
    assert not is_one("swiglu", keeps=False, compute_capability=80)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("stored_as", [None, Format()])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_operands_and_results_are_quantized_apart(is_quantized, stored_as, keeps):
    """UP is FORWARD and ACTIVATE, by names, whichever of its operands and results are quantized."""
    activation, how = ACTIVATIONS["swiglu"], How(None, current_target())
    arrays = operands(activation, hidden=136)
    names = ("x", "w", "bias", "group_sizes", "gather_indices")
    problem = check_problem(**{key: arrays[key] for key in names}, topk=TOPK, permute_x=True)
    if is_quantized:
        problem = problem.quantized
        arrays |= {"x": jgg.quantize_tokens(arrays["x"]), "w": jgg.quantize_weights(arrays["w"])}
    bounds = group_bounds(arrays["group_sizes"], problem.num_rows)
    of_up = Forward(arrays["x"], arrays["w"], bounds, arrays["gather_indices"])
    hidden = Hidden(activation, interleaved=False, keeps=keeps, stored_as=stored_as)
    got = UP(how, of_up, problem=problem, hidden=hidden)
    pre = FORWARD(how, of_up, problem=problem)
    want = ACTIVATE(how, Activate(pre), hidden=hidden)
    if keeps and stored_as is None:
        want = want._replace(kept=pre)
    assert isinstance(got.hidden, jgg.QuantizedArray) == (stored_as is not None)
    assert (got.kept is not None) == keeps
    jax.tree.map(np.testing.assert_array_equal, got, want)
