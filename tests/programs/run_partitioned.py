"""Plain `jax.jit` on arrays split over eight CPU devices: what is local, and what is refused; prints what was right.

With "few" as an argument it leaves out what differs least from the rest, with "others" it does only that.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import contextlib
import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jgg
from jgg.linear.symmetric import apply, symmetric_product
from tests.support import split_tokens
from tests.support.closeness import assert_close, distance

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
    "x alone": ({"x": P(None, ("b", "a"))}, None),
    "bias alone, in plain JAX": ({"bias": P("b", "a")}, "xla"),
    "bias in more ways than w": ({"w": P("a"), "bias": P("a", "b"), "x": P(None, "c")}, None),
}
# name: (types of the mesh's axes, how arrays are split, implementation), all inside jax.set_mesh of it
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
IN_MESH = {
    "Auto mesh": ((AUTO,) * 3, {"w": P("a", "b"), "bias": P("a", "c")}, None),
    "Explicit mesh": ((EXPLICIT,) * 3, {}, "xla"),
    "mesh of both": ((EXPLICIT, AUTO, AUTO), {"w": P("b", None, "c"), "bias": P("c")}, None),
}
# devices along one of two axes do not divide the tokens, where XLA's partitioner added its padding to a gradient
FEW_MESHES = {(4, 2)}
REFUSED = {"rows": ({"x": P("a")}, None), "rows in plain JAX": ({"x": P("a"), "w": P("b")}, "xla")}
FEW = ("all three", "Explicit mesh", *REFUSED)


def mesh_of(*kinds):
    return jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=kinds or (AUTO,) * 3)


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


@functools.cache
def program(implementation):
    """y and the gradients, jitted without a word about devices."""
    _, (group_sizes, gather_indices), dy = make()

    def loss(floats):
        y = jgg.grouped_gemm(
            floats["x"],
            floats["w"],
            group_sizes,
            TOPK,
            gather_indices,
            True,
            True,
            floats["topk_weights"],
            floats["bias"],
            w_layout="ekn",
            precision="highest",
            implementation=implementation,
        )
        return jnp.sum(y * dy), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def wanted():
    """y and the gradients on one device."""
    (_, y), gradients = program("xla")(make()[0])
    return y, gradients


def check_local(name, specs, implementation=None, mesh=None):
    """Checks that y and the gradients are right, and that no weights move between devices."""
    split = place(mesh or mesh_of(), make()[0], specs)
    run = program(implementation).lower(split).compile()
    (_, y), got = run(split)
    want_y, want = wanted()
    assert_close(y, want_y, name=f"{name}: y")
    for argument, gradient in got.items():
        assert_close(gradient, want[argument], name=f"{name}: gradient of {argument}")
    assert_weights_stay(run, name)


def assert_weights_stay(compiled, name):
    moves = r"(f32\[\d+,\d+,\d+\])\S* (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    moved = re.findall(moves, compiled.as_text())
    assert not moved, f"{name}: weights {moved} move"


def check_in_mesh(name):
    kinds, specs, implementation = IN_MESH[name]
    mesh = mesh_of(*kinds)
    with jax.set_mesh(mesh):
        check_local(name, specs, implementation, mesh)


def check_explicit_mesh():
    """Inside an Explicit mesh, set for good, the layer and, not jitted, everything else."""
    want = jax.device_get(jax.jit(products)())
    mesh = mesh_of(EXPLICIT, EXPLICIT, EXPLICIT)
    jax.set_mesh(mesh)
    check_moe_mlp({}, mesh)
    jax.tree.map(functools.partial(assert_close, name="in an Explicit mesh"), products(), want)
    jax.set_mesh(None)


def products():
    """What each function alone gives for arrays of the host."""
    floats, (group_sizes, gather_indices), dy = make()
    x, w = floats["x"], floats["w"]
    options = {"w_layout": "ekn", "precision": "highest"}
    order = {"group_sizes": group_sizes, "topk": TOPK, "gather_indices": gather_indices, "permute_x": True}
    forward = jgg.grouped_gemm_forward(x, w, **order, **options)
    dx = jgg.grouped_gemm_dx(dy, w, **order, **options)
    dw = jgg.grouped_gemm_dw(x, dy, **order, **options)
    routing = jgg.route(x, TOPK)
    losses = jgg.load_balancing_loss(x, routing.topk_indices), jgg.router_z_loss(x)
    d_logits = jax.grad(lambda x: jnp.sum(jnp.sin(jgg.route(x, TOPK).topk_weights)))(x)
    return forward, dx, dw, routing, losses, d_logits


def check_refused(name):
    specs, implementation = REFUSED[name]
    with refuses("An array of rows [6, 12] must not be split over its rows, got P('a', ", "jgg.sharding.MoESharding"):
        program(implementation)(place(mesh_of(), make()[0], specs))


@contextlib.contextmanager
def refuses(*parts):
    """Expects an error, of JAX's compiler too, that says all of this."""
    try:
        yield
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        for part in parts:
            assert part in str(error), error
    else:
        raise AssertionError(f"must be refused: {parts[0]}")


def check_uneven():
    """9 features over 2 devices, as only a constraint inside a program can ask for: of weights it is refused."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 9), (2, 9, 9), (2, 9))]
    group_sizes = jnp.asarray([1, 3], jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def function(specs, *arrays):
        x, w, bias = (
            jax.lax.with_sharding_constraint(array * 2, jax.NamedSharding(mesh_of(), spec))
            for array, spec in zip(arrays, specs, strict=True)
        )
        return jgg.grouped_gemm(x, w, group_sizes, bias=bias, w_layout="ekn", precision="highest")

    want = function((P(), P(), P()), *arrays)
    assert_close(function((P(None, "b"), P("b"), P(None, "a")), *arrays), want, name="uneven x and bias")
    with refuses("Weights [2, 9, 9] must be split evenly, got P(None, None, 'a'): ", "jgg.sharding.MoESharding"):
        function((P(), P(None, None, "a"), P()), *arrays)


def check_parts_of_an_axis_are_refused():
    """Rows, and weights, that are split over parts of an axis, as a reshape of arrays split over it leaves them."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AUTO,))
    ones = functools.partial(jnp.ones, dtype=jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def function(split, x, w):
        arrays = {"x": x, "w": w}
        arrays[split] = jax.lax.with_sharding_constraint(arrays[split] * 2, jax.NamedSharding(mesh, P("a")))
        sizes = jnp.asarray([1, 3, 0, 0], jnp.int32)
        return jgg.ragged_dot(arrays["x"].reshape(4, 12), arrays["w"].reshape(4, 12, 8), sizes)

    for split, refusal in (
        ("x", "An array of rows [4, 12] must not be split over its rows, got "),
        ("w", "Weights [4, 12, 8] must be split over whole axes of the mesh, got "),
    ):
        with refuses(refusal, "jgg.sharding.MoESharding"):
            function(split, ones(48), ones(384))


def check_explicit_is_refused():
    """On Explicit axes every split is refused, when the program is traced."""
    floats, (group_sizes, _), _ = make()
    rows = np.repeat(floats["x"], TOPK, axis=0)
    for kinds, _, _ in IN_MESH.values():
        mesh = mesh_of(*kinds)
        if mesh.axis_types[0] == EXPLICIT:
            split = place(mesh, floats, {"w": P(None, None, "a")})
            with refuses("An array [4, 12, 20] is split over Explicit axes of the mesh", "jgg.sharding.MoESharding"):
                jax.jit(jgg.ragged_dot).trace(jnp.asarray(rows), split["w"], group_sizes)


def check_group_offset():
    """ragged_dot of some groups, themselves split over devices."""
    floats, (group_sizes, _), _ = make()
    rows = np.repeat(floats["x"], TOPK, axis=0)
    function = jax.jit(functools.partial(jgg.ragged_dot, precision="highest"))
    offset = jnp.int32(1)
    w = jax.device_put(floats["w"][1:3], jax.NamedSharding(mesh_of(), P("a", "b", "c")))
    want = function(rows, floats["w"][1:3], group_sizes, group_offset=offset)
    assert_close(function(rows, w, group_sizes, group_offset=offset), want, name="group_offset")


def check_out_sharding():
    """ragged_dot of whole arrays with a result that is split over Explicit axes."""
    mesh = mesh_of(*(EXPLICIT,) * 3)
    x, w, sizes = jnp.ones((4, 6)), jnp.ones((3, 6, 8)), jnp.asarray([1, 0, 2], jnp.int32)

    sharding = jax.NamedSharding(mesh, P("a", "b"))
    y = jgg.ragged_dot(x, w, sizes, out_sharding=sharding)
    assert y.sharding == sharding, y.sharding
    assert_close(y, jgg.ragged_dot(x, w, sizes), name="out_sharding")

    def loss(x, **options):
        return jnp.sum(jnp.sin(jgg.ragged_dot(x, w, sizes, **options)))

    with jax.set_mesh(mesh):
        for spec in P("a"), P(None, "b"):
            got = jax.jit(jax.grad(functools.partial(loss, out_sharding=spec)))(x)
            assert_close(got, jax.grad(loss)(x), name="gradient with out_sharding")
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
    assert_close(got, gradient(w), name="scan")


@functools.cache
def mlp():
    """The expert MLP and its gradients as a program, its arrays, and what it gives for them on one device."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    arrays = {"x": normal(TOKENS, FEATURES), "up": normal(EXPERTS, 2 * OUT, FEATURES)}
    arrays |= {"down": normal(EXPERTS, FEATURES, OUT)}
    logits = normal(TOKENS, EXPERTS)

    def loss(x, up, down):
        y = jgg.moe_mlp(x, up, down, jgg.route(logits, TOPK), interleaved=True, precision="highest")
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    return run, arrays, jax.device_get(run(*arrays.values()))


def check_moe_mlp(specs, mesh):
    """The expert MLP, of whose weights nothing moves."""
    run, arrays, want = mlp()
    split = place(mesh, arrays, specs).values()
    compiled = run.lower(*split).compile()
    jax.tree.map(functools.partial(assert_close, name="moe_mlp"), compiled(*split), want)
    assert_weights_stay(compiled, "moe_mlp")


def check_fp8(*splits):
    """Blocks of 128 that the devices do not divide, 192 or 48 features on each, y and gradients.

    Products of several devices round what they dequantize, so that some values are quantized to their neighbours.
    """
    hidden, inner = 192, 768
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[-1] ** 0.5, jnp.bfloat16)  # noqa: E731
    arrays = {"x": normal(64, hidden), "up": normal(EXPERTS, 2 * inner, hidden), "down": normal(EXPERTS, hidden, inner)}
    routing = jgg.route(rng.normal(size=(64, EXPERTS)).astype(np.float32), TOPK)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def run(x, up, down):
        y = jgg.moe_mlp(x, up, down, routing, quantization=jgg.Fp8()).astype(jnp.float32)
        return jnp.sum(jnp.sin(y)), y

    want = run(*arrays.values())
    # over one axis of 4 devices, where XLA splits 6 blocks over two of the four, which no NamedSharding can say
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO,) * 2)
    for specs in splits:
        got = run(*place(mesh, arrays, specs).values())
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            error = distance(one, other)
            assert error < 0.05, f"fp8 {specs}: {error}"


def check_symmetric():
    """Matrices stay where they are if axes in front of them are split; a matrix that is split itself is gathered."""
    x = np.random.default_rng(0).normal(size=(2, EXPERTS, FEATURES, 2 * OUT)).astype(np.float32)
    gram = x @ np.swapaxes(x, -1, -2)
    want = (2 * gram - 0.5 * gram @ gram + 3 * np.eye(FEATURES, dtype=np.float32)) @ x

    def step(x):
        gram = symmetric_product(x, precision="highest")
        p = symmetric_product(gram, add=gram, scale=-0.5, add_scale=2.0, diagonal=3.0, precision="highest")
        return apply(p, x, precision="highest")

    mesh = mesh_of()
    on_each = jax.shard_map(step, mesh=mesh, in_specs=P(None, "a"), out_specs=P(None, "a"))
    by_layer = functools.partial(jax.lax.map, step)
    for name, compute, spec in (
        ("whole", step, P()),
        ("experts", step, P(None, ("a", "c"))),
        ("layers and experts", step, P("b", "a")),
        ("experts, under vmap", jax.vmap(step), P(None, "a")),
        ("experts, layer by layer", by_layer, P(None, "a")),
        ("experts, in shard_map", on_each, P(None, "a")),
        ("rows", step, P(None, "a", "b")),
        ("columns", by_layer, P(None, "a", None, "b")),
        ("rows and columns, unevenly", step, P(None, None, "c", ("a", "b"))),
    ):
        split = jax.device_put(x, jax.NamedSharding(mesh, spec))
        compiled = jax.jit(compute).lower(split).compile()
        got = compiled(split)
        assert_close(got, want, name=f"symmetric: {name}")
        if not spec[2:]:
            assert got.sharding.is_equivalent_to(split.sharding, x.ndim), f"symmetric: {name}: {got.sharding}"
            assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text()), f"symmetric: {name}"


def main(which="all"):
    assert jax.device_count() == 8
    checks = {name: functools.partial(check_local, name, *case) for name, case in LOCAL.items()}
    for check, names in ((check_in_mesh, IN_MESH), (check_refused, REFUSED)):
        checks |= {name: functools.partial(check, name) for name in names}
    for name, check in checks.items():
        if which == "all" or (name in FEW) == (which == "few"):
            check()
            print(name, flush=True)
    if which != "others":
        check_all_else()
    if which != "few":
        check_others()
    print("all right", flush=True)


def check_all_else():
    check_uneven()
    check_parts_of_an_axis_are_refused()
    check_explicit_is_refused()
    check_group_offset()
    check_out_sharding()
    split_tokens.check_router(FEW_MESHES)
    split_tokens.check_parts_of_an_axis()
    check_explicit_mesh()


def check_others():
    check_scan()
    check_moe_mlp({"up": P("b", "a"), "down": P("b", None, "a")}, mesh_of())  # experts and hidden features
    check_fp8({"up": P(None, "a", "b"), "down": P(None, "b", "a")}, {"up": P("b", None, "a"), "down": P("b", "a")})
    check_symmetric()
    split_tokens.check_router(split_tokens.MESHES.keys() - FEW_MESHES)
    split_tokens.check_reads_and_writes(split_tokens.MESHES)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    main(*sys.argv[1:])
