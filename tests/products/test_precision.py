"""Everything that `jax.lax.dot` takes as a precision is taken, and computed at least as precisely."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.arguments import as_precision
from jgg.layers import MoELayer

DEFAULT, HIGH, HIGHEST = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST
NAMES = {
    **dict.fromkeys(("default", "fastest", "bfloat16", "tensorfloat32"), DEFAULT),
    **dict.fromkeys(("high", "bfloat16_3x"), HIGH),
    **dict.fromkeys(("highest", "float32"), HIGHEST),
}
PRESETS = {
    **dict.fromkeys(("DEFAULT", "F16_F16_F16", "F16_F16_F32", "BF16_BF16_BF16", "BF16_BF16_F32"), DEFAULT),
    **dict.fromkeys(("TF32_TF32_F32",), DEFAULT),
    **dict.fromkeys(("TF32_TF32_F32_X3", "BF16_BF16_F32_X3"), HIGH),
    **dict.fromkeys(("BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F32_F32_F32", "F64_F64_F64"), HIGHEST),
}
F8 = {preset.name for preset in jax.lax.DotAlgorithmPreset if preset.name.startswith("ANY_F8")}
NO_DEFAULTS = {"DEFAULT", "fastest", "bfloat16_3x"}  # jax_default_matmul_precision takes the others
OTHERS = {
    "pair": (("default", "high"), HIGH),
    "list": (["fastest", "bfloat16"], DEFAULT),
    "pair of Precision": ((HIGHEST, DEFAULT), HIGHEST),
    "float16": (jax.lax.DotAlgorithm(np.float16, np.float16, np.float32), DEFAULT),
    "bfloat16 in three": (jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32, 1, 1, 3), HIGH),
    "bfloat16 in six": (jax.lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, np.float32, 1, 1, 6), HIGHEST),
    "float32": (jax.lax.DotAlgorithm(np.float32, np.float32, np.float32), HIGHEST),
}
WRONG = {
    "empty": (),
    "one": ("high",),
    "three": ("high",) * 3,
    "pair": ("high", None),
    "dict": {},
    "int": 1,
    "name": "x",
}


def matrices(dtype):
    return jnp.ones((6, 4), dtype), jnp.ones((2, 5, 4), dtype), jnp.array([2, 4])


@pytest.mark.parametrize("name", NAMES | PRESETS)
def test_names(name):
    expected = (NAMES | PRESETS)[name]
    assert as_precision(name) is expected
    if name in PRESETS:
        assert as_precision(jax.lax.DotAlgorithmPreset[name]) is expected
    for dtype in ("float16", "bfloat16"):  # though the preset may be of another
        x, w, sizes = matrices(dtype)
        assert jax.eval_shape(lambda *arrays: jgg.grouped_gemm(*arrays, precision=name), x, w, sizes).dtype == dtype


@pytest.mark.parametrize("name", [name for name in NAMES | PRESETS if name not in NO_DEFAULTS])
def test_names_as_jax_default(name):
    with jax.default_matmul_precision(name):
        assert as_precision(None) is (NAMES | PRESETS)[name]
        assert jgg.grouped_gemm(*matrices("float32")).tolist() == [[4] * 5] * 6


@pytest.mark.parametrize(("precision", "expected"), OTHERS.values(), ids=OTHERS)
def test_others(precision, expected):
    assert as_precision(precision) is expected


@pytest.mark.parametrize("precision", WRONG.values(), ids=WRONG)
def test_wrong(precision):
    with pytest.raises(ValueError, match=r"precision must be None, a jax.lax.Precision, .* got"):
        jgg.grouped_gemm(*matrices("float32"), precision=precision)


def test_presets_are_all_there_are():
    assert PRESETS.keys() | F8 == {preset.name for preset in jax.lax.DotAlgorithmPreset}
    for name in F8:  # which lax.dot takes for float8 alone
        with (
            jax.default_matmul_precision(name),
            pytest.raises(ValueError, match=f"jax_default_matmul_precision must be .* got '{name}'"),
        ):
            jgg.grouped_gemm(*matrices("float32"))


def test_a_layer_is_as_precise_as_its_experts():
    """Its router and shared experts too: on a CPU JAX's own dot rounds to float16 by this preset."""
    layer = MoELayer(8, 16, 4, 2, shared_features=8)
    *keys, key = jax.random.split(jax.random.key(0), 1 + len(layer.shapes))
    params = {name: jax.random.normal(key, layer.shapes[name]) for key, name in zip(keys, layer.shapes, strict=True)}
    x = jax.random.normal(key, (32, 8))
    apply = jax.jit(layer.apply, static_argnames="precision")
    y, _ = apply(params, x, precision="F16_F16_F16")
    np.testing.assert_array_equal(y, apply(params, x, precision="default")[0])
