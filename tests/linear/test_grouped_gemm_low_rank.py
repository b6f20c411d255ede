"""`grouped_gemm` with a low-rank term: as with merged weights, and without a gradient of the frozen weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support.cases import CASES, OPTIONS, Case, make_data
from tests.support.closeness import assert_close, distance
from tests.support.comparison import small_configs
from tests.support.marks import EVERYWHERE
from tests.support.passes import forward_and_backward

OF_CASES = [
    case
    for case in (*OPTIONS[::3], *CASES)
    if case.poison in ("", "tail") and case.gather in ("none", "random")  # what is specified for any result
]
QUICK = {
    "options-enk",
    "options-px-py-weights-bias-ekn",
    "everything",
    "sizes-everything",
    "no-rows-everything",
    "rows-past-the-groups-everything",
    "result-in-float32",
}


def make(case, dtype="float32", rank=5, seed=0):
    """The float arrays of a case with a term, by name, dy, and the arrays of its order."""
    data, rng = make_data(case, dtype), np.random.default_rng(seed)
    names = ("x", "w", "topk_weights", "bias")
    floats = {name: jnp.asarray(array) for name in names if (array := getattr(data, name)) is not None}
    experts, rows, columns = data.w.shape
    left, right = rng.standard_normal((experts, rows, rank)), rng.standard_normal((experts, rank, columns))
    left, right = (jnp.asarray(0.3 * part, dtype) for part in (left, right))
    a, b = (right, left) if case.w_layout == "enk" else (left, right)
    order = {"group_sizes": data.group_sizes, "gather_indices": data.gather_indices}
    return floats | {"low_rank": jgg.LowRank(a, b, scale=0.5)}, jnp.asarray(data.dy), order


def merged(floats, case):
    floats = dict(floats)
    return floats | {"w": floats.pop("low_rank").merge(floats["w"], case.w_layout)}


def run(floats, dy, order, case, merge=False, **options):
    """y, and the gradients in the floats by name."""
    options = {"precision": "highest", "preferred_element_type": case.out_dtype} | case.options | options

    def function(floats, order):
        floats = merged(floats, case) if merge else floats
        return jgg.grouped_gemm(**floats, **order, **options)

    return jax.jit(lambda dy, floats, order: forward_and_backward(lambda own: function(own, order))(dy, floats))(
        dy, floats, jax.tree.map(jnp.asarray, order)
    )


def assert_as_merged(case, **options):
    floats, dy, order = make(case)
    y, gradients = run(floats, dy, order, case, **options)
    want_y, want = run(floats, dy, order, case, merge=True, implementation="xla")
    assert_close(y, want_y, 2e-5)
    assert not np.any(gradients.pop("w"))
    assert_close(gradients, {name: want[name] for name in gradients}, 5e-5)


@EVERYWHERE
@pytest.mark.parametrize("case", [case for case in OF_CASES if case.name in QUICK], ids=lambda case: case.name)
def test_as_merged(case, implementation):
    assert_as_merged(
        case, implementation=implementation, **(dict(small_configs()) if implementation == "interpret" else {})
    )


@pytest.mark.sweep
@pytest.mark.parametrize("case", [case for case in OF_CASES if case.name not in QUICK], ids=lambda case: case.name)
def test_as_merged_in_other_cases(case):
    """The term is the quick cases'; test_contract.py tests everything else in all of them."""
    assert_as_merged(case)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "implementation"),
    [
        ("bfloat16", None, None),
        ("float16", "float32", None),
        pytest.param("float16", None, "interpret", marks=pytest.mark.interpret),
        *(
            pytest.param(dtype, out_dtype, "triton", marks=pytest.mark.gpu)
            for dtype in ("bfloat16", "float16")
            for out_dtype in (None, "float32")
        ),
    ],
)
def test_factors_in_float32(dtype, out_dtype, implementation):
    """Beside 16-bit x and w, the gradients of the factors are float32."""
    case = Case("large", (50, 0, 70, 80), 200, 256, 128, permute_x=True, topk=2, gather="random", out_dtype=out_dtype)
    floats, dy, order = make(case, dtype, rank=16)
    floats["low_rank"] = jax.tree.map(lambda factor: factor.astype(jnp.float32), floats["low_rank"])
    y, gradients = run(floats, dy, order, case, implementation=implementation)
    exact = jax.tree.map(lambda array: array.astype(jnp.float32), floats)
    want_y, want = run(exact, dy.astype(jnp.float32), order, case, merge=True, implementation="xla")
    assert y.dtype == (out_dtype or dtype)
    assert distance(y, want_y) < 0.01
    assert distance(gradients["x"], want["x"]) < 0.01
    for part in "ab":
        got = getattr(gradients["low_rank"], part)
        assert got.dtype == "float32"
        assert distance(got, getattr(want["low_rank"], part)) < 0.01


@pytest.mark.parametrize("weighted", [False, True])
def test_many_adapters_on_one_base(weighted):
    """Under `vmap` over adapters, each element is as if it were alone."""
    case = Case("adapters", topk=2, permute_x=True, permute_y=True, gather="random", weighted=weighted)
    floats, dy, order = make(case)
    others, _, _ = make(case, seed=1)
    both = jax.tree.map(lambda *parts: jnp.stack(parts), floats["low_rank"], others["low_rank"])

    def passes(term):
        return run(floats | {"low_rank": term}, dy, order, case)

    got = jax.vmap(passes)(both)
    for element, term in enumerate((floats["low_rank"], others["low_rank"])):
        assert_close(jax.tree.map(lambda array: array[element], got), passes(term), 1e-5)  # noqa: B023


def test_quantized_weights():
    """They are multiplied as what they dequantize to, and have no gradient; a quantized x is refused."""
    case = Case("quantized", in_features=128, out_features=128)
    floats, dy, order = make(case)
    base = jgg.quantize_weights(floats["w"])
    (y, got), (want_y, want) = (run(floats | {"w": w}, dy, order, case) for w in (base, base.dequantize(jnp.float32)))
    assert_close((y, got["low_rank"].a, got["low_rank"].b), (want_y, want["low_rank"].a, want["low_rank"].b), 1e-6)
    message = "x must be no QuantizedArray with low_rank, got QuantizedArray."
    with pytest.raises(TypeError, match=re.escape(message)):
        run(floats | {"w": base, "x": jgg.quantize_tokens(floats["x"])}, dy, order, case)


def test_no_product_for_the_weights():
    floats, dy, order = make(Case("uneven"))
    program = str(jax.make_jaxpr(lambda floats: run(floats, dy, order, Case("uneven")))(floats))
    assert program.count(" dw[") == 2
    assert program.count(" dx[") == 2


def test_errors():
    floats, dy, order = make(Case("uneven"))
    term = floats["low_rank"]
    with pytest.raises(ValueError, match=re.escape("low_rank for w [5, 40, 24] in w_layout 'enk' must have a [5, ")):
        run(floats | {"low_rank": jgg.LowRank(term.b, term.a)}, dy, order, Case("uneven"))
    with pytest.raises(TypeError, match=re.escape("low_rank must be a LowRank, got tuple")):
        run(floats | {"low_rank": (term.a, term.b)}, dy, order, Case("uneven"))
