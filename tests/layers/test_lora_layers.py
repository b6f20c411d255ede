"""Layers with LoRA adapters: as without them, as with merged weights, and what is trained."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg
import jgg.linen
import jgg.nnx
from jgg.layers import MoELayer
from tests.support.closeness import assert_close, distance

pytestmark = pytest.mark.xdist_group("flax")
SIZES = {"hidden_features": 136, "num_experts": 4, "topk": 2}
LORA = {"lora_rank": 5, "lora_alpha": 8}
ADAPTERS = ["w_down_lora_a", "w_down_lora_b", "w_gate_up_lora_a", "w_gate_up_lora_b"]
BASE = ["w_down", "w_gate_up", "w_router"]
X = np.random.default_rng(0).normal(size=(3, 5, 144)).astype(np.float32)


def make(**options):
    return jgg.nnx.MoE(144, rngs=nnx.Rngs(0), precision="highest", **(SIZES | options))


def make_trained(**options):
    """A layer whose b is not zero."""
    layer = make(**(LORA | options))
    for name in layer.layer.adapter_shapes:
        if name.endswith("_b"):
            b = getattr(layer, name)
            b[...] = 0.1 * jax.random.normal(jax.random.key(len(name)), b.shape, b.dtype)
    return layer


def params_of(layer):
    return {name: getattr(layer, name).get_value() for name in layer.layer.shapes | layer.layer.adapter_shapes}


def loss(layer, x):
    return jnp.sum(jnp.square(layer(x).astype(jnp.float32)))


gradients_of_adapters = nnx.jit(nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam)))


def quantize(layer):
    for name in ("w_down", "w_gate_up"):
        setattr(layer, name, jgg.nnx.Frozen(jgg.quantize_weights(getattr(layer, name)[...])))
    return layer


BFLOAT16 = {"param_dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    ("options", "prepare"),
    [
        ({}, lambda layer: layer),
        pytest.param(BFLOAT16, lambda layer: layer, marks=pytest.mark.sweep),
        pytest.param(BFLOAT16 | {"lora_param_dtype": jnp.bfloat16}, lambda layer: layer, marks=pytest.mark.sweep),
        pytest.param({"quantization": jgg.Fp8()}, quantize, marks=pytest.mark.sweep),
    ],
    ids=["float32", "beside bfloat16", "bfloat16", "fp8"],
)
def test_new_adapters_change_nothing(options, prepare):
    """Bit for bit; and the adapters are drawn after the other parameters."""
    base, layer = prepare(make(**options)), prepare(make(**LORA, **options))
    x = jnp.asarray(X, options.get("param_dtype"))
    forward = nnx.jit(lambda layer, x: layer(x))
    np.testing.assert_array_equal(*(forward(each, x).astype(jnp.float32) for each in (base, layer)))
    for name, features in (("w_gate_up_lora_a", 144), ("w_down_lora_a", 136)):
        a = np.asarray(getattr(layer, name)[...], np.float32)
        bound = (6 / features) ** 0.5
        assert 0.9 * bound < np.max(np.abs(a)) <= 1.01 * bound
        assert not np.any(getattr(layer, name.replace("_a", "_b"))[...])
    gradients = nnx.to_pure_dict(gradients_of_adapters(layer, x))
    assert sorted(gradients) == ADAPTERS
    for name, gradient in gradients.items():
        assert gradient.dtype == params_of(layer)[name].dtype == options.get("lora_param_dtype", jnp.float32)
        assert np.any(np.asarray(gradient)) == name.endswith("_b"), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {
                "lora_targets": ("w_shared_gate_up", "w_router", "w_down"),
                "lora_rank": (2, 3, 5),
                "use_bias": True,
                "shared_features": 12,
            },
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["both", "down and shared"],
)
def test_as_with_merged_weights(options):
    """In every framework: y, and all gradients, those of a and b by differentiating the merged weights."""
    layer = make_trained(**options)
    function, params = layer.layer, params_of(layer)
    targets = layer.lora_targets
    base = MoELayer(144, **(SIZES | options | {"lora_rank": None}))
    scales = {name: 8 / params[f"{name}_lora_a"].shape[-1] for name in targets}

    @jax.jit
    @jax.value_and_grad
    def want(params):
        weights = dict(params)
        for name in targets:
            a, b = weights.pop(f"{name}_lora_a"), weights.pop(f"{name}_lora_b")
            weights[name] += scales[name] * jnp.matmul(a, b, precision="highest")
        return jnp.sum(jnp.square(base.apply(weights, X, precision="highest")[0]))

    want_loss, want_gradients = want(params)
    got_loss, got = nnx.jit(nnx.value_and_grad(loss))(layer, X)
    gradients = {name: got[name][...] for name in params}
    module = jgg.linen.MoE(precision="highest", **(SIZES | LORA | options))
    linens = jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.square(module.apply({"params": params}, X)))))
    assert_close((got_loss, linens(params)[0]), (want_loss, want_loss), 5e-5)
    assert_close(linens(params)[1], gradients)
    for name, gradient in gradients.items():
        if name in targets:
            assert not np.any(gradient)
        else:
            assert_close(gradient, want_gradients[name], 5e-5, name=name)

    assert layer.adapters().keys() == set(targets) - {"w_shared_gate_up", "w_router"}
    for name, term in layer.adapters().items():
        want_weights = params[name] + 8 / 5 * jnp.matmul(term.a, term.b, precision="highest")
        assert_close(term.merge(params[name], "ekn"), want_weights, 1e-6)
    layer.merge_adapters()
    for name in targets:
        assert np.any(layer._value(name) != params[name]) and not np.any(getattr(layer, f"{name}_lora_b")[...])
        np.testing.assert_array_equal(layer._value(f"{name}_lora_a"), params[f"{name}_lora_a"])
    assert_close(loss(layer, X), want_loss, 5e-5)
    jax.tree.map(np.testing.assert_array_equal, params_of(layer), function.merge_adapters(params))


@pytest.mark.parametrize("quantization", [None, pytest.param(jgg.Fp8(), marks=pytest.mark.sweep)])
def test_adapters_beside_experts_in_fp8(quantization):
    layer, dense = (make_trained(quantization=each) for each in (quantization, None))
    quantize(layer)
    for name in ("w_down", "w_gate_up"):
        getattr(dense, name)[...] = layer._value(name).dequantize(jnp.float32)
    got, want = (nnx.to_pure_dict(gradients_of_adapters(each, X)) for each in (layer, dense))
    tolerance = 1e-5 if quantization is None else 0.15
    assert distance(layer(X), dense(X)) < tolerance
    for name in ADAPTERS:
        assert distance(got[name], want[name]) < tolerance, name
    with pytest.raises(TypeError, match=r"w_gate_up must be a float array, to be merged into, got QuantizedArray\."):
        layer.merge_adapters()
    assert np.any(layer.w_down_lora_b[...])


@pytest.mark.sweep
def test_gradients_in_float32_beside_bfloat16():
    """Of adapters: from the float32 sums, in NNX and Linen."""
    layer, exact = make_trained(**BFLOAT16), make_trained()
    params = params_of(layer)
    jgg.nnx.load_params(exact, {name: array.astype(jnp.float32) for name, array in params.items()})
    x = jnp.asarray(X, jnp.bfloat16)
    got = nnx.to_pure_dict(gradients_of_adapters(layer, x))
    want = nnx.to_pure_dict(gradients_of_adapters(exact, x.astype(jnp.float32)))
    module = jgg.linen.MoE(precision="highest", **SIZES, **LORA, **BFLOAT16)
    assert {name: array.dtype for name, array in params.items()} == {
        name: array.dtype for name, array in module.init(jax.random.key(0), x)["params"].items()
    }
    linens = jax.grad(lambda params: jnp.sum(jnp.square(module.apply({"params": params}, x).astype(jnp.float32))))
    for name in ADAPTERS:
        assert distance(got[name], want[name]) < 0.02, name
        assert np.any(got[name] != got[name].astype(jnp.bfloat16).astype(jnp.float32)), name
    assert_close({name: linens(params)[name] for name in ADAPTERS}, got)


@pytest.mark.sweep
def test_a_step_of_an_optimizer_changes_adapters_alone(optax_promotion):
    layer = make_trained()
    before = params_of(layer)
    optimizer = nnx.Optimizer(layer, optax.adamw(1e-2), wrt=nnx.LoRAParam)
    nnx.jit(lambda optimizer, layer: optimizer.update(layer, gradients_of_adapters(layer, X)))(optimizer, layer)
    changed = {name for name, value in params_of(layer).items() if np.any(value != before[name])}
    assert changed == set(ADAPTERS)

    module = jgg.linen.MoE(precision="highest", **SIZES, **LORA)
    params = jax.jit(module.init)(jax.random.key(0), X)["params"]
    assert sorted(params) == sorted(BASE + ADAPTERS) and not np.any(params["w_down_lora_b"])
    labels = {name: "trained" if "_lora_" in name else "frozen" for name in before}
    masked = optax.partition({"trained": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, labels)

    @jax.jit
    def updates_of(params):
        gradients = jax.grad(lambda params: jnp.sum(jnp.square(module.apply({"params": params}, X))))(params)
        return masked.update(gradients, masked.init(params), params)[0]

    updates = updates_of(before)
    assert {name for name, update in updates.items() if np.any(update)} == set(ADAPTERS)


def test_load_params_keeps_adapters_or_loads_them():
    trained = make_trained()
    params = params_of(trained)
    layer = make_trained(**BFLOAT16)
    layer.w_down_lora_b[...] += 1
    before = params_of(layer)
    jgg.nnx.load_params(layer, {name: params[name] for name in BASE})
    for name in ADAPTERS:
        np.testing.assert_array_equal(params_of(layer)[name], before[name])
    jgg.nnx.load_params(layer, params)
    for name, value in params_of(layer).items():
        dtype = jnp.float32 if name in ADAPTERS else jnp.bfloat16
        np.testing.assert_array_equal(value, params[name].astype(dtype))
    jgg.nnx.load_params(layer, {name: array.astype(jnp.bfloat16) for name, array in params.items()})
    assert {params_of(layer)[name].dtype for name in ADAPTERS} == {np.dtype("float32")}
    abstract = nnx.eval_shape(lambda: make(**LORA))
    with pytest.raises(ValueError, match="got none of the name 'w_gate_up_lora_a'"):
        jgg.nnx.load_params(abstract, {name: params[name] for name in BASE})
    jgg.nnx.load_params(abstract, params)
    jax.tree.map(np.testing.assert_array_equal, params_of(abstract), params)


KNOWN = "w_gate_up", "w_down", "w_shared_gate_up", "w_shared_down", "w_router"
TARGETS = f"lora_targets must be a tuple of some of {KNOWN}, got "
ERRORS = {
    "rank": (ValueError, {"lora_rank": 0}, "lora_rank must be None or a positive int, got 0."),
    "rank's type": (TypeError, {"lora_rank": 4.0}, "lora_rank must be None or a positive int, got 4.0."),
    "alpha": (ValueError, LORA | {"lora_alpha": np.inf}, "lora_alpha must be a finite number, got inf."),
    "alpha alone": (ValueError, {"lora_alpha": 8}, "lora_alpha must be None without a lora_rank, got 8."),
    "targets": (ValueError, LORA | {"lora_targets": ("w_up",)}, TARGETS + "('w_up',)."),
    "shared": (
        ValueError,
        LORA | {"lora_targets": ("w_shared_down",)},
        "shared_features must be 1 or more for lora_targets ('w_shared_down',), got 0.",
    ),
    "ranks": (
        ValueError,
        {"lora_rank": (2, 3, 4)},
        "lora_rank must be a number or one for each of lora_targets, ('w_gate_up', 'w_down'), got (2, 3, 4).",
    ),
    "no targets": (ValueError, LORA | {"lora_targets": ()}, TARGETS + "()."),
    "a name": (ValueError, LORA | {"lora_targets": "w_down"}, TARGETS + "'w_down'."),
    "no tuple": (TypeError, LORA | {"lora_targets": 3}, TARGETS + "int."),
}


@pytest.mark.parametrize(("error", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(error, options, message):
    for wrong in (make, lambda **options: jgg.linen.MoE(**SIZES, **options)):
        with pytest.raises(error, match=re.escape(message)):
            wrong(**options)


def test_errors_of_apply():
    layer = MoELayer(144, **SIZES, **LORA)
    params = {name: jnp.ones(shape) for name, shape in (layer.shapes | layer.adapter_shapes).items()}
    b = "w_down_lora_b"
    for error, changes, message in (
        (ValueError, {b: jnp.ones((4, 6, 144))}, f"{b} must be among params, with the shape [4, 5, 144], got"),
        (TypeError, {b: jnp.ones((4, 5, 144), int)}, f"{b} must be a float array, got int32."),
    ):
        with pytest.raises(error, match=re.escape(message)):
            layer.apply(params | changes, X)
    del params[b]
    with pytest.raises(ValueError, match=re.escape(f"{b} must be among params, with the shape [4, 5, 144], got none")):
        layer.apply(params, X)


def test_options_are_plain():
    layer = make(lora_rank=np.int64(4), lora_targets=["w_down"])
    assert (layer.lora_rank, layer.lora_alpha, layer.lora_targets) == (4, 4.0, ("w_down",))
    assert layer.layer == MoELayer(144, **SIZES, lora_rank=4, lora_alpha=4, lora_targets=("w_down",))
    assert list(layer.layer.adapter_shapes) == ADAPTERS[:2]
