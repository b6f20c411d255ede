"""Launches the kernels of a symmetric product: the one of every GPU and the warp-specialized one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.triangle import lower_tiles
from jgg.launching.choice import Launcher
from jgg.launching.heuristic import hopper_config, plain_config
from jgg.launching.kernel_configs import KernelConfigForward, Tile
from jgg.launching.launch import PRECISIONS, Launch, launch_options, matrices
from jgg.launching.requirements import can_run
from jgg.products.launches.clusters import TILE_ROWS, cluster_options

_MOST_COLUMNS = 128
_HOPPER_TILE = Tile(256, 256, 64)


@dataclasses.dataclass(frozen=True)
class SymmetricProduct:
    """terms[0] * left @ right^T + terms[1] * add + terms[2] * I.

    Attributes:
      problem: the product left @ right^T, as the forward product of groups of N rows.
      left, right: [G, N, K].
      add: [G, N, N] or None.
      terms: float32 [3].
    """

    problem: GroupedGemmProblem
    left: jax.Array
    right: jax.Array
    add: jax.Array | None
    terms: jax.Array


def multiply(launcher: Launcher, product: SymmetricProduct, config: KernelConfigForward | None) -> jax.Array:
    """Computes the result, [G, N, N]."""
    config = _chosen_config(product, launcher.target, config)
    return (_multiply_in_clusters if config.kernel == "hopper" else _multiply_on_every_gpu)(launcher, product, config)


def _chosen_config(
    product: SymmetricProduct, target: Target, config: KernelConfigForward | None
) -> KernelConfigForward:
    """The configuration that is asked for, if its kernel can compute a product, or the default one.

    By default the warp-specialized kernel multiplies matrices of more rows than its tile has.
    """
    problem, hopper = product.problem, hopper_config(KernelConfigForward, product.problem.w_layout)
    assert isinstance(hopper, KernelConfigForward)
    if config is None and problem.out_features > _HOPPER_TILE.rows:
        config = hopper
    if config is None or (config.kernel == "hopper" and not _hopper_can_run(product, target, config)):
        config = symmetric_config(problem, target)
    return config


def symmetric_config(problem: GroupedGemmProblem, target: Target) -> KernelConfigForward:
    """The default configuration of the plain kernel, derived from a forward product's; none spills registers."""
    config = plain_config(KernelConfigForward, problem, target)
    assert isinstance(config, KernelConfigForward)
    tile = config.tile(problem.w_layout)
    # a tile is stored twice: while one program stores, the other multiplies; later GPUs lack registers for two
    has_two_programs = tile.columns > _MOST_COLUMNS and target.compute_capability < 100
    # wider tiles than high have more elements above the diagonal
    columns = min(tile.rows, tile.columns, _MOST_COLUMNS // (2 if problem.out_dtype.itemsize == 4 else 1))
    config = config.with_tile(tile._replace(columns=columns), problem.w_layout)
    if has_two_programs:
        return dataclasses.replace(config, num_warps=4, num_stages=3, programs_per_sm=2)
    is_tf32 = problem.dtype.itemsize == 4 and problem.precision == jax.lax.Precision.DEFAULT
    return dataclasses.replace(config, num_warps=4) if is_tf32 and target.compute_capability >= 100 else config


def _multiply_on_every_gpu(launcher: Launcher, product: SymmetricProduct, config: KernelConfigForward) -> jax.Array:
    from jgg.kernels.symmetric import symmetric_kernel

    problem, target = product.problem, launcher.target
    rows, columns, step = config.tile(problem.w_layout)
    row_bytes = problem.in_features * problem.dtype.itemsize
    by_tma = {
        "left": config.use_tma_load_x and target.has_tma and row_bytes % 16 == 0,
        "right": config.use_tma_load_w and target.has_tma and row_bytes % 16 == 0,
    }
    descriptors = {
        "left": matrices(product.left.shape, (rows, step)),
        "right": matrices(product.right.shape, (columns, step)),
    }
    tiles = _tiles(problem, config)
    launch = Launch(
        operands=_operands(product, tiles),
        descriptors={name: descriptors[name] for name, is_loaded in by_tma.items() if is_loaded},
        outputs={"y": _result(problem)},
        constants={
            "SIZE": problem.out_features,
            "REDUCED": problem.in_features,
            "PRECISION": PRECISIONS[problem.precision],
            "TMA_LEFT": by_tma["left"],
            "TMA_RIGHT": by_tma["right"],
            "BLOCK_ROWS": rows,
            "BLOCK_COLUMNS": columns,
            "BLOCK_REDUCED": step,
        },
        **launch_options(target, problem, config, problem.num_experts * len(tiles["row_tiles"]))
        | _flops(problem, config, tiles),
    )
    return launcher.run(symmetric_kernel, launch)["y"]


def _hopper_can_run(product: SymmetricProduct, target: Target, config: KernelConfigForward) -> bool:
    """Whether the warp-specialized kernel can compute a product; it stores 16 bits and adds what has left's dtype."""
    problem, add = product.problem, product.add
    has_dtypes = problem.out_dtype.itemsize == 2 and (add is None or add.dtype == problem.dtype)
    return has_dtypes and config.tile(problem.w_layout) == _HOPPER_TILE and can_run(problem, target, config)


def _multiply_in_clusters(launcher: Launcher, product: SymmetricProduct, config: KernelConfigForward) -> jax.Array:
    from jgg.kernels.hopper_symmetric import hopper_symmetric_kernel

    problem, (_, columns, step) = product.problem, _HOPPER_TILE
    tiles = _tiles(problem, config)
    rows_of_cluster = {
        name: dataclasses.replace(matrices(array.shape, (TILE_ROWS, step)), cta_axis=1)
        for name, array in {"left": product.left, "add": product.add, "y": _result(problem)}.items()
        if array is not None
    }
    launch = Launch(
        operands=_operands(product, tiles),
        descriptors={**rows_of_cluster, "right": matrices(product.right.shape, (columns, step))},
        outputs={"y": _result(problem)},
        constants={
            "SIZE": problem.out_features,
            "REDUCED": problem.in_features,
            "BLOCK_REDUCED": step,
            "BLOCK_COLUMNS": columns,
            "STAGES": config.num_stages,
        },
        **cluster_options(launcher.target, problem, problem.num_experts * len(tiles["row_tiles"]))
        | _flops(problem, config, tiles),
    )
    return launcher.run(hopper_symmetric_kernel, launch)["y"]


def _tiles(problem: GroupedGemmProblem, config: KernelConfigForward) -> dict[str, jax.Array]:
    """The tiles of each matrix, in the order in which they are computed."""
    tile = config.tile(problem.w_layout)
    row_tiles, column_tiles = lower_tiles(problem.out_features, tile.rows, tile.columns, config.band)
    return {"row_tiles": jnp.asarray(row_tiles), "column_tiles": jnp.asarray(column_tiles)}


def _flops(problem: GroupedGemmProblem, config: KernelConfigForward, tiles: dict[str, jax.Array]) -> dict[str, Any]:
    """The floating-point operations of the tiles that are computed, as a field of a `Launch`."""
    rows, columns, _ = config.tile(problem.w_layout)
    elements = problem.num_experts * len(tiles["row_tiles"]) * rows * columns
    return {"flops": 2 * elements * problem.in_features}


def _operands(product: SymmetricProduct, tiles: dict[str, jax.Array]) -> dict[str, jax.Array | int | None]:
    """What both kernels take."""
    return {
        "left": product.left,
        "right": product.right,
        "add": product.add,
        "terms": product.terms,
        **tiles,
        "num_groups": product.problem.num_experts,
        "num_tiles": len(tiles["row_tiles"]),
    }


def _result(problem: GroupedGemmProblem) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((problem.num_experts, problem.out_features, problem.out_features), problem.out_dtype)
