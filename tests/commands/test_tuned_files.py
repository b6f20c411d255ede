"""Tuned configurations: which is chosen, and what a file may hold."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

import jgg
from jgg.core.gpu_target import Target
from jgg.core.schedule import group_bounds
from jgg.launching import tuned_configs, tuned_files
from jgg.launching.choice import Launcher
from jgg.launching.heuristic import heuristic_config, hopper_config
from jgg.launching.kernel_configs import CONFIG_TYPES, KERNELS
from jgg.launching.tiles import OF_GPU, TILES, check_tiles
from jgg.products.add_gated import ADD_GATED, AddGated
from jgg.products.forward import FORWARD, Forward
from jgg.tuning.workloads import gemm
from tests.support.tuned_entries import HOPPER, PROBLEM, SIZES, UNUSUAL, chosen, entry

pytestmark = pytest.mark.usefixtures("own_file")


def test_an_entry_survives_its_file(own_file):
    entries = [
        entry(),
        entry(gemm(**SIZES, w_layout="ekn", permute_x=True, biased=True), jgg.KernelConfigDX(num_warps=4)),
        entry(gemm(**SIZES, dtype="float32", precision="highest", permute_y=True, weighted=True), UNUSUAL),
        entry(gemm(**SIZES, dtype="float8_e4m3fn"), jgg.KernelConfigForward(block_k=128)),
    ]
    for each in entries:
        tuned_files.merge(own_file, each)
    assert list(tuned_files.parse(own_file)) == entries
    assert {path.name for path in own_file.parent.iterdir()} == {"tuned.json", ".tuned.json.lock"}


def test_without_a_file_the_heuristic_chooses():
    for op in CONFIG_TYPES:
        assert chosen(op=op) == heuristic_config(CONFIG_TYPES[op], PROBLEM, HOPPER)


def test_the_kernel_gets_the_tuned_configuration(own_file):
    launches = []

    def call(kernel, launch):
        launches.append(launch)
        return {key: jnp.zeros(out.shape, out.dtype) for key, out in launch.outputs.items()}

    problem = gemm(num_rows=64, in_features=64, out_features=64, num_experts=4)
    x, w = jnp.ones(problem.x_shape, problem.dtype), jnp.ones(problem.w_shape, problem.dtype)
    bounds = group_bounds(jnp.full(4, 16), 64)
    for expected in (heuristic_config(jgg.KernelConfigForward, problem, HOPPER).band, 3):
        FORWARD.launch(Launcher(call, HOPPER), Forward(x, w, bounds), problem=problem)
        assert launches[-1].constants["BAND"] == expected
        tuned_files.merge(own_file, entry(problem))
    given = jgg.KernelConfigForward(band=5)
    FORWARD.launch(Launcher(call, HOPPER), Forward(x, w, bounds), problem=problem, config=given)
    assert launches[-1].constants["BAND"] == 5


NEAR = {"rows": {"num_rows": 2 * 65536}, "K": {"in_features": 1024}, "N": {"out_features": 2880}}
FAR = {"rows": {"num_rows": 4 * 65536}, "K": {"in_features": 512}, "N": {"out_features": 4096}}
OTHER = {
    "permute_x": {"permute_x": True},
    "permute_y": {"permute_y": True},
    "weights": {"weighted": True},
    "bias": {"biased": True},
    "size of dtype": {"dtype": "float32"},
    "alignment": {"out_features": 1537},
}


@pytest.mark.parametrize("change", NEAR.values(), ids=NEAR)
def test_a_near_problem_uses_the_entry(own_file, change):
    tuned_files.merge(own_file, entry())
    assert chosen(gemm(**SIZES | change)) == UNUSUAL


@pytest.mark.parametrize("change", [*FAR.values(), *OTHER.values()], ids=[*FAR, *OTHER])
def test_another_problem_does_not(own_file, change):
    tuned_files.merge(own_file, entry())
    assert chosen(gemm(**SIZES | change)) != UNUSUAL


@pytest.mark.parametrize("op", CONFIG_TYPES)
def test_an_entry_serves_the_other_layout_until_that_has_its_own(own_file, op):
    config = CONFIG_TYPES[op](block_m=32, block_n=64, block_k=128)
    transposed = dataclasses.replace(config, block_n=128, block_k=64) if op == "dw" else config
    problem = gemm(**SIZES | {"in_features": 1024}, w_layout="ekn")
    tuned_files.merge(own_file, entry(config=config))
    assert chosen(problem, op) == transposed
    own = dataclasses.replace(config, band=3)
    tuned_files.merge(own_file, entry(gemm(**SIZES, w_layout="ekn"), own))
    assert chosen(problem, op) == own
    assert chosen(op=op) == config


def test_an_entry_for_these_sizes_serves_the_other_layout_rather_than_one_for_twice_the_features(own_file):
    tuned_files.merge(own_file, entry())
    far = gemm(**SIZES | {"in_features": 2 * SIZES["in_features"]}, w_layout="ekn")
    tuned_files.merge(own_file, entry(far, jgg.KernelConfigForward(band=3)))
    assert chosen(gemm(**SIZES, w_layout="ekn")) == UNUSUAL


def test_another_device_or_product_does_not(own_file):
    tuned_files.merge(own_file, entry())
    assert chosen() == UNUSUAL
    assert chosen(target=Target(90, 132, "NVIDIA H100 80GB HBM3")) == UNUSUAL  # the same multiprocessor
    assert chosen(target=Target(90, 132)) == UNUSUAL  # named for ahead-of-time lowering
    assert chosen(target=Target(100, 148)) != UNUSUAL
    assert chosen(op="dx") == heuristic_config(jgg.KernelConfigDX, PROBLEM, HOPPER)


def test_the_nearest_entry_is_used(own_file):
    for features, band in ((1024, 11), (1536, 12), (2560, 13)):
        tuned_files.merge(
            own_file, entry(gemm(**SIZES | {"in_features": features}), jgg.KernelConfigForward(band=band))
        )
    assert [chosen(gemm(**SIZES | {"in_features": k})).band for k in (1024, 1120, 1600, 2048, 4096)] == [
        11,
        11,
        12,
        13,
        13,
    ]


def test_an_entry_that_does_not_fit_is_passed_over(own_file):
    """Tiles of [128, 256] with four stages fit with a result of 16 bits alone: one of 32 takes 327,712 bytes."""
    wide = jgg.KernelConfigForward(block_n=256, band=3)
    tuned_files.merge(own_file, entry(config=wide))
    far = jgg.KernelConfigForward(band=5)
    tuned_files.merge(own_file, entry(gemm(**SIZES | {"in_features": 1024}), far))
    assert chosen() == wide
    float32 = dataclasses.replace(PROBLEM, out_dtype=jnp.dtype("float32"))
    assert chosen(float32) == far
    tuned_files.merge(own_file, entry(gemm(**SIZES | {"in_features": 1024}), wide))
    assert chosen(float32) == heuristic_config(jgg.KernelConfigForward, float32, HOPPER)
    given = tuned_configs.choose_config(jgg.KernelConfigForward, float32, HOPPER, wide)
    assert given == wide  # refused where it is compiled, and its memory known


def test_an_entry_for_a_tile_that_the_hopper_kernel_has_not_is_passed_over(own_file):
    tuned_files.merge(own_file, entry(config=dataclasses.replace(UNUSUAL, kernel="hopper", block_m=512)))
    assert chosen() == heuristic_config(jgg.KernelConfigForward, PROBLEM, HOPPER)


def test_an_entry_for_the_hopper_kernel_is_passed_over_where_that_cannot_run(own_file):
    weighted = gemm(**SIZES, weighted=True)
    tuned_files.merge(own_file, entry(weighted, hopper_config(jgg.KernelConfigDX, "enk")))
    far = gemm(**SIZES | {"in_features": 1024}, weighted=True)
    tuned_files.merge(own_file, entry(far, jgg.KernelConfigDX(band=3)))
    assert chosen(weighted, op="dx") == jgg.KernelConfigDX(band=3)


def test_the_own_file_comes_before_the_shipped_one(own_file):
    (shipped,) = tuned_files.shipped_files()
    tuned_files.merge(shipped, entry(config=jgg.KernelConfigForward(band=5)))
    assert chosen().band == 5
    tuned_files.merge(own_file, entry(gemm(**SIZES | {"in_features": 1024})))
    assert chosen() == UNUSUAL


def edited(part=None, **changes):
    """A file of one entry with changed fields: of its problem, of its config or its own."""
    content = entry().as_json()
    if part is None:
        content |= changes
    else:
        content[part] |= changes
    return json.dumps({"format": 1, "entries": [content]})


DAMAGED = {
    "empty": "",
    "no JSON": "{",
    "nested": "[" * 100_000,
    "a list": "[]",
    "other format": '{"format": 99, "entries": []}',
    "no entries": '{"format": 1}',
    "truncated": edited()[:-100],
    "bad config": edited("config", block_m=100),
    "unknown field": edited("config", warp=1),
    "a list for a config": edited(config=["block_m"]),
    "text for a switch": edited("config", use_tma_load_x="no"),
    "unknown kernel": edited("config", kernel="volta"),
    "text for the former switch": edited("config", warp_specialized="no"),
    "true for a number": edited("config", band=True),
    "large number": edited("config", band=2**30),
    "huge number": edited("problem", topk=10**400),
    "unknown op": edited(op="sideways"),
    "text for a size": edited("problem", num_rows="65536"),
    "fraction for a size": edited("problem", in_features=2048.0),
    "no rows": edited("problem", num_rows=0),
    "no expert": edited("problem", num_experts=-1),
    "unknown dtype": edited("problem", dtype="float8_e3m4"),
    "unknown layout": edited("problem", w_layout="nek"),
    "unknown precision": edited("problem", precision="BEST"),
    "no time": edited(milliseconds=0),
    "endless time": edited(milliseconds=float("inf")),
    "endless capability": edited(compute_capability=float("inf")),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_and_ignored_but_not_overwritten(own_file, content):
    own_file.parent.mkdir()
    own_file.write_text(content)
    with pytest.warns(UserWarning, match=r"tuned\.json is no file of tuned configurations"):
        assert chosen() == heuristic_config(jgg.KernelConfigForward, PROBLEM, HOPPER)
    with pytest.raises(ValueError, match=r"tuned\.json is no file"):
        tuned_files.merge(own_file, entry())
    assert own_file.read_text() == content


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_file_without_names_of_kernels_is_read(own_file, kernel):
    """Older files say whether the kernel was warp-specialized, where files now name the kernel."""
    measured = entry(config=jgg.KernelConfigForward(kernel=kernel))
    config = dict(measured.as_json()["config"], warp_specialized=kernel == "hopper")
    del config["kernel"]
    own_file.parent.mkdir()
    own_file.write_text(edited(config=config))
    assert tuned_files.parse(own_file) == (measured,)
    tuned_files.merge(own_file, entry(device="NVIDIA H100"))
    assert tuned_files.parse(own_file)[0] == measured
    assert "warp_specialized" not in own_file.read_text()


def test_a_file_that_does_not_say_what_is_quantized_is_read(own_file):
    """In older files the dtype alone says so."""
    measured = entry(gemm(**SIZES, dtype="fp8"), jgg.KernelConfigForward(block_k=128))
    content = measured.as_json()
    del content["problem"]["is_quantized"]
    own_file.parent.mkdir()
    own_file.write_text(json.dumps({"format": 1, "entries": [content]}))
    assert tuned_files.parse(own_file) == (measured,)
    assert measured.problem.is_quantized


def test_merge_replaces_only_the_same_product_on_the_same_device(own_file):
    others = [entry(config=jgg.KernelConfigDX()), entry(device="NVIDIA H100")]
    for each in (*others, entry(milliseconds=2.0)):
        tuned_files.merge(own_file, each)
    tuned_files.merge(own_file, entry(milliseconds=3.0), keep_faster=True)
    assert [each.milliseconds for each in tuned_files.parse(own_file)] == [1, 1, 2]
    tuned_files.merge(own_file, entry(milliseconds=1.5), keep_faster=True)
    assert [each.milliseconds for each in tuned_files.parse(own_file)] == [1, 1, 1.5]
    tuned_files.merge(own_file, entry(milliseconds=4.0))
    assert [each.milliseconds for each in tuned_files.parse(own_file)] == [1, 1, 4]


def test_a_cache_folder_is_used_where_no_file_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("JGG_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tuned_files.merge(tuned_files.user_file(), entry())
    assert chosen() == UNUSUAL


def launch_of_add_gated():
    launches = []

    def call(kernel, launch):
        launches.append(launch)
        return {key: jnp.zeros(out.shape, out.dtype) for key, out in launch.outputs.items()}

    y = jnp.ones((2, 4096))
    ADD_GATED.launch(Launcher(call, HOPPER), AddGated(y, y))
    return launches[0]


def test_a_file_may_replace_tiles_and_keeps_them(own_file):
    assert launch_of_add_gated().constants["BLOCK_COLUMNS"] == 1024
    tuned_files.merge(own_file, entry())
    tiles = {"90": {"add_gated_kernel": {"columns": 2048}}, "80": {"add_gated_kernel": {"columns": 512}}}
    own_file.write_text(json.dumps(json.loads(own_file.read_text()) | {"tiles": tiles}))
    assert launch_of_add_gated().constants["BLOCK_COLUMNS"] == 2048
    assert launch_of_add_gated().num_warps == 8
    tuned_files.merge(own_file, dataclasses.replace(entry(), milliseconds=0.001))
    assert tuned_files.read(own_file).tiles == tiles


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ({"add_kernel": {"columns": 512}}, "tiles must be of one of .*, got 'add_kernel'"),
        ({"add_gated_kernel": {"rows": 512}}, "must be among .*, got 'rows'"),
        ({"add_gated_kernel": {"columns": 768}}, "columns must be a power of two from 512 to 8192, got 768"),
        ({"add_gated_kernel": {"columns": 64}}, "from 512 to 8192, got 64"),
        ({"add_gated_kernel": {"columns": "1024"}}, "columns must be an int"),
        ({"attend_latents_kernel": {"stages": 9}}, "stages must be an int from 1 to 8, got 9"),
        ({"attend_one_kernel": {"warps_of_wide": 64}}, "a power of two from 1 to 32, got 64"),
        ([], "no file of tuned configurations"),
    ],
)
def test_wrong_tiles_are_refused(own_file, tiles, message):
    own_file.parent.mkdir(exist_ok=True)
    own_file.write_text(json.dumps({"format": 1, "entries": [], "tiles": {"90": tiles}}))
    with pytest.raises(ValueError, match=message):
        tuned_files.parse(own_file)


def test_tiles_may_be_as_the_table_says():
    for tiles in (TILES, *OF_GPU.values()):
        for kernel, of_kernel in tiles.items():
            assert of_kernel.keys() <= TILES[kernel].keys()
            check_tiles(kernel, of_kernel)
