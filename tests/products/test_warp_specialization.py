"""The warp-specialized kernel of sm_90: its contract on a GPU, and where it steps aside."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgg
from jgg.core import files, versions
from jgg.core.gpu_target import Target
from jgg.launching.heuristic import heuristic_config, hopper_config, plain_config
from jgg.launching.kernel_configs import CONFIG_TYPES
from jgg.launching.requirements import why_not
from jgg.products.launches import hopper as warp_specialized
from jgg.tuning.timing import relative_error
from jgg.tuning.workloads import gemm
from tests.support.cases import CASES, OPTIONS
from tests.support.comparison import assert_right, passes_of_grouped_gemm
from tests.support.specialized import ARGUMENTS, LARGE_CASES, columns_of, specialized_configs

HOPPER = Target(90, 132, "NVIDIA H200")
GEMM = {"num_rows": 4096, "in_features": 512, "out_features": 1024, "num_experts": 8}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES + OPTIONS, ids=lambda case: case.name)
def test_case(case):
    configs = specialized_configs(case.w_layout, columns_of(case), fuse_gather=True)
    assert_right(case, "bfloat16", "triton", configs=configs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("columns", "dw_step", "band", "dtype", "fuse_gather"),
    [(256, 64, 8, "float16", True), (128, 64, 1, "bfloat16", False), (256, 32, 2, "bfloat16", False)],
)
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_large_case(case, columns, dw_step, band, dtype, fuse_gather):
    options = {"band": band, "fuse_gather": fuse_gather}
    configs = specialized_configs(case.w_layout, min(columns, columns_of(case)), dw_step, **options)
    assert_right(case, dtype, "triton", configs=configs)


@pytest.mark.parametrize(
    ("rows", "changes", "step"), [(224, {}, 32), (223, {}, 64), (512, {"permute_x": True, "out_features": 768}, 64)]
)
def test_steps_of_dw(rows, changes, step):
    """They are short unless groups are small or the kernel gathers."""
    problem = gemm(**GEMM | {"num_rows": 8 * rows, "in_features": 2048} | changes)
    config = heuristic_config(jgg.KernelConfigDW, problem, HOPPER)
    assert (config.kernel, config.block_m) == ("hopper", step)


@pytest.mark.thorough
@pytest.mark.skipif(versions.unlike(versions.WARP_SPECIALIZED) is not None, reason="other versions")
def test_one_row_is_compiled():
    """Triton turns an argument that is 1 into a constant; the kernel compiles with it too."""
    config = dict(specialized_configs("enk", fuse_gather=True))["kernel_config_bwd_dw"]

    def products(x, w, group_sizes, gather_indices):
        permuted = {"gather_indices": gather_indices, "permute_x": True}
        y = jgg.grouped_gemm(jgg.quantize_tokens(x), jgg.quantize_weights(w), group_sizes, **permuted)
        return jgg.grouped_gemm_dw(x, y, group_sizes=group_sizes, **permuted, kernel_config=config)

    floats = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((1, 128), (2, 256, 128))]
    integers = [jax.ShapeDtypeStruct(shape, "int32") for shape in ((2,), (1,))]
    with jgg.target(90):
        jax.jit(products).trace(*floats, *integers).lower(lowering_platforms=("cuda",))


@pytest.mark.gpu
@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
def test_many_groups(w_layout):
    """A cluster's two row tiles are of one group or of two, in any order, and neither CTA gets ahead of the other."""
    num_rows, features, experts = 20_000, 768, 64
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((num_rows, features), (experts, features, features), (num_rows, features))
    x, w, dy = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))

    def compiled(configs):
        run = jax.jit(passes_of_grouped_gemm("triton", {"w_layout": w_layout}, configs))
        return lambda sizes: run((x, w, None, None), sizes, None, dy)

    specialized = compiled(dict(specialized_configs(w_layout)))
    problem = gemm(num_rows=num_rows, in_features=features, out_features=features, num_experts=experts)
    plain = compiled({name: plain_config(CONFIG_TYPES[op], problem, HOPPER) for op, name in ARGUMENTS.items()})
    rng = np.random.default_rng(0)
    for spread in 20 * (0.05, 0.3, 1, 10):
        sizes = jnp.asarray(rng.multinomial(rng.integers(num_rows), rng.dirichlet(np.full(experts, spread))), jnp.int32)
        results, expected = map(jax.tree.leaves, (specialized(sizes), plain(sizes)))
        errors = [relative_error(a, b.astype(jnp.float32)) for a, b in zip(results, expected, strict=True)]
        assert len(errors) == 3  # of y, dx and dw
        assert max(errors) < 1e-2, (errors, spread, sizes)


@pytest.mark.gpu
def test_the_same_bits_every_time():
    """Also in a scan, whose results are slices of a larger array, and next to a kernel that moves in its way."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4096, 512), jnp.bfloat16)
    w = jax.random.normal(keys[1], (8, 512, 512), jnp.bfloat16)
    sizes = jnp.array([700, 0, 1000, 3, 900, 64, 129, 1100], jnp.int32)

    def own_cotangent(x):
        y, vjp = jax.vjp(lambda x, w: jgg.grouped_gemm(x, w, sizes, implementation="triton"), x, w)
        return y, *vjp(y)

    @jax.jit
    def repeated(x):
        return jax.lax.scan(lambda carry, _: (carry, own_cotangent(carry)), x, length=5)[1]

    once = jax.jit(own_cotangent)(x)
    for _ in range(3):
        for result, expected in zip(repeated(x), once, strict=True):
            assert jnp.array_equal(result, jnp.broadcast_to(expected, result.shape))


def test_it_is_chosen_where_it_can_run():
    for op in CONFIG_TYPES:
        assert why_not("hopper", CONFIG_TYPES[op], gemm(**GEMM), HOPPER) is None
        assert heuristic_config(CONFIG_TYPES[op], gemm(**GEMM), HOPPER).kernel == "hopper"
        assert plain_config(CONFIG_TYPES[op], gemm(**GEMM), HOPPER).kernel == "plain"


@pytest.mark.parametrize(
    ("ops", "changes", "target", "reason"),
    [
        (CONFIG_TYPES, {}, Target(80, 108), "compute capability"),
        (CONFIG_TYPES, {}, Target(100, 148), "compute capability"),
        (CONFIG_TYPES, {"dtype": "float32"}, HOPPER, "16 and 8 bits"),
        (CONFIG_TYPES, {"in_features": 513}, HOPPER, "16 bytes"),
        (CONFIG_TYPES, {"out_features": 100}, HOPPER, "16 bytes"),
        (("dx",), {"weighted": True}, HOPPER, "topk_weights"),
    ],
)
def test_it_steps_aside(ops, changes, target, reason):
    problem = gemm(**GEMM | changes)
    for op in ops:
        assert reason in why_not("hopper", CONFIG_TYPES[op], problem, target)
        assert heuristic_config(CONFIG_TYPES[op], problem, target).kernel == "plain"


def test_a_result_of_32_bits_has_tiles_that_fit_the_registers(launched):
    problem = dataclasses.replace(gemm(**GEMM), out_dtype=jnp.dtype("float32"))
    assert why_not("hopper", jgg.KernelConfigForward, problem, HOPPER) is None
    assert heuristic_config(jgg.KernelConfigForward, problem, HOPPER).block_n == 128
    with pytest.raises(ValueError, match=r"with kernel='hopper'.* a result in float32 must be \(256, 128, 64\), got"):
        lower(preferred_element_type="float32", kernel_config_fwd=hopper_config(jgg.KernelConfigForward, "enk"))


@pytest.fixture(autouse=True)
def as_with_its_triton(request, monkeypatch):
    """What is not compiled is the same with any Triton."""
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(versions, "installed", {"triton": "3.9.0", "jax-triton": "0.4.1"}.get)


@pytest.fixture
def another_triton(as_with_its_triton, monkeypatch):
    monkeypatch.setattr(versions, "installed", {"triton": "3.8.0", "jax-triton": "0.4.1"}.get)
    files.warn_once.cache_clear()  # as in a new process
    yield
    files.warn_once.cache_clear()


@pytest.mark.usefixtures("another_triton")
def test_it_steps_aside_for_another_triton_and_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, "jgg"):
        for _ in range(2):
            assert "triton 3.8.0 was not tested with them, only 3.9" in why_not(
                "hopper", jgg.KernelConfigDW, gemm(**GEMM), HOPPER
            )
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert heuristic_config(jgg.KernelConfigDW, gemm(**GEMM), HOPPER).kernel == "plain"


def names(launched):
    return [name for name, _ in launched]


def lower(**options):
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((512, 256), (4, 256, 256))]
    sizes = jax.ShapeDtypeStruct((4,), "int32")

    def forward(x, w, sizes):
        return jgg.grouped_gemm(x, w, sizes, implementation="triton", **options)

    with jgg.target(90):
        jax.jit(forward).trace(*arrays, sizes).lower(lowering_platforms=("cuda",))


def test_a_configuration_chooses_the_kernel(launched):
    lower(kernel_config_fwd=hopper_config(jgg.KernelConfigForward, "enk"))
    lower(kernel_config_fwd=jgg.KernelConfigForward())
    assert names(launched) == ["hopper_kernel", "forward_kernel"]


@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
@pytest.mark.parametrize(
    ("permuted", "copies"), [({"permute_x"}, 0), ({"permute_y"}, 0), ({"permute_x", "permute_y"}, 1)]
)
def test_dw_gathers_rows_of_one_side(w_layout, permuted, copies, launched):
    x, dy = (jax.ShapeDtypeStruct((512, features), "bfloat16") for features in (256, 512))
    sizes, indices = (jax.ShapeDtypeStruct((size,), "int32") for size in (4, 512))
    options = dict.fromkeys(permuted, True) | {"kernel_config": hopper_config(jgg.KernelConfigDW, w_layout)}

    def dw(x, dy, sizes, indices):
        order = {"group_sizes": sizes, "gather_indices": indices}
        return jgg.grouped_gemm_dw(x, dy, **order, w_layout=w_layout, implementation="triton", **options)

    with jgg.target(90):
        jax.jit(dw).trace(x, dy, sizes, indices).lower(lowering_platforms=("cuda",))
    assert names(launched) == [*["combine_kernel"] * copies, "hopper_kernel"]


@pytest.mark.parametrize("w_layout", ["enk", "ekn"])
def test_dw_copies_rows_in_parts_of_their_features(w_layout, launched):
    x, dy = (jax.ShapeDtypeStruct((512, features), "bfloat16") for features in (2560, 2048))
    sizes, indices = (jax.ShapeDtypeStruct((size,), "int32") for size in (4, 512))
    config = dataclasses.replace(hopper_config(jgg.KernelConfigDW, w_layout), fuse_gather=False)

    def dw(x, dy, sizes, indices):
        return jgg.grouped_gemm_dw(
            x,
            dy,
            group_sizes=sizes,
            gather_indices=indices,
            permute_x=True,
            w_layout=w_layout,
            kernel_config=config,
            implementation="triton",
        )

    with jgg.target(90):
        jax.jit(dw).trace(x, dy, sizes, indices).lower(lowering_platforms=("cuda",))
    assert names(launched) == 3 * ["combine_kernel", "hopper_kernel"]
    assert [launch.constants["COLUMNS"] for _, launch in launched[::2]] == [1024, 1024, 512]
    places = [(launch.operands["y_row"], launch.operands["y_column"]) for _, launch in launched[1::2]]
    assert places == [(0, first) if w_layout == "enk" else (first, 0) for first in (0, 1024, 2048)]


def test_dw_takes_the_largest_groups_first(launched, monkeypatch):
    monkeypatch.setattr(warp_specialized, "largest_first", lambda bounds: 3 * (bounds.starts[:7],))
    x, dy = (jax.ShapeDtypeStruct((8192, 4096), "bfloat16") for _ in range(2))

    def dw(x, dy, sizes):
        return jgg.grouped_gemm_dw(
            x, dy, group_sizes=sizes, implementation="triton", kernel_config=hopper_config(jgg.KernelConfigDW, "enk")
        )

    with jgg.target(90, 132):
        jax.jit(dw).trace(x, dy, jax.ShapeDtypeStruct((64,), "int32")).lower(lowering_platforms=("cuda",))
    ((name, launch),) = launched
    assert name == "hopper_kernel"
    assert launch.operands["tile_group"].shape == (7,)


@pytest.mark.parametrize(("fuse_gather", "kernels"), [(True, []), (False, ["combine_kernel"])])
def test_rows_are_gathered_as_they_are_loaded_or_by_a_copy(fuse_gather, kernels, launched):
    config = dataclasses.replace(hopper_config(jgg.KernelConfigForward, "enk"), fuse_gather=fuse_gather)
    lower(permute_x=True, gather_indices=np.arange(512, dtype=np.int32), kernel_config_fwd=config)
    assert names(launched) == [*kernels, "hopper_kernel"]


@pytest.mark.parametrize(
    ("op", "sizes", "fuse_gather"),
    [
        ("forward", {"in_features": 2048, "out_features": 1536}, True),
        ("forward", {"in_features": 768, "out_features": 2048}, False),  # tiles of few steps
        ("forward", {"in_features": 4096, "out_features": 28672}, False),  # each row is loaded for many tiles
        ("dx", {"in_features": 768, "out_features": 2048}, True),
        ("dx", {"in_features": 2048, "out_features": 768}, False),
        ("dw", {"in_features": 2048, "out_features": 768}, True),
        ("dw", {"in_features": 2048, "out_features": 3072}, False),  # the copy is little of it
        ("dw", {"in_features": 768, "out_features": 2048, "permute_x": False}, True),
        ("dw", {"in_features": 3072, "out_features": 2048, "permute_x": False}, False),
    ],
)
def test_where_it_gathers_by_itself(op, sizes, fuse_gather):
    config = heuristic_config(CONFIG_TYPES[op], gemm(**GEMM | {"permute_x": True, "permute_y": True} | sizes), HOPPER)
    assert (config.kernel, config.fuse_gather) == ("hopper", fuse_gather)


@pytest.mark.usefixtures("another_triton")
def test_a_configuration_that_cannot_run_here_is_replaced(launched):
    lower(kernel_config_fwd=hopper_config(jgg.KernelConfigForward, "enk"))
    assert names(launched) == ["forward_kernel"]


def test_other_tiles_are_refused():
    with pytest.raises(
        ValueError, match=r"of forward .* must be \(256, 256, 64\) or \(256, 128, 64\), got \(128, 256, 64\)"
    ):
        lower(kernel_config_fwd=dataclasses.replace(hopper_config(jgg.KernelConfigForward, "enk"), block_m=128))


@pytest.mark.interpret
def test_the_interpreter_runs_the_plain_kernels():
    """Interpreted 16-bit products use the plain kernels, at sizes where a GPU would run the warp-specialized one."""
    x, w = jnp.ones((136, 16), jnp.float16), jnp.ones((2, 136, 16), jnp.float16)
    y = jgg.grouped_gemm(x, w, jnp.array([70, 66]), implementation="interpret")
    assert (y == 16).all()
