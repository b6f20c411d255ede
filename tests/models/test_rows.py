"""A model's norms and rotary embedding by kernels, under JAX's transformations, against the same in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.mixers import RotaryConfig
from jgg.models.norms import NORMALIZED, TOTAL, _exact_factor, add_and_norm, how_of_rows, norm, norm_beside, residual
from jgg.models.rotary import rotated, rotations
from tests.models.test_model_training import loss_and_gradients
from tests.support.closeness import assert_close
from tests.support.marks import KERNELS
from tests.support.models import loaded, reference

EPSILON, FEATURES = 1e-5, 12


@pytest.fixture(autouse=True)
def exact_products():
    """XLA multiplies as the kernels do; on a GPU its float32 products are in TF32 by default."""
    with jax.default_matmul_precision("highest"):
        yield


def random(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), "float32") for shape in shapes]


def layer(params, x, implementation):
    """Norms and a rotary embedding as in a layer, with a substitute for attention."""
    x, y = norm_beside(x, params["first"], EPSILON, implementation)
    q, k = y @ params["q"], y @ params["k"]
    rotation = rotations(RotaryConfig((1.0, 0.3), 1.2), jnp.arange(x.shape[1])[None])
    scales = (params["q_norm"], params["k_norm"]) if "q_norm" in params else None
    q, k = rotated(q, k, scales, rotation, 6, EPSILON, implementation)
    mixed = jnp.tanh(q * k).reshape(x.shape)
    x, y = add_and_norm(x, mixed, 0.5, params["second"], EPSILON, implementation)
    return x + norm(jnp.sin(y), params["third"], EPSILON, implementation)


@functools.cache
def case(has_norm):
    shapes = dict(first=FEATURES, second=FEATURES, third=FEATURES, q_norm=6, k_norm=6)
    shapes = {name: (count,) for name, count in shapes.items() if has_norm or "_norm" not in name}
    shapes |= {"q": (FEATURES, 12), "k": (FEATURES, 6)}
    return dict(zip(shapes, random(0, *shapes.values()), strict=True)), random(1, (2, 5, FEATURES))[0]


def one(params, x, implementation):
    return layer(params, x, implementation)


def two_in_a_scan(params, x, implementation):
    stacked = jax.tree.map(lambda array: jnp.stack([array, array[::-1]]), params)
    step = jax.checkpoint(lambda x, own: (layer(own, x, implementation), None))
    return jax.lax.scan(step, x, stacked)[0]


def named(params, x, implementation):
    policy = jax.checkpoint_policies.save_only_these_names(TOTAL, NORMALIZED)
    return jax.checkpoint(lambda params, x: layer(params, x, implementation), policy=policy)(params, x)


def mapped(params, x, implementation):
    return jax.vmap(lambda x: layer(params, x[None], implementation)[0])(x)


def mapped_with_scales(params, x, implementation):
    stacked = jax.tree.map(lambda array: jnp.stack([array, array[::-1]]), params)
    return jax.vmap(lambda params, x: layer(params, x[None], implementation)[0])(stacked, x)


def on_each_device(params, x, implementation):
    mesh = jax.make_mesh((1,), ("tokens",), (jax.sharding.AxisType.Auto,))
    run = functools.partial(layer, implementation=implementation)
    specs = (jax.P(), jax.P("tokens"))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P("tokens"))(params, x)


TRANSFORMED = [one, two_in_a_scan, named, mapped, mapped_with_scales, on_each_device]


@KERNELS
@pytest.mark.parametrize(
    ("transformed", "has_norm"),
    [(transformed, True) for transformed in TRANSFORMED]
    + [
        pytest.param(transformed, False, marks=[] if transformed in (one, two_in_a_scan, mapped) else pytest.mark.sweep)
        for transformed in TRANSFORMED
    ],
)
def test_values_and_gradients(transformed, has_norm, implementation):
    params, x = case(has_norm)

    def loss(params, x, implementation):
        y = transformed(params, x, implementation)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    assert_close(run(params, x, implementation), run(params, x, "xla"), 2e-5)


@KERNELS
def test_frozen_scales_and_empty_batches(implementation):
    params, x = case(True)
    gradient = jax.jit(jax.grad(lambda x, name: jnp.sum(layer(params, x, name) ** 2)), static_argnums=1)
    assert_close(gradient(x, implementation), gradient(x, "xla"), 2e-5)
    for empty in (x[:0], x[:, :0]):
        assert gradient(empty, implementation).shape == empty.shape


def test_second_derivatives_in_plain_jax():
    params, x = case(True)
    loss = lambda x: jnp.sum(layer(params, x, "xla") ** 2)  # noqa: E731
    (direction,) = random(2, x.shape)
    gradient, step = jax.jit(jax.grad(loss)), 1e-2
    exact = jax.jvp(gradient, (x,), (direction,))[1]
    differences = (gradient(x + step * direction) - gradient(x - step * direction)) / (2 * step)
    np.testing.assert_allclose(exact, differences, rtol=0.05, atol=0.05 * np.max(np.abs(exact)))


def test_a_program_for_a_cpu_has_no_kernels():
    assert how_of_rows("xla") is None
    if jax.default_backend() == "cpu":
        assert how_of_rows(None) is None
    with jgg.target(90):
        assert how_of_rows(None).target.compute_capability == 90


@KERNELS
def test_remat_keeps_what_a_norm_makes_of_the_sum(implementation):
    """Else the backward pass would compute attention again, to add it again."""
    params, x = case(True)
    loss = lambda x: jnp.sum(named(params, x, implementation) ** 2)  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss))(x))
    assert text.count("tanh") == 2, text  # in the forward pass, and for its own derivative
    assert text.count(" norm[") == 4  # of the three in the forward pass, only the first again


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("xla", "bfloat16"),
        ("xla", "float16"),
        pytest.param("interpret", "float16", marks=pytest.mark.interpret),
        *(pytest.param("triton", dtype, marks=pytest.mark.gpu) for dtype in ("bfloat16", "float16")),
    ],
)
@pytest.mark.parametrize("factor", [0.22, 1.0, -3.3])
def test_scaled_residuals_are_exact_products_and_rounded_sums(factor, dtype, implementation):
    """So that it does not matter whether a compiler contracts them, and both ways to add have the same bits."""
    x, added = (array.astype(dtype) for array in random(3, (64, 32), (64, 32)))
    got = jax.jit(functools.partial(residual, added_scale=factor))(x, added)
    exact = _exact_factor(factor, x.dtype)
    assert abs(exact / factor - 1) < 2**-13
    x64, added64 = (np.asarray(array).astype(np.float64) for array in (x, added))
    assert (np.float32(added64 * exact) == added64 * exact).all()
    np.testing.assert_array_equal(got, (x64 + added64 * exact).astype(np.float32).astype(x.dtype))
    total, _ = add_and_norm(x, added, factor, jnp.ones(32), EPSILON, implementation)
    np.testing.assert_array_equal(total, got)


@pytest.mark.sweep
@KERNELS
def test_a_whole_model(implementation):
    """GLM has a norm of each head and rotates half of its features."""
    tokens = reference("glm4_moe")["tokens"]
    got, want = (
        loss_and_gradients(loaded("glm4_moe", implementation=name, remat="names"), tokens)
        for name in (implementation, "xla")
    )
    assert_close(got, want, 1e-4)
