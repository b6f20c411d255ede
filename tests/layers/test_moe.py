"""The expert MLP against a NumPy float64 oracle: values and every gradient, and what it keeps for the backward pass."""

import collections
import copy
import functools
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals  # jax.ad_checkpoint only prints them
from jax.test_util import check_grads

import jgg
from jgg.activations import ACTIVATIONS, Activation, clamped_swiglu, find_activation
from tests.support import oracle
from tests.support.closeness import assert_close
from tests.support.moe_oracle import DATA, FUNCTIONS, clamped, expected, make
from tests.support.moe_runs import IMPLEMENTATIONS, run

LAYOUTS = pytest.mark.parametrize(
    ("biased", "w_layout"),
    [
        (False, "enk"),
        (True, "ekn"),
        pytest.param(False, "ekn", marks=pytest.mark.thorough),
        pytest.param(True, "enk", marks=pytest.mark.thorough),
    ],
)


def assert_right(implementation, activation="swiglu", interleaved=False, w_layout="enk", **options):
    floats, chosen, dy = make(activation, w_layout=w_layout, **options)
    y, grads = expected(floats, chosen, dy, activation, interleaved, w_layout)
    got_y, got_grads = run(floats, chosen, dy, implementation, activation, interleaved=interleaved, w_layout=w_layout)
    assert_close(got_y, y)
    assert_close(got_grads, grads, 2e-5)


def test_every_activation_has_an_oracle():
    assert FUNCTIONS.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize("implementation", [None, IMPLEMENTATIONS[3]])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_activation(activation, implementation):
    assert_right(implementation, activation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_gate_and_up_in_turns(activation, implementation):
    assert_right(implementation, activation, interleaved=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@LAYOUTS
def test_layout_and_bias(biased, w_layout, implementation):
    assert_right(implementation, w_layout=w_layout, biased=biased)


CASES = {
    "one token": {"tokens": 1},
    "no token": {"tokens": 0},
    "one expert": {"experts": 1, "topk": 1},
    "every expert": {"experts": 4, "topk": 4},
    "an expert that nobody chose": {"tokens": 3, "chosen": [[0, 1], [1, 3], [3, 0]]},
    "all tokens on one expert": {"tokens": 4, "topk": 1, "chosen": [[2]] * 4},
    "features of no block": {"features": 17, "hidden": 33},
    "many": {"tokens": 70, "features": 32, "hidden": 48, "experts": 16, "topk": 4},
}


# what test_contract.py shows of the same kernels at every change
OF_EACH_PRODUCT = ("one expert", "every expert", "all tokens on one expert", "many")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:2] + IMPLEMENTATIONS[3:])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_case(case, implementation):
    assert_right(implementation, biased=True, **case)


@pytest.mark.interpret
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in OF_EACH_PRODUCT)) for name in CASES]
)
def test_case_interpreted(name):
    assert_right("interpret", biased=True, **CASES[name])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@LAYOUTS
def test_fewer_rows_than_choices(biased, w_layout, implementation):
    floats, chosen, dy = make(biased=biased, w_layout=w_layout)
    chosen[::3, 1] = chosen[4] = DATA["experts"]  # no such expert
    floats["topk_weights"][chosen == DATA["experts"]] = np.nan
    y, grads = expected(floats, chosen, dy, "swiglu", False, w_layout)
    num_rows = np.sum(chosen < DATA["experts"]) + 2  # two rows to spare, of choices without an expert
    got_y, got_grads = run(floats, chosen, dy, implementation, w_layout=w_layout, num_rows=num_rows)
    assert_close(got_y, y)
    assert_close(got_grads, grads, 2e-5)


def assert_right_in_bfloat16(implementation, num_rows=None, w_layout="enk", **sizes):
    floats, chosen, dy = make(w_layout=w_layout, **sizes)
    floats = {
        name: a if a is None else np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for name, a in floats.items()
    }
    dy = np.asarray(jnp.asarray(dy, jnp.bfloat16), np.float32)
    if num_rows is not None:
        rows = np.argsort(chosen.reshape(-1), kind="stable")
        chosen.reshape(-1)[rows[num_rows:]] = DATA["experts"]  # no such expert
    y, grads = expected(floats, chosen, dy, "swiglu", False, w_layout)
    got_y, got_grads = run(floats, chosen, dy, implementation, dtype=jnp.bfloat16, num_rows=num_rows, w_layout=w_layout)
    assert got_y.dtype == jnp.bfloat16
    assert_close(got_y, y, 1e-2)
    assert_close(got_grads, grads, 2e-2)


@pytest.mark.parametrize("implementation", [None, "xla", IMPLEMENTATIONS[3]])
def test_bfloat16_is_as_right_as_its_products(implementation):
    assert_right_in_bfloat16(implementation, tokens=64, features=64, hidden=48, biased=True)


@pytest.mark.gpu
@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_rows", [None, 350])
def test_sizes_of_the_warp_specialized_kernel(num_rows, biased, w_layout):
    """Large enough for it, and for it to gather x and dy as it loads them."""
    sizes = {"tokens": 200, "features": 1032, "hidden": 136, "biased": biased}
    assert_right_in_bfloat16("triton", num_rows, w_layout, **sizes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_experts(implementation):
    floats, chosen, dy = make(biased=True, experts=0, chosen=np.zeros((13, 2)))
    y, gradients = run(floats, chosen, dy, implementation)
    for array, like in ((y, floats["x"]), *((gradients[name], floats[name]) for name in floats)):
        np.testing.assert_array_equal(array, np.zeros_like(like))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_of_a_token_stays_there(implementation):
    floats, chosen, dy = make(biased=True)
    clean, _ = run(floats, chosen, dy, implementation)
    floats["x"][3] = np.nan
    got, grads = run(floats, chosen, dy, implementation)
    others = np.arange(len(dy)) != 3
    np.testing.assert_array_equal(got[others], clean[others])
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.asarray(grads["x"])[others]).all()
    untouched = [e for e in range(DATA["experts"]) if e not in chosen[3]]
    assert np.isfinite(np.asarray(grads["w_gate_up"])[untouched]).all()


def test_parameters_of_the_clamped_swiglu():
    floats, chosen, dy = make("clamped_swiglu")
    floats["w_gate_up"] *= 5
    got, _ = run(floats, chosen, dy, None, clamped_swiglu(limit=1.5, alpha=0.7))
    FUNCTIONS["own"], ACTIVATIONS["own"] = lambda gate, up: clamped(gate, up, 1.5, 0.7), clamped_swiglu(1.5, 0.7)
    try:
        want, _ = expected(floats, chosen, dy, "own", False, "enk")
    finally:
        del FUNCTIONS["own"], ACTIVATIONS["own"]
    assert_close(got, want)
    assert clamped_swiglu(1.5, 0.7) == clamped_swiglu(1.5, 0.7)  # so that a program compiled for one serves the other


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_vmap_with_shared_weights(implementation):
    batch = [make(seed=seed) for seed in range(3)]
    shared, _, _ = make(seed=9)
    ws = [jnp.asarray(shared[name]) for name in ("w_gate_up", "w_down")]

    def loss(ws, x, topk_weights, chosen, dy):
        routing = jgg.Routing(topk_weights, chosen, *jgg.sort_by_expert(chosen, DATA["experts"]))
        y = jgg.moe_mlp(x, *ws, routing, implementation=implementation, precision="highest")
        return jnp.sum(y * dy)

    arrays = [jnp.stack([jnp.asarray(f[name]) for f, _, _ in batch]) for name in ("x", "topk_weights")]
    arrays += [jnp.stack([jnp.asarray(part[index]) for part in batch]) for index in (1, 2)]
    gradient = jax.grad(loss, argnums=(0, 1))
    d_ws, d_x = jax.jit(jax.vmap(gradient, in_axes=(None, 0, 0, 0, 0)))(ws, *arrays)
    for index, (floats, chosen, dy) in enumerate(batch):
        floats = floats | {name: shared[name] for name in ("w_gate_up", "w_down")}
        _, want = expected(floats, chosen, dy, "swiglu", False, "enk")
        assert_close(d_x[index], want["x"], 2e-5, "x")
        for got, name in zip(d_ws, ("w_gate_up", "w_down"), strict=True):
            assert_close(got[index], want[name], 2e-5, name)


def loss_of(dtype=jnp.float32, policy=None, residual_names=None, **sizes):
    floats, chosen, _ = make(**sizes)
    experts = floats["w_gate_up"].shape[0]
    arrays = {name: jnp.asarray(a, dtype) for name, a in floats.items() if a is not None}
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), experts)

    def loss(arrays):
        routing = jgg.Routing(
            arrays["topk_weights"].astype(jnp.float32), jnp.asarray(chosen), group_sizes, gather_indices
        )
        y = jgg.moe_mlp(arrays["x"], arrays["w_gate_up"], arrays["w_down"], routing, residual_names=residual_names)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    return (loss if policy is None else jax.checkpoint(loss, policy=policy)), arrays


def residual_bytes(function, arrays):
    """Bytes kept for the backward pass, the weights and what is constant aside."""
    kept = [
        aval
        for aval, source in saved_residuals(function, arrays)
        if "w_gate_up" not in source and "w_down" not in source and "literal" not in source
    ]
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept), kept


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_kept_for_the_backward_pass(dtype):
    sizes = {"tokens": 256, "features": 64, "hidden": 48, "experts": 8, "topk": 4}
    function, arrays = loss_of(dtype, **sizes)
    total, kept = residual_bytes(function, arrays)
    rows, itemsize = 256 * 4, jnp.dtype(dtype).itemsize
    x, pre_activation, y = 256 * 64 * itemsize, rows * 2 * 48 * itemsize, 256 * 64 * 4
    assert total >= x + pre_activation  # else the measure misses what must be there
    assert total <= x + pre_activation + 32 * rows + y, kept  # y: of this test's own square


def test_policies_know_the_residuals_by_name():
    sizes = {"tokens": 64, "features": 32, "hidden": 16, "experts": 4, "topk": 2}
    plain, arrays = loss_of(**sizes)
    want = jax.grad(plain)(arrays)
    for names in ((), ("jgg_x",), ("jgg_pre_activation",), ("jgg_x", "jgg_pre_activation")):
        function, _ = loss_of(policy=jax.checkpoint_policies.save_only_these_names(*names), **sizes)
        shapes = [aval.shape for aval, source in saved_residuals(function, arrays) if "argument" not in source]
        assert ((128, 32) in shapes) == ("jgg_pre_activation" in names)
        assert_close(jax.grad(function)(arrays), want, name=str(names))


def test_residuals_under_names_of_ones_own():
    function, arrays = loss_of(tokens=64, features=32, hidden=16, experts=4, topk=2)
    own = functools.partial(loss_of, residual_names={"pre_activation": "mlp"}, tokens=64, features=32, hidden=16)
    want = jax.grad(function)(arrays)
    for name, is_kept in {"mlp": True, "jgg_pre_activation": False}.items():
        policy = jax.checkpoint_policies.save_only_these_names(name)
        checkpointed, _ = own(policy=policy, experts=4, topk=2)
        shapes = [aval.shape for aval, source in saved_residuals(checkpointed, arrays) if "argument" not in source]
        assert ((128, 32) in shapes) == is_kept
        jax.tree.map(np.testing.assert_array_equal, jax.grad(checkpointed)(arrays), want)


def traces(make_activation):
    """How often each of three calls traces the function that `make_activation` gives."""
    count = 0

    def curve(gate, up=1.0, power=2):
        nonlocal count
        count += 1
        return gate**power * up

    counts = []
    for _ in range(3):
        call(activation=make_activation(curve))
        counts.append(count)
    return np.diff([0, *counts]).tolist()


@pytest.mark.parametrize(
    "make",
    [
        lambda curve: curve,
        lambda curve: functools.partial(curve, power=3),
        lambda curve: Activation("own", functools.partial(curve, power=3)),
    ],
    ids=["function", "partial", "Activation"],
)
def test_an_equal_activation_is_traced_once(make):
    first, *others = traces(make)
    assert first > 0
    assert others == [0, 0]


def test_a_new_lambda_is_traced_in_each_call():
    assert min(traces(lambda curve: lambda gate: curve(gate))) > 0


@jax.jit
def jitted(gate):
    return jnp.sin(gate)


COPIED = ACTIVATIONS | {
    "parameters": clamped_swiglu(2.0),
    "gate": find_activation(jax.nn.elu),
    "partial": find_activation(functools.partial(jax.nn.leaky_relu, negative_slope=0.1)),
    "ungated": Activation("own", jnp.tanh, is_gated=False),
    "jitted": find_activation(jitted),
}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda whole: pickle.loads(pickle.dumps(whole))])
@pytest.mark.parametrize("name", COPIED)
def test_a_copy_is_equal_and_is_not_compiled_again(name, copied):
    activation = COPIED[name]
    function = jax.jit(lambda activation, pre: activation(pre), static_argnums=0)
    want, got = (function(one, jnp.ones((2, 6))) for one in (activation, copied(activation)))
    assert copied(activation) == activation and copied(activation).curve == activation.curve
    assert function._cache_size() == 1
    np.testing.assert_array_equal(got, want)


def test_a_function_without_a_name_to_import_is_copied_and_not_pickled():
    activation = find_activation(jax.jit(lambda gate: jnp.sin(gate)))
    assert copy.deepcopy(activation) == activation
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(activation)


def test_names_say_whether_there_is_a_gate():
    assert all(activation.is_gated != name.startswith("ungated_") for name, activation in ACTIVATIONS.items())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (jax.nn.silu, "swiglu"),
        (jax.nn.relu, "reglu"),
        (jax.nn.gelu, "geglu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=True), "geglu_tanh"),
        (functools.partial(jax.nn.gelu, approximate=False), "geglu"),
    ],
)
def test_functions_of_the_gate_that_kernels_know(function, name):
    """So that frameworks, which give functions, get the fused kernels."""
    assert find_activation(function).curve == ACTIVATIONS[name].curve is not None
    np.testing.assert_array_equal(call(activation=function), call(activation=name))


def test_functions_of_the_gate_that_kernels_do_not_know():
    assert find_activation(jnp.tanh).curve is None
    own = Activation("own", lambda gate, up: jnp.tanh(gate) * up)
    np.testing.assert_array_equal(call(activation=jnp.tanh), call(activation=own))


def test_the_last_product_spares_multiprocessors(launched):
    tokens, hidden, features, experts, topk = 2048, 512, 512, 16, 2
    shapes = ((tokens, hidden), (experts, 2 * features, hidden), (experts, hidden, features))
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    indices = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((experts,), (tokens * topk,))]

    def grids(**options):
        launched.clear()

        @jax.jit
        @jax.grad
        def gradient(arrays, indices):
            routing = jgg.Routing(jnp.ones((tokens, topk)), jnp.zeros((tokens, topk), jnp.int32), *indices)
            return jnp.sum(jgg.moe_mlp(*arrays, routing, implementation="triton", **options).astype(jnp.float32))

        with jgg.target(90, 132):
            gradient.trace(arrays, indices).lower(lowering_platforms=("cuda",))
        return [(name, launch.grid) for name, launch in launched]

    *all_others, (name, (clusters,)) = grids()
    assert name == "hopper_kernel"
    assert grids(spare_sms=24) == [*all_others, (name, (clusters - 12,))]


@pytest.mark.parametrize("quantization", [None, jgg.Fp8(), jgg.Fp8(keeps_weights=True)], ids=["", "fp8", "kept"])
@pytest.mark.parametrize("biased", [False, True])
def test_frozen_arrays_leave_no_product(biased, quantization, launched):
    """In no program of a GPU, nor of a CPU before XLA sees it, is a gradient that nobody asked for."""
    tokens, hidden, features, experts, topk = 64, 32, 48, 4, 2
    shapes = {
        "x": (tokens, hidden),
        "w_gate_up": (experts, 2 * features, hidden),
        "w_down": (experts, hidden, features),
    }
    if biased:
        shapes |= {"b_gate_up": (experts, 2 * features), "b_down": (experts, hidden)}
    arrays = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    indices = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((experts,), (tokens * topk,))]
    weights = jax.ShapeDtypeStruct((tokens, topk), "float32")

    def traced(trained):
        def loss(some, weights, others, indices):
            routing = jgg.Routing(weights, jnp.zeros((tokens, topk), jnp.int32), *indices)
            y = jgg.moe_mlp(routing=routing, quantization=quantization, **some, **others)
            return jnp.sum(y.astype(jnp.float32))

        some = {name: arrays[name] for name in trained}
        others = {name: array for name, array in arrays.items() if name not in trained}
        return jax.jit(jax.grad(loss, argnums=(0, 1))).trace(some, weights, others, indices)

    def kernels(trained):
        launched.clear()
        with jgg.target(89):
            traced(trained).lower(lowering_platforms=("cuda",))
        return collections.Counter(name for name, _ in launched)

    everything = kernels(("x", "w_gate_up", "w_down"))
    for trained in ((), ("x",), ("w_gate_up",), ("w_down",), ("x", "w_down"), ("x", "w_gate_up")):
        missing = everything - kernels(trained)
        assert missing["dw_kernel"] == sum(name not in trained for name in ("w_gate_up", "w_down")), trained
        of_dx = "dx_kernel" if quantization is None else "forward_kernel"
        assert missing[of_dx] == ("x" not in trained), trained
        text = traced(trained).lower(lowering_platforms=("cpu",)).as_text(debug_info=True)
        products = set(re.findall(r"jgg\.dw\[[^]]*", text))
        assert len(products) == sum(name.startswith("w_") for name in trained), trained


@pytest.mark.parametrize("trained", [(), ("w_down",), ("x", "w_gate_up")])
@pytest.mark.parametrize("quantization", [None, jgg.Fp8()], ids=["", "fp8"])
def test_gradients_beside_frozen_arrays(quantization, trained):
    """Are those where nothing is frozen; of biases and of the router too."""
    floats, chosen, dy = make(biased=True)
    arrays = {name: jnp.asarray(array) for name, array in floats.items()}
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), DATA["experts"])

    def loss(some, others):
        both = some | others
        routing = jgg.Routing(both.pop("topk_weights"), jnp.asarray(chosen), group_sizes, gather_indices)
        return jnp.sum(jgg.moe_mlp(routing=routing, quantization=quantization, **both) * dy)

    want = jax.jit(jax.grad(loss))(arrays, {})
    names = (*trained, "b_gate_up", "b_down", "topk_weights")
    some = {name: arrays[name] for name in names}
    others = {name: array for name, array in arrays.items() if name not in names}
    got = jax.jit(jax.grad(loss))(some, others)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, {n: want[n] for n in names})


@pytest.mark.thorough
def test_xla_to_second_order():
    floats, chosen, _ = make(tokens=4, features=6, hidden=4, experts=3)
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), 3)

    def function(x, w_gate_up, w_down, topk_weights):
        routing = jgg.Routing(topk_weights, jnp.asarray(chosen), group_sizes, gather_indices)
        return jgg.moe_mlp(x, w_gate_up, w_down, routing, implementation="xla", precision="highest")

    arrays = [jnp.asarray(floats[name]) for name in ("x", "w_gate_up", "w_down", "topk_weights")]
    check_grads(function, arrays, order=2, modes=["fwd", "rev"], rtol=2e-2, atol=2e-2)


def call(**changes):
    floats, chosen, _ = make()
    arrays = {name: jnp.asarray(floats[name]) for name in ("x", "w_gate_up", "w_down")}
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), DATA["experts"])
    routing = jgg.Routing(jnp.asarray(floats["topk_weights"]), jnp.asarray(chosen), group_sizes, gather_indices)
    parts = {name.removeprefix("routing."): changes.pop(name) for name in list(changes) if name.startswith("routing.")}
    return jgg.moe_mlp(**{**arrays, "routing": routing._replace(**parts), **changes})


ERRORS = {
    "x": ({"x": jnp.ones(24)}, ValueError, r"x must be \[T, H\], 2-dimensional, got \[24\]"),
    "x of other features": ({"x": jnp.ones((13, 25))}, ValueError, "w_gate_up must have H in-features equal to x's 25"),
    "tokens": ({"x": jnp.ones((12, 24))}, ValueError, r"routing.topk_weights must be \[T, k\] with T equal to x's 12"),
    "w_gate_up": ({"w_gate_up": jnp.ones((5, 40))}, ValueError, r"w_gate_up must be \[E, 2 \* I, H\] or"),
    "odd": ({"w_gate_up": jnp.ones((5, 41, 24))}, ValueError, "w_gate_up must have 2 \\* I out-features .* got 41"),
    "w_down": (
        {"w_down": jnp.ones((5, 24, 21))},
        ValueError,
        r"w_down must have E, I, H = \[5, 20, 24\].*\[5, 21, 24\]",
    ),
    "dtype": ({"w_down": jnp.ones((5, 24, 20), jnp.int8)}, TypeError, "w_down must be one of float32, .*, got int8"),
    "b_gate_up": ({"b_gate_up": jnp.ones((5, 20))}, ValueError, r"b_gate_up must be \[E, N\] = \[5, 40\]"),
    "b_down": ({"b_down": jnp.ones((4, 24))}, ValueError, r"b_down must be \[E, N\] = \[5, 24\]"),
    "activation": (
        {"activation": "swish"},
        ValueError,
        "activation must be an Activation or one of .*'swiglu'.*'swish'",
    ),
    "gated or not": (
        {"activation": "silu"},
        ValueError,
        r"activation must be 'swiglu', which is silu\(gate\) \* up, or 'ungated_silu', which has no gate, got 'silu'",
    ),
    "no gated one": (
        {"activation": "relu_squared"},
        ValueError,
        "activation must be 'ungated_relu_squared', which has no gate, got 'relu_squared'",
    ),
    "array in a partial": (
        {"activation": functools.partial(jax.nn.leaky_relu, negative_slope=jnp.float32(0.1))},
        TypeError,
        "activation must be hashable, and a functools.partial may hold numbers but no arrays, got functools.partial",
    ),
    "implementation": ({"implementation": "cuda"}, ValueError, "implementation must be one of"),
    "layout": ({"w_layout": "ekn"}, ValueError, "w_gate_up must have H in-features equal to x's 24"),
    "expected_rows": ({"expected_rows": 0}, ValueError, "expected_rows must be None or an int of at least 1, got 0"),
    "choices": (
        {"routing.topk_indices": jnp.zeros((13, 1), jnp.int32)},
        ValueError,
        r"routing.topk_indices must be \[T, k\] = \[13, 2\] as routing.topk_weights, got \[13, 1\]",
    ),
    "no choice": ({"routing.topk_weights": jnp.ones((13, 0))}, ValueError, "routing.topk_weights .* k at least 1, got"),
    "weights": (
        {"routing.topk_weights": jnp.ones((13, 2), jnp.int32)},
        TypeError,
        "routing.topk_weights must be one of float32, float16, bfloat16, got int32",
    ),
    "float choices": (
        {"routing.topk_indices": jnp.ones((13, 2))},
        TypeError,
        "routing.topk_indices must be an integer array, got float32",
    ),
    "no sizes": ({"routing.group_sizes": None}, TypeError, "routing.group_sizes must be an array, got None"),
    "sizes": (
        {"routing.group_sizes": jnp.zeros(4, jnp.int32)},
        ValueError,
        r"routing.group_sizes must be \[E\] = \[5\], got \[4\]",
    ),
    "rows": (
        {"routing.gather_indices": jnp.zeros(27, jnp.int32)},
        ValueError,
        r"routing.gather_indices must be \[M\] with M at most T \* k = 26, got \[27\]",
    ),
    "spare_sms": ({"spare_sms": -1}, ValueError, "spare_sms must be an int of at least 0, got -1"),
}


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument(changes, error, message):
    assert np.isfinite(np.asarray(call())).all()
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("is_gated", [True, False])
def test_an_activation_of_a_partial_with_an_array(is_gated):
    function = functools.partial(jax.nn.leaky_relu, negative_slope=np.float32([0.1]))
    with pytest.raises(TypeError, match=r"function must be hashable, and a functools\.partial may hold numbers"):
        Activation("own", function, is_gated=is_gated)


@pytest.mark.parametrize("name", [*ACTIVATIONS, "partial"])
def test_derivatives_under_shard_map_and_vmap(name):
    """First and second ones, under both transformations together."""
    exact_gelu = functools.partial(jax.nn.gelu, approximate=False)
    activation = find_activation(exact_gelu if name == "partial" else name)
    plain = (lambda gate, up: exact_gelu(gate) * up) if activation.curve == ("gelu", 0.0, 0.0) else activation.function
    if name == "ungated_gelu":
        plain = exact_gelu

    def derivatives(function):
        def first(pre):
            return jax.grad(lambda pre: jnp.sum(jnp.sin(function(pre))))(pre)

        return jax.jit(lambda pre: (first(pre), jax.grad(lambda pre: jnp.sum(jnp.cos(first(pre))))(pre)))

    def on_halves(pre):
        return plain(*jnp.split(pre, 2, axis=-1)) if activation.is_gated else plain(pre)

    pre = jnp.linspace(-12, 12, 3 * 4 * 10).reshape(3, 4, 10)
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(jax.vmap(derivatives(activation)), mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a"))
    got, want = sharded(pre), jax.vmap(derivatives(on_halves))(pre)
    for order, one, other in zip((1, 2), got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=f"order {order}")


def test_oracle_agrees_with_the_grouped_gemm_oracle():
    """The first product of the oracle above is that of the one oracle of grouped GEMM."""
    floats, chosen, dy = make(topk=1, tokens=6, chosen=[[0], [0], [1], [3], [4], [4]])
    floats["topk_weights"][:] = 1
    y, _ = expected(floats, chosen, dy, "swiglu", False, "enk")
    sizes = np.bincount(chosen[:, 0], minlength=5)
    pre = oracle.grouped_gemm(floats["x"], floats["w_gate_up"], sizes)
    hidden = FUNCTIONS["swiglu"](*np.split(pre, 2, axis=1))
    np.testing.assert_allclose(oracle.grouped_gemm(hidden, floats["w_down"], sizes), y, rtol=1e-12)
