"""Products and copies in parts of their columns: the same bits, where XLA keeps results in slices too, and how many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core.gpu_target import current_target
from jgg.launching.choice import How, Launcher
from jgg.products.combine import expert_order
from jgg.products.launches import column_parts
from jgg.sharding import MoESharding, sharded_moe_mlp
from tests.support.marks import KERNELS
from tests.support.moe_oracle import DATA, make
from tests.support.moe_runs import run
from tests.support.passes import forward_and_backward

FOR_SPECIALIZED = {"tokens": 300, "features": 640, "hidden": 640, "experts": 4, "topk": 2}


@pytest.fixture
def part_width(monkeypatch):
    """Sets the columns of a part of what is computed in parts."""

    def set_width(width):
        jax.clear_caches()
        for function in ("summed_width", "copied_width"):
            monkeypatch.setattr(column_parts, function, lambda *_: width)

    yield set_width
    jax.clear_caches()


@KERNELS
@pytest.mark.parametrize(("w_layout", "biased"), [("enk", False), pytest.param("ekn", True, marks=pytest.mark.sweep)])
def test_parts_of_columns_change_no_bit(biased, w_layout, implementation, part_width):
    floats, chosen, dy = make(features=80, biased=biased, w_layout=w_layout)
    results = []
    for width in (80, 32):
        part_width(width)
        results.append(run(floats, chosen, dy, implementation, w_layout=w_layout, num_rows=20))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.gpu
@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_of_columns_of_the_warp_specialized_kernel(biased, w_layout, part_width):
    floats, chosen, dy = make(biased=biased, w_layout=w_layout, **FOR_SPECIALIZED)
    results = []
    for width in (640, 256):
        part_width(width)
        results.append(run(floats, chosen, dy, "triton", dtype=jnp.bfloat16, w_layout=w_layout))
    jax.tree.map(np.testing.assert_array_equal, *results)


@KERNELS
def test_copies_of_columns(implementation):
    """The copies hold x's columns, and zeros for bad indices, for ranges at the edges of blocks and past them."""
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(7, 600)).astype(np.float32), np.array([12, 0, -1, 3, 13, 14, 5, 5], np.int32)
    launcher = Launcher.of(How(implementation, current_target()))
    in_range = (positions >= 0) & (positions < 14)
    for columns in range(0, 600), range(256, 512), range(528, 600):
        copy = jax.jit(lambda x, at, columns=columns: expert_order(launcher, x, at, 2, columns))
        want = np.where(in_range[:, None], x[np.clip(positions // 2, 0, 6)][:, columns.start : columns.stop], 0)
        np.testing.assert_array_equal(copy(x, jnp.asarray(positions)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
def test_parts_of_columns_in_a_scan_over_layers(w_layout, dtype, part_width):
    """Where XLA writes a layer's results into slices of those of all layers."""
    part_width(256)
    layers = [make(seed=seed, w_layout=w_layout, **FOR_SPECIALIZED) for seed in range(3)]
    x, dy = jnp.asarray(layers[0][0]["x"], dtype), jnp.asarray(layers[0][2], dtype)
    weights = [{name: jnp.asarray(floats[name], dtype) for name in ("w_gate_up", "w_down")} for floats, _, _ in layers]
    chosen = jnp.asarray(layers[0][1])
    routing = jgg.Routing(
        jnp.asarray(layers[0][0]["topk_weights"]), chosen, *jgg.sort_by_expert(chosen, FOR_SPECIALIZED["experts"])
    )

    def layer(x, weights):
        y = jgg.moe_mlp(x, **weights, routing=routing, w_layout=w_layout, implementation="triton")
        return y, y

    @jax.jit
    def scanned(x, weights):
        (_, ys), vjp = jax.vjp(lambda x, weights: jax.lax.scan(layer, x, weights), x, weights)
        return ys, *vjp((dy, jnp.zeros_like(ys)))

    @jax.jit
    def unrolled(x, weights):
        def forward(x, weights):
            ys = [x := layer(x, layer_weights)[0] for layer_weights in weights]
            return x, jnp.stack(ys)

        (_, ys), vjp = jax.vjp(forward, x, weights)
        dx, d_weights = vjp((dy, jnp.zeros_like(ys)))
        return ys, dx, jax.tree.map(lambda *arrays: jnp.stack(arrays), *d_weights)

    results = scanned(x, jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)), unrolled(x, weights)
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.any(want)
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2e-2, atol=1e-6)


@pytest.mark.gpu
def test_what_is_written_over_is_kept_where_it_is_needed():
    floats, chosen, dy = make()
    group_sizes, gather_indices = jgg.sort_by_expert(jnp.asarray(chosen), DATA["experts"])

    def forward(x):
        routing = jgg.Routing(floats["topk_weights"], jnp.asarray(chosen), group_sizes, gather_indices)
        return jgg.moe_mlp(x, jnp.asarray(floats["w_gate_up"]), jnp.asarray(floats["w_down"]), routing)

    _, vjp = jax.vjp(forward, jnp.asarray(floats["x"]))
    results = [vjp(jnp.asarray(dy)), vjp(jnp.asarray(dy)), *jax.jit(lambda dy: (vjp(dy), vjp(dy)))(jnp.asarray(dy))]
    for result in results[1:]:
        np.testing.assert_array_equal(result[0], results[0][0])


def lower_layer(tokens, hidden, features, experts, topk, **options):
    """Lowers forward and backward of a layer for an H200."""
    shapes = ((tokens, hidden), (experts, 2 * features, hidden), (experts, hidden, features))
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    indices = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((experts,), (tokens * topk,))]

    @jax.jit
    def run(arrays, indices, dy):
        routing = jgg.Routing(jnp.ones((tokens, topk)), jnp.zeros((tokens, topk), jnp.int32), *indices)
        layer = lambda arrays: jgg.moe_mlp(*arrays, routing, implementation="triton", **options)  # noqa: E731
        return forward_and_backward(layer)(dy, arrays)

    with jgg.target(90, 132):
        run.trace(arrays, indices, arrays[0]).lower(lowering_platforms=("cuda",))


def test_no_array_of_all_rows_is_wider_than_the_pre_activation(launched):
    """The layer's rows of hidden features take more memory than its weights."""
    tokens, features, topk = 24576, 256, 8
    lower_layer(tokens, 1536, features, 128, topk)
    widths = [
        result.shape[1]
        for _, launch in launched
        for result in launch.result_types.values()
        if result.ndim == 2 and result.shape[0] == tokens * topk
    ]
    assert max(widths) == 2 * features


@pytest.mark.parametrize(
    ("tokens", "experts", "expected_rows", "parts"),
    [
        (8192, 128, None, [2048]),  # the weights take more memory
        (32768, 32, None, 4 * [512]),
        (32768, 32, 65536, 2 * [1024]),  # most of the rows are none, and a device is busy with few columns for a moment
        (131_072, 128, None, 4 * [512]),
    ],
)
def test_columns_of_parts(tokens, experts, expected_rows, parts, launched):
    lower_layer(tokens, 2048, 768, experts, 8, expected_rows=expected_rows)
    sums = [
        launch.constants["COLUMNS"]
        for name, launch in launched
        if name == "combine_kernel" and launch.constants["TOPK"] == 8
    ]
    assert sums == 2 * parts  # of the down product and of dX of up


def test_the_last_product_spares_multiprocessors(launched):
    def grids(**options):
        launched.clear()
        lower_layer(2048, 512, 512, 16, 2, **options)
        return [(name, launch.grid) for name, launch in launched]

    *all_others, (name, (clusters,)) = grids()
    assert name == "hopper_kernel"
    assert grids(spare_sms=24) == [*all_others, (name, (clusters - 12,))]


def test_all_products_beside_gathers_spare_multiprocessors(launched):
    def grids(prevent_cse):
        launched.clear()
        mesh = jax.sharding.AbstractMesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = MoESharding(mesh, fsdp="a", prevent_cse=prevent_cse)
        floats = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8192, 512), (16, 1024, 512), (16, 512, 512))]
        chosen = jax.ShapeDtypeStruct((8192, 2), "int32")

        @jax.jit
        @functools.partial(jax.grad, argnums=0)
        def run(floats, chosen):
            y, _ = sharded_moe_mlp(*floats, jnp.ones(chosen.shape), chosen, sharding=sharding, implementation="triton")
            return jnp.sum(y, dtype=jnp.float32)

        with jgg.target(90, 132):
            run.trace(floats, chosen).lower(lowering_platforms=("cuda",))
        return [launch.grid[0] for name, launch in launched if name == "hopper_kernel"]

    whole = grids(True)
    assert max(whole) == 132 // 2  # clusters of two
    assert grids(False) == [min(clusters, (132 - 24) // 2) for clusters in whole]
