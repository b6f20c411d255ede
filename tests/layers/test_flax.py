"""The Flax layers: against NumPy, against each other, and under what Flax does with layers."""

import dataclasses
import functools
import inspect
import pydoc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgg
import jgg.linen
import jgg.nnx
import jgg.sharding
from jgg.layers import MoELayer
from tests.support.marks import thorough_but
from tests.support.moe_oracle import FUNCTIONS, expected, sigmoid

pytestmark = pytest.mark.xdist_group("flax")  # one worker compiles what they share
SIZES = {"hidden_features": 20, "num_experts": 8, "topk": 2}
OPTIONS = {
    "defaults": {},
    "OLMoE": {"normalize": False},
    "gpt-oss": {
        "score": "topk_softmax",
        "activation": "clamped_swiglu",
        "interleaved": True,
        "use_bias": True,
        "use_router_bias": True,
    },
    "DeepSeek-V3": {
        "score": "sigmoid",
        "scale": 2.5,
        "num_groups": 4,
        "topk_groups": 2,
        "use_selection_bias": True,
        "shared_features": 12,
    },
    "Megatron": {"score": "sigmoid", "num_groups": 2, "topk_groups": 1, "scores_per_group": 3},
    "Qwen2-MoE": {"shared_features": 24, "use_shared_gate": True},
    "Switch Transformer": {"topk": 1},
    "Llama-4": {"topk": 1, "score": "sigmoid", "normalize": False, "scale_input": True, "shared_features": 20},
    "not gated": {"activation": "ungated_relu_squared", "shared_features": 12},
    "Gemma 4": {"use_router_scale": True, "normalize": True},
}
QUICK = ("DeepSeek-V3",)  # which has most of them
X = np.random.default_rng(0).normal(size=(3, 5, 24)).astype(np.float32)


def nnx_layer(seed=0, **options):
    layer = jgg.nnx.MoE(24, rngs=nnx.Rngs(seed), precision="highest", **(SIZES | options))
    for name, shape in layer.layer.shapes.items():
        if name.startswith(("b_", "scale_")):  # zeros and ones would hide what becomes of them
            getattr(layer, name)[...] = jax.random.normal(jax.random.key(len(name)), shape)
    if layer.layer.use_selection_bias:
        layer.selection_bias[...] = jnp.linspace(-0.3, 0.3, 8)
    return layer


def linen_layer(layer, **options):
    """The Linen layer with the parameters of an NNX layer."""
    module = jgg.linen.MoE(precision="highest", **(SIZES | options))
    variables = {"params": {name: getattr(layer, name)[...] for name in layer.layer.shapes}}
    if layer.layer.use_selection_bias:
        variables["router"] = {"selection_bias": layer.selection_bias[...]}
    return module, variables


def oracle(layer, x, router_x=None):
    """y by NumPy; which experts a token goes to, and with what weights, is jgg.route's."""
    p = {name: np.asarray(getattr(layer, name)[...], np.float64) for name in layer.layer.shapes}
    options = layer.layer
    tokens = x.reshape(-1, x.shape[-1]).astype(np.float64)
    logits = (tokens if router_x is None else router_x.reshape(tokens.shape)) @ p["w_router"] + p.get("b_router", 0)
    names = ("score", "normalize", "scale", "num_groups", "topk_groups", "scores_per_group")
    routing = jgg.route(
        jnp.asarray(logits, jnp.float32),
        options.topk,
        selection_bias=layer.selection_bias[...] if options.use_selection_bias else None,
        **{name: getattr(options, name) for name in names},
    )
    weights = np.asarray(routing.topk_weights, np.float64)
    if options.use_router_scale:
        weights = weights * p["scale_router"][np.asarray(routing.topk_indices)]
    floats = {"x": tokens, "topk_weights": weights, "b_gate_up": None, "b_down": None} | {
        name: p[name] for name in ("w_gate_up", "w_down", "b_gate_up", "b_down") if name in p
    }
    if options.scale_input:
        floats |= {"x": tokens * weights, "topk_weights": np.ones_like(weights)}
    chosen = np.asarray(routing.topk_indices)
    y, _ = expected(floats, chosen, np.zeros_like(tokens), options.activation, options.interleaved, "ekn")
    if options.shared_features:
        halves = np.split(
            tokens @ p["w_shared_gate_up"], 2 if options.activation != "ungated_relu_squared" else 1, axis=1
        )
        shared = FUNCTIONS[options.activation](*halves) @ p["w_shared_down"]
        y += shared * (sigmoid(tokens @ p["w_shared_gate"]) if options.use_shared_gate else 1)
    return y.reshape(x.shape)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.max(np.abs(want)))


@pytest.mark.parametrize("options", thorough_but(QUICK, OPTIONS, pytest.mark.sweep))
def test_values_are_those_of_numpy_and_gradients_the_same(options):
    layer = nnx_layer(**options)
    module, variables = linen_layer(layer, **options)

    def loss(y):
        return jnp.sum(jnp.square(y)), y

    (_, y), own = nnx.jit(nnx.value_and_grad(lambda layer: loss(layer(X)), has_aux=True))(layer)
    of_params = jax.value_and_grad(lambda params: loss(module.apply(variables | {"params": params}, X)), has_aux=True)
    (_, linens), gradients = jax.jit(of_params)(variables["params"])
    want = oracle(layer, X)
    close(y, want)
    close(linens, want)
    assert set(own) == set(gradients) == set(layer.layer.shapes)  # the selection bias gets none
    for name, gradient in gradients.items():
        close(own[name][...], gradient)
        assert np.any(np.asarray(gradient)), name


def test_the_router_may_take_another_x():
    options = OPTIONS["Gemma 4"]
    layer, router_x = nnx_layer(**options), np.roll(X, 1, axis=1)
    module, variables = linen_layer(layer, **options)
    want = oracle(layer, X, router_x)
    assert np.abs(want - oracle(layer, X)).max() > 0.1 * np.abs(want).max()
    close(nnx.jit(lambda layer: layer(X, router_x=router_x))(layer), want)
    close(jax.jit(lambda variables: module.apply(variables, X, router_x=router_x))(variables), want)
    named = {name: getattr(layer, name)[...] for name in layer.layer.shapes}
    given = np.array([[[0, 0], [3, -1], [-1, -1], [8, 1], [5, 2]]] * 3)  # twice, left to the router, no expert
    apply = jax.jit(functools.partial(layer.layer.apply, precision="highest"))
    y, metrics = apply(named, X, router_x=router_x, topk_indices=given)
    indices = np.asarray(metrics.topk_indices)
    np.testing.assert_array_equal(indices[:, 4], given[:, 4])
    np.testing.assert_array_equal(
        indices[:, 2],
        np.asarray(jgg.route(jnp.asarray(router_x[:, 2] @ np.asarray(layer.w_router[...])), 2).topk_indices),
    )
    assert np.isfinite(np.asarray(y)).all()
    with pytest.raises(ValueError, match=r"router_x must have the shape of x, \[3, 5, 24\], got \[5, 24\]\."):
        layer(X, router_x=X[0])


def test_linen_is_tabulated():
    table = jgg.linen.MoE(**SIZES).tabulate(jax.random.key(0), X, console_kwargs={"width": 200})
    assert all(name in table for name in MoELayer(24, **SIZES).shapes)
    assert "_layer" not in table


def test_linen_makes_the_same_parameters():
    for options in OPTIONS.values():
        layer = MoELayer(24, **(SIZES | options))
        variables = jax.eval_shape(jgg.linen.MoE(**(SIZES | options)).init, jax.random.key(0), X)
        assert jax.tree.map(jnp.shape, variables["params"]) == layer.shapes
        assert ("router" in variables) == layer.use_selection_bias


def test_initial_experts_have_the_scale_of_their_own_inputs():
    layer = jgg.nnx.MoE(256, 64, num_experts=16, topk=1, rngs=nnx.Rngs(0))
    for w, features in ((layer.w_gate_up, 256), (layer.w_down, 64)):
        np.testing.assert_allclose(np.std(w[...]), features**-0.5, rtol=0.05)


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.sweep), jnp.bfloat16])
def test_dtypes(dtype):
    layer = nnx_layer(dtype=dtype, **OPTIONS["DeepSeek-V3"])
    module, variables = linen_layer(layer, dtype=dtype, **OPTIONS["DeepSeek-V3"])
    x = jnp.asarray(X)
    gradients = nnx.eval_shape(nnx.grad(lambda layer: jnp.sum(layer(x).astype(jnp.float32))), layer)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    results = nnx.jit(lambda layer, x: layer(x))(layer, x), jax.jit(module.apply)(variables, x)
    assert {y.dtype for y in results} == {jnp.dtype(dtype or "float32")}
    own, linens = (y.astype(jnp.float32) for y in results)
    close(own, oracle(layer, X), 1e-5 if dtype is None else 3e-2)
    close(linens, own, 1e-6)


def test_metrics_are_intermediates():
    layer = nnx_layer()
    module, variables = linen_layer(layer)
    _, sown = nnx.capture(layer, nnx.Intermediate)(X)
    _, linens = module.apply(variables, X, mutable="intermediates")
    logits = jnp.asarray(X).reshape(15, 24) @ layer.w_router[...]
    indices = np.argsort(-np.asarray(logits), axis=1)[:, :2]
    for got in (sown, linens["intermediates"]):
        np.testing.assert_array_equal(got["group_sizes"][0], np.bincount(indices.ravel(), minlength=8))
        close(got["load_balancing_loss"][0], jgg.load_balancing_loss(logits, jnp.asarray(indices)))
        close(got["router_z_loss"][0], jgg.router_z_loss(logits))
        np.testing.assert_array_equal(got["topk_indices"][0], indices.reshape(3, 5, 2))
    module.apply(variables, X)  # nobody asks for them


def params_of(layer):
    """The parameters of a layer by name, as docs/integrations.md takes them."""
    return nnx.to_pure_dict(nnx.state(layer, (nnx.Param, jgg.nnx.SelectionBias)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_params_are_loaded_into_the_dtype_that_they_have(dtype):
    """There and back, without JAX's warning of values that it does not cast safely."""
    file = {name: np.asarray(array) for name, array in params_of(nnx_layer(**OPTIONS["DeepSeek-V3"])).items()}
    layer = nnx_layer(seed=1, param_dtype=dtype, **OPTIONS["DeepSeek-V3"])
    jgg.nnx.load_params(layer, file)
    loaded = params_of(layer)
    assert loaded.keys() == file.keys()
    for name, array in file.items():
        kept = "float32" if name == "selection_bias" else dtype
        assert loaded[name].dtype == kept
        np.testing.assert_array_equal(loaded[name], array.astype(kept))
    jgg.nnx.load_params(layer, params_of(nnx_layer(**OPTIONS["DeepSeek-V3"])))  # from a layer's arrays too
    for name, array in loaded.items():
        np.testing.assert_array_equal(params_of(layer)[name], array)
    assert not layer.w_down[...].committed  # so that it can be used together with arrays on several devices


def test_params_are_loaded_into_a_stack_of_layers():
    make = nnx.vmap(lambda key: jgg.nnx.MoE(24, rngs=nnx.Rngs(key), **SIZES), in_axes=0, out_axes=0)
    layers = make(jax.random.split(jax.random.key(0), 3))
    params = {name: np.ones((3, *shape)) for name, shape in layers.layer.shapes.items()}
    jgg.nnx.load_params(layers, params)
    assert all(np.all(np.asarray(array) == 1) for array in params_of(layers).values())


PARAMS = {name: np.ones(shape) for name, shape in MoELayer(24, **SIZES).shapes.items()}
WRONG_PARAMS = {
    "missing": (
        ValueError,
        {name: array for name, array in PARAMS.items() if name != "w_down"},
        "params must have w_router, w_gate_up, w_down, got none of the name 'w_down'.",
    ),
    "surplus": (
        ValueError,
        PARAMS | {"selection_bias": np.ones(8)},
        "params must have w_router, w_gate_up, w_down and nothing else, got 'selection_bias' too.",
    ),
    "misshapen": (
        ValueError,
        PARAMS | {"w_down": PARAMS["w_down"].swapaxes(1, 2)},
        "w_down must have the layer's shape [8, 20, 24], got [8, 24, 20].",
    ),
    "integers": (
        TypeError,
        PARAMS | {"w_down": PARAMS["w_down"].astype(np.int8)},
        "the dtype of w_down must be a float dtype, got int8.",
    ),
    "no dict": (TypeError, list(PARAMS.values()), "params must be a dict of arrays by name, got list."),
}


@pytest.mark.parametrize(("error", "params", "message"), WRONG_PARAMS.values(), ids=WRONG_PARAMS)
def test_wrong_params_are_named_and_none_is_loaded(error, params, message):
    layer = nnx_layer()
    before = params_of(layer)
    with pytest.raises(error) as raised:
        jgg.nnx.load_params(layer, params)
    assert str(raised.value) == message
    for name, array in params_of(layer).items():
        np.testing.assert_array_equal(array, before[name])


def test_params_are_loaded_into_a_layer_of_jgg_only():
    with pytest.raises(TypeError, match=r"layer must be a jgg\.nnx\.MoE, got Linear\."):
        jgg.nnx.load_params(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), PARAMS)


@pytest.mark.sweep
def test_scan_and_remat_over_layers():
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(key):
        return jgg.nnx.MoE(24, rngs=nnx.Rngs(key), precision="highest", **SIZES)

    layers = make(jax.random.split(jax.random.key(0), 3))

    @nnx.jit
    @nnx.value_and_grad
    def loss(layers, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def forward(x, layer):
            return x + layer(x)

        return jnp.sum(jnp.square(forward(x, layers)))

    value, gradients = loss(layers, jnp.asarray(X))
    graphdef, state = nnx.split(layers)

    @jax.jit
    @jax.value_and_grad
    def unrolled(state):
        x = jnp.asarray(X)
        for index in range(3):
            x = x + nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], state))(x)  # noqa: B023
        return jnp.sum(jnp.square(x))

    want, want_gradients = unrolled(state)
    close(value, want)
    jax.tree.map(close, nnx.to_pure_dict(gradients), nnx.to_pure_dict(want_gradients))


@pytest.mark.sweep
def test_training_with_optax_leaves_the_selection_bias_to_its_own_rule(optax_promotion):
    layer = nnx_layer(**OPTIONS["DeepSeek-V3"])
    before = np.asarray(layer.selection_bias[...])
    optimizer = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    target = jnp.roll(jnp.asarray(X), 1, axis=-1)

    @nnx.jit
    def step(layer, optimizer):
        loss, gradients = nnx.value_and_grad(lambda layer: jnp.mean(jnp.square(layer(X) - target)))(layer)
        optimizer.update(layer, gradients)
        return loss

    losses = [float(step(layer, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_array_equal(layer.selection_bias[...], before)

    _, sown = nnx.jit(lambda layer: nnx.capture(layer, nnx.Intermediate)(X))(layer)
    sizes = sown["group_sizes"][0]
    layer.selection_bias[...] = jgg.update_selection_bias(layer.selection_bias[...], sizes, 0.01)
    np.testing.assert_allclose(layer.selection_bias[...] - before, 0.01 * np.sign(15 * 2 / 8 - sizes), atol=1e-6)


def test_sharding_metadata():
    names = (None, "model", None)
    layer = nnx_layer(kernel_metadata={"out_sharding": names, "eager_sharding": False})
    assert layer.w_gate_up.get_metadata("out_sharding") == names == layer.w_down.get_metadata("out_sharding")
    assert layer.w_router.get_metadata("out_sharding", None) is None
    module = jgg.linen.MoE(kernel_init=nn.with_partitioning(nn.initializers.ones, names), **SIZES)
    params = module.init(jax.random.key(0), X)["params"]
    assert params["w_gate_up"].names == names
    assert np.isfinite(module.apply({"params": params}, X)).all()


ERRORS = {
    "topk": ({"topk": 9}, "topk must be between 1 and num_experts, 8, got 9"),
    "score": ({"score": "relu"}, "score must be one of .*got 'relu'"),
    "activation": ({"activation": "swish"}, "activation must be an Activation or one of"),
    "scale_input": ({"scale_input": True}, "scale_input needs topk to be 1, got 2"),
    "topk_groups": ({"num_groups": 2, "topk_groups": 3}, "topk_groups must be between 1 and num_groups, 2, got 3"),
    "num_groups": ({"num_groups": 3}, "num_groups must divide the number of experts, 8, got 3"),
    "scores_per_group": (
        {"num_groups": 4, "scores_per_group": 3},
        "scores_per_group must be None or between 1 and the experts of a group, 2, got 3",
    ),
    "scale": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
    "hidden features": ({"hidden_features": 0}, "hidden_features must be a positive int, got 0"),
    "implementation": ({"implementation": "x"}, "implementation must be one of .* got 'x'"),
    "precision": ({"precision": "exact"}, "precision must be None, .* got 'exact'"),
    "gates and ups apart": (
        {"sharding": jgg.sharding.MoESharding(jax.sharding.AbstractMesh((2,), ("a",)), tensor="a")},
        "interleaved must be True with a tensor axis",
    ),
    "shared gate": ({"use_shared_gate": True}, "use_shared_gate needs shared_features to be 1 or more, got 0"),
}


@pytest.mark.parametrize(("options", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        jgg.nnx.MoE(24, rngs=nnx.Rngs(0), **(SIZES | options))
    with pytest.raises(ValueError, match=message):
        jgg.linen.MoE(**(SIZES | options))


@pytest.mark.parametrize("layer", [jgg.nnx.MoE, jgg.linen.MoE])
def test_every_option_of_a_layer_shows(layer):
    shown = inspect.signature(layer).parameters
    for field in dataclasses.fields(MoELayer):
        if field.name != "in_features" or layer is jgg.nnx.MoE:
            assert (shown[field.name].annotation, shown[field.name].default) == (
                field.type,
                inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            )
    assert "use_shared_gate: bool = False" in pydoc.plain(pydoc.render_doc(layer))


def test_a_layer_has_plain_options_that_do_not_change():
    layer = jgg.nnx.MoE(24, rngs=nnx.Rngs(0), **(SIZES | {"topk": jnp.array(2), "normalize": np.bool_(True)}))
    assert (type(layer.topk), type(layer.normalize)) == (int, bool)
    plain = MoELayer(24, normalize=True, **SIZES)
    assert layer.layer == plain and hash(layer.layer) == hash(plain)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'topk'"):
        layer.layer.topk = 3
    assert dataclasses.replace(layer.layer, topk=3).topk == 3


def test_weights_that_the_devices_do_not_divide():
    sharding = jgg.sharding.MoESharding(jax.sharding.AbstractMesh((3,), ("a",)), expert="a")
    init = sharding.split_init(nn.initializers.ones, "w_gate_up")
    with pytest.raises(ValueError, match=r"w_gate_up must have a multiple of 3 along axis 0, .* got \[8, 24, 40\]"):
        init(jax.random.key(0), (8, 24, 40), jnp.float32)


def test_errors_of_apply():
    params = {name: jnp.ones(shape) for name, shape in MoELayer(24, **SIZES).shapes.items()}
    with pytest.raises(ValueError, match=r"selection_bias must be \[E\] with use_selection_bias=True, got None"):
        MoELayer(24, **SIZES, use_selection_bias=True).apply(params, X)
    with pytest.raises(ValueError, match="selection_bias must be None with use_selection_bias=False, got an array"):
        MoELayer(24, **SIZES).apply(params, X, jnp.zeros(8))
    with pytest.raises(TypeError, match=r"sharding must be a jgg\.sharding\.MoESharding or None, got str"):
        MoELayer(24, **SIZES).apply(params, X, sharding="experts")


def test_x_of_other_features():
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., H\] with H equal to in_features, 24, got \[2, 25\]"):
        nnx_layer()(jnp.ones((2, 25)))
    with pytest.raises(TypeError, match="scor"):
        jgg.nnx.MoE(24, rngs=nnx.Rngs(0), scor="softmax", **SIZES)
    assert MoELayer(24, **SIZES) == MoELayer(24, **SIZES)
