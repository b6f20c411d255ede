"""Plain `jax.jit` on arrays split over eight CPU devices: what is local, and what is refused; prints what was right."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

import jgg

P = jax.P
TOKENS, FEATURES, OUT, EXPERTS, TOPK = 6, 12, 20, 4, 2
# name: (how arrays are split over a mesh a, b, c of 2 devices each, implementation)
LOCAL = {
    "nothing": ({}, None),
    "out-features": ({"w": P(None, None, "a"), "bias": P(None, "a")}, None),
    "in-features": ({"w": P(None, "a"), "x": P(None, "a")}, None),
    "experts": ({"w": P(("a", "b")), "bias": P(("a", "b"))}, None),
    "all three": ({"w": P("a", "b", "c"), "bias": P("a", "c"), "topk_weights": P("a")}, None),
    "all three in plain JAX": ({"w": P("a", "b", "c"), "bias": P("a", "c")}, "xla"),
    "x otherwise than w": ({"w": P(None, None, "a"), "x": P(None, "a")}, None),
}
REFUSED = {"rows": ({"x": P("a")}, None), "rows in plain JAX": ({"x": P("a")}, "xla")}


def mesh_of(kind=jax.sharding.AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(kind,) * 3)


def make():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    floats = {
        "x": normal(TOKENS, FEATURES),
        "w": normal(EXPERTS, FEATURES, OUT),
        "topk_weights": rng.uniform(0.1, 1, (TOKENS, TOPK)).astype(np.float32),
        "bias": normal(EXPERTS, OUT),
    }
    # expert 2 gets nothing
    chosen = np.stack([rng.choice([0, 1, 3], TOPK, replace=False) for _ in range(TOKENS)])
    return floats, jgg.sort_by_expert(jnp.asarray(chosen), EXPERTS), normal(TOKENS * TOPK, OUT)


def place(mesh, floats, specs):
    return {name: jax.device_put(a, jax.NamedSharding(mesh, specs.get(name, P()))) for name, a in floats.items()}


def program(implementation):
    """y and the gradients, jitted without a word about devices."""
    _, (group_sizes, gather_indices), dy = make()

    def loss(floats):
        y = jgg.grouped_gemm(
            floats["x"], floats["w"], group_sizes, TOPK, gather_indices, True, True, floats["topk_weights"],
            floats["bias"], w_layout="ekn", precision="highest", implementation=implementation,
        )  # fmt: skip
        return jnp.sum(y * dy), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def check_local(name):
    specs, implementation = LOCAL[name]
    floats = make()[0]
    run = program(implementation)
    (_, want_y), want = run(floats)
    split = place(mesh_of(), floats, specs)
    (_, y), got = run(split)
    assert_close(y, want_y, f"{name}: y")
    for argument, gradient in got.items():
        assert_close(gradient, want[argument], f"{name}: gradient of {argument}")
    compiled = run.lower(split).compile().as_text()
    gathered = [shape for shape in re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", compiled) if shape.count(",") == 2]
    assert not gathered, f"{name}: weights [{gathered}] are gathered"


def check_refused(name):
    specs, implementation = REFUSED[name]
    try:
        program(implementation)(place(mesh_of(), make()[0], specs))
    except Exception as error:  # the compiler's, with the message inside
        assert "[6, 12] is split over its rows by ('a',) of the mesh" in str(error), error
        assert "jgg.sharding.MoESharding" in str(error), error
    else:
        raise AssertionError("gathered rows without a word")


def check_uneven_weights_are_refused():
    """9 out-features over 2 devices, as only a constraint inside a program can ask for."""
    x, w = jnp.ones((4, 6)), jnp.ones((2, 6, 9))

    @jax.jit
    def function(x, w):
        w = jax.lax.with_sharding_constraint(w * 2, jax.NamedSharding(mesh_of(), P(None, None, "a")))
        return jgg.ragged_dot(x, w, jnp.asarray([1, 3], jnp.int32))

    try:
        function(x, w)
    except Exception as error:  # the compiler's, with the message inside
        assert "Weights [2, 6, 9] must be split evenly" in str(error), error
    else:
        raise AssertionError("gathered weights without a word")


def check_explicit_is_refused():
    """On Explicit axes every split is refused, when the program is traced."""
    mesh = mesh_of(jax.sharding.AxisType.Explicit)
    floats, (group_sizes, _), _ = make()
    split = place(mesh, floats, {"w": P(None, None, "a")})
    rows = np.repeat(floats["x"], TOPK, axis=0)

    def function(w):
        return jgg.ragged_dot(jnp.asarray(rows), w, group_sizes, precision="highest")

    try:
        jax.jit(function)(split["w"])
    except ValueError as error:
        assert str(error).startswith("An array [4, 12, 20] is split over Explicit axes of the mesh"), error
    else:
        raise AssertionError("took Explicit axes")


def check_group_offset():
    """ragged_dot of some groups, themselves split over devices."""
    floats, (group_sizes, _), _ = make()
    rows = np.repeat(floats["x"], TOPK, axis=0)
    function = jax.jit(functools.partial(jgg.ragged_dot, precision="highest"))
    offset = jnp.int32(1)
    w = jax.device_put(floats["w"][1:3], jax.NamedSharding(mesh_of(), P("a", "b", "c")))
    want = function(rows, floats["w"][1:3], group_sizes, group_offset=offset)
    assert_close(function(rows, w, group_sizes, group_offset=offset), want, "group_offset")


def check_out_sharding():
    """ragged_dot of whole arrays with a result that is split over Explicit axes."""
    mesh = mesh_of(jax.sharding.AxisType.Explicit)
    x, w, sizes = jnp.ones((4, 6)), jnp.ones((3, 6, 8)), jnp.asarray([1, 0, 2], jnp.int32)

    sharding = jax.NamedSharding(mesh, P("a", "b"))
    y = jgg.ragged_dot(x, w, sizes, out_sharding=sharding)
    assert y.sharding == sharding, y.sharding
    assert_close(y, jgg.ragged_dot(x, w, sizes), "out_sharding")

    def loss(x, **options):
        return jnp.sum(jnp.sin(jgg.ragged_dot(x, w, sizes, **options)))

    with jax.set_mesh(mesh):
        for spec in P("a"), P(None, "b"):
            got = jax.jit(jax.grad(functools.partial(loss, out_sharding=spec)))(x)
            assert_close(got, jax.grad(loss)(x), "gradient with out_sharding")
    try:
        jgg.ragged_dot(x, w, sizes, out_sharding=jax.NamedSharding(mesh_of(), P("a")))
    except ValueError as error:
        assert "of type Auto" in str(error), error
    else:
        raise AssertionError("took Auto axes")


def check_scan():
    """Layers one after the other, each with its experts split, keep their weights and gradients where they are."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(3, EXPERTS, FEATURES, FEATURES)).astype(np.float32), make()[0]["x"]
    group_sizes = jnp.asarray([3, 0, 1, 2], jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(w):
        def layer(x, w):
            return jnp.tanh(jgg.ragged_dot(x, w, group_sizes, precision="highest")), None

        return jnp.sum(jax.lax.scan(layer, jnp.asarray(x), w)[0])

    got = gradient(jax.device_put(w, jax.NamedSharding(mesh_of(), P(None, "a"))))
    assert got.sharding.spec == P(None, "a")
    assert_close(got, gradient(w), "scan")


def check_moe_mlp():
    """The expert MLP with its hidden features split: nothing of the weights moves."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    x, up, down = normal(TOKENS, FEATURES), normal(EXPERTS, 2 * OUT, FEATURES), normal(EXPERTS, FEATURES, OUT)
    logits = normal(TOKENS, EXPERTS)

    def loss(x, up, down):
        y = jgg.moe_mlp(x, up, down, jgg.route(logits, TOPK), interleaved=True, precision="highest")
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, want_y), want = run(x, up, down)
    split = place(mesh_of(), {"x": x, "up": up, "down": down}, {"up": P("b", "a"), "down": P("b", None, "a")})
    (_, y), got = run(*split.values())
    assert_close(y, want_y, "y of moe_mlp")
    for got_one, want_one in zip(got, want, strict=True):
        assert_close(got_one, want_one, "gradient of moe_mlp")
    compiled = run.lower(*split.values()).compile().as_text()
    assert not re.findall(r"f32\[\d+,\d+,\d+\]\S* all-gather\(", compiled)


def assert_close(got, want, name):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.max(np.abs(want)), err_msg=name)


def main():
    assert jax.device_count() == 8
    for name in LOCAL:
        check_local(name)
        print(name, flush=True)
    for name in REFUSED:
        check_refused(name)
        print(name, flush=True)
    check_uneven_weights_are_refused()
    check_explicit_is_refused()
    check_group_offset()
    check_out_sharding()
    check_scan()
    check_moe_mlp()
    print("all right", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main()
