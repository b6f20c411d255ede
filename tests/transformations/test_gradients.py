"""grouped_gemm under JAX's transformations: every one of them gives the oracle's values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from tests.support import oracle, processes
from tests.support.cases import Case, make_data
from tests.support.closeness import assert_close, distance
from tests.support.comparison import oracle_arguments
from tests.support.marks import RARELY_INTERPRETED, TRITON, on
from tests.support.passes import forward_and_backward
from tests.support.transforms import NAMES, WITH_EVERYTHING, differentiable


def expected_gradients(case, data, dy):
    gradients = oracle.gradients(dy, **oracle_arguments(case, data))
    return {name: g for name, g in zip(NAMES, gradients, strict=True) if g is not None}


@RARELY_INTERPRETED
@pytest.mark.parametrize("permute_x", [False, True])
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.sweep)])
def test_gradient_of_a_wider_result(dtype, permute_x, implementation):
    """No further from float64 than `jax.lax.ragged_dot`'s, also for values that the operands' dtype lacks."""
    if (dtype, implementation) == ("bfloat16", "interpret"):
        return  # it does not take them
    case = Case("wider", (33, 0, 50, 7), num_rows=96, in_features=40, out_features=72, out_dtype="float32")
    if permute_x:
        case = dataclasses.replace(case, permute_x=True, topk=2, gather="random")
    data = make_data(case, dtype)
    # of a range that float16 does not have; with it come weights and x that make d x and d w of one it has
    data.dy[:] = data.dy * np.where(np.arange(96) < 48, 3e-9, 3e-8)[:, None]
    x, w, sizes = jnp.asarray(data.x), jnp.asarray(data.w * 1000), jnp.asarray(data.group_sizes)
    x = x * jnp.asarray(30000 / jnp.max(jnp.abs(x)), dtype)

    def product(x, w):
        indices = None if data.gather_indices is None else jnp.asarray(data.gather_indices)
        return jgg.grouped_gemm(
            x,
            w,
            sizes,
            gather_indices=indices,
            preferred_element_type=jnp.float32,
            implementation=implementation,
            **case.options,
        )

    def by_lax(x, w):
        rows = x[data.gather_indices // 2] if permute_x else x
        return jax.lax.ragged_dot(rows, w.swapaxes(1, 2), sizes, preferred_element_type=jnp.float32)

    got = jax.jit(lambda dy: jax.vjp(product, x, w)[1](dy))(jnp.asarray(data.dy))
    own = jax.vjp(by_lax, x, w)[1](jnp.asarray(data.dy))
    arguments = {"x": np.asarray(x), "w": np.asarray(w), "group_sizes": data.group_sizes}
    expected = oracle.gradients(data.dy, **arguments, gather_indices=data.gather_indices, **case.options)
    assert got[0].dtype == got[1].dtype == dtype
    for name, mine, lax, want in zip(("x", "w"), got, own, expected[:2], strict=True):
        error, bound = distance(mine, want), distance(lax, want)
        assert error <= 1.05 * bound, (name, error, bound)


@RARELY_INTERPRETED
@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_one_argument(name, implementation):
    function, arrays, data = differentiable(WITH_EVERYTHING, implementation)
    rest = {other: array for other, array in arrays.items() if other != name}

    @jax.jit
    def gradient(array):
        return jax.vjp(lambda array: function({**rest, name: array}), array)[1](jnp.asarray(data.dy))

    assert_close(gradient(arrays[name])[0], expected_gradients(WITH_EVERYTHING, data, data.dy)[name])


@RARELY_INTERPRETED
def test_checkpoint_saves_what_a_policy_names(implementation, capsys):
    function, arrays, data = differentiable(WITH_EVERYTHING, implementation)

    def loss(arrays):
        return jnp.sum(jnp.sin(function(jax.tree.map(jnp.sin, arrays))) * data.dy)

    expected = jax.jit(jax.grad(loss))(arrays)
    saved = {}
    for name in ("jgg_x", "another"):
        policy = jax.checkpoint_policies.save_only_these_names(name)
        checkpointed = jax.checkpoint(loss, policy=policy)
        assert_close(jax.jit(jax.grad(checkpointed))(arrays), expected)
        jax.ad_checkpoint.print_saved_residuals(checkpointed, arrays)
        lines = capsys.readouterr().out.splitlines()
        saved[name] = [line for line in lines if line.startswith("f32[6,4] named 'jgg_x'")]
    # plain JAX keeps what JAX wants, under no name
    assert len(saved["jgg_x"]) == (implementation != "xla")
    assert not saved["another"]


def test_a_policy_knows_x_by_the_name_of_its_caller(capsys):
    function, arrays, data = differentiable(WITH_EVERYTHING, None)

    def loss(arrays):
        arrays = jax.tree.map(jnp.sin, arrays)
        arrays["x"] = jax.ad_checkpoint.checkpoint_name(arrays["x"], "own")
        return jnp.sum(jnp.sin(function(arrays)) * data.dy)

    checkpointed = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names("own"))
    got, expected = (jax.jit(jax.grad(each))(arrays) for each in (checkpointed, loss))
    assert_close(got, expected)
    jax.ad_checkpoint.print_saved_residuals(checkpointed, arrays)
    assert sum(line.startswith("f32[6,4] named 'own'") for line in capsys.readouterr().out.splitlines()) == 1


@on(None, TRITON)
def test_offload_what_a_policy_names(implementation):
    """Through a scan over layers, as a model has them: the residual of each waits in the host's memory."""
    layers, tokens, features, hidden, experts = 3, 6, 8, 5, 4
    rng = np.random.default_rng(0)
    shapes = (layers, experts, 2 * hidden, features), (layers, experts, features, hidden), (layers, features, experts)
    weights = [jnp.asarray(rng.standard_normal(shape) / 4, jnp.float32) for shape in shapes]
    x = jnp.asarray(rng.standard_normal((tokens, features)), jnp.float32)

    def layer(x, weights):
        w_gate_up, w_down, router = weights
        y = jgg.moe_mlp(jnp.sin(x), w_gate_up, w_down, jgg.route(x @ router, 2), implementation=implementation)
        return x + y, None

    def gradient(layer):
        return jax.grad(lambda weights, x: jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0])), argnums=(0, 1))

    expected = jax.jit(gradient(layer))(weights, x)
    for name, shape in {"jgg_x": (tokens, features), "jgg_pre_activation": (2 * tokens, 2 * hidden)}.items():
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[name],
            offload_src="device",
            offload_dst="pinned_host",
        )
        offloading = gradient(jax.checkpoint(layer, policy=policy))
        assert_close(jax.jit(offloading)(weights, x), expected)
        assert f"f32<host>[{','.join(map(str, (layers, *shape)))}]" in str(jax.make_jaxpr(offloading)(weights, x))


@RARELY_INTERPRETED
def test_scan_over_layers(implementation):
    case = Case("layer", (3, 0, 6, 1), num_rows=12, in_features=4, out_features=4)
    layers = [make_data(case, "float32", seed) for seed in range(3)]
    x, dy, group_sizes = layers[0].x, layers[0].dy, jnp.asarray(layers[0].group_sizes)

    def scanned(x, w):
        def layer(x, w):
            return jgg.grouped_gemm(x, w, group_sizes, implementation=implementation, precision="highest"), None

        return jax.lax.scan(layer, x, w)[0]

    w = jnp.stack([layer.w for layer in layers])
    y, dx, dw = jax.jit(forward_and_backward(scanned))(jnp.asarray(dy), x, w)
    inputs = [x]
    for layer in layers:
        inputs.append(oracle.grouped_gemm(inputs[-1], layer.w, layer.group_sizes))
    assert_close(y, inputs.pop())
    for i, layer in reversed(list(enumerate(layers))):
        gradients = oracle.gradients(dy, inputs.pop(), layer.w, layer.group_sizes)
        assert_close(dw[i], gradients.w)
        dy = gradients.x
    assert_close(dx, dy)


@RARELY_INTERPRETED
def test_donated_rows(implementation):
    case = Case("donation", (13, 0, 6, 1), num_rows=24, in_features=16, out_features=16)
    function, arrays, data = differentiable(case, implementation)
    # y has the shape of x and may take its memory, but not before the last row of x has been read
    donating = jax.jit(lambda x, w: function({"x": x, "w": w}), donate_argnums=0)
    y = donating(arrays["x"], arrays["w"])
    assert arrays["x"].is_deleted()
    assert_close(y, oracle.grouped_gemm(data.x, data.w, data.group_sizes))


@pytest.mark.sweep
@pytest.mark.parametrize(
    "implementations",
    [pytest.param(("None", "interpret"), marks=pytest.mark.interpret, id="kernels"), pytest.param(("xla",), id="xla")],
)
def test_over_several_devices(implementations):
    """Products and layers in shard_map, and vmap over a batch that a mesh splits, in a process of their own."""
    assert "all right" in processes.run_program("run_sharded", *implementations)
