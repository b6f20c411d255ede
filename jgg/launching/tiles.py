"""The tiles of kernels that are no grouped GEMM: one table, whose entries a tuned file may replace.

GEMMs have configurations (`kernel_configs`), and the router's logits choose among several tiles (`products.logits`).
What the results of two kernels must share, such as the keys that a softmax takes at once, is no tile.
"""

from collections.abc import Mapping

from jgg.core.arguments import as_int, check

# By kernel; kernels of the same form have one entry. Names of one word are numbers of what a program holds at once, of
# its warps or of its pipeline's stages; "columns_of_warp" and the like are as many as one warp is worth.
TILES: dict[str, dict[str, int]] = {
    "activate_kernel": {"elements": 1024, "columns": 512},  # also backward, and in FP8
    "add_gated_kernel": {"columns": 1024, "columns_of_warp": 256},
    "add_parts_kernel": {"unroll": 8},  # parts that are loaded side by side
    # by features of a head: as many queries as registers hold; more spill
    "attend_kernel": {
        "queries": 64,
        "wide": 128,
        "queries_of_wide": 32,
        "queries_of_widest": 16,
        "warps": 8,
        "programs_by_tma": 1,  # that share a multiprocessor, and those warps
        "stages": 3,
    },
    # also attend_latents_one_kernel, whose rows are heads; more rows or keys spill registers
    "attend_latents_kernel": {"rows": 32, "keys": 32, "warps": 8, "stages": 2},
    "attend_one_kernel": {"warps": 4, "warps_of_wide": 8, "stages": 3},
    "chunk_matrices_kernel": {"warps": 4},
    # a thread makes about eight loads of 16 bytes at once, whatever topk is
    "combine_kernel": {"loads": 16, "columns": 512, "columns_of_one": 256},
    "delta_rule_kernel": {"columns": 64, "warps": 8, "stages": 2},  # also backward
    "delta_rule_gradients_kernel": {"columns": 64, "warps": 8, "stages": 1},
    "delta_rule_in_order_kernel": {"elements": 1024, "stages": 3},
    "delta_rule_one_kernel": {"elements": 4096},
    "group_sums_kernel": {"rows": 64, "columns": 128},
    "losses_kernel": {"columns": 2**14, "columns_of_warp": 512},  # with fewer columns, few rows take longer
    "norm_kernel": {"columns_of_warp": 512, "columns_of_few_warps": 256},
    "norm_backward_kernel": {"programs": 512, "rows": 16, "columns_of_warp": 256},
    "place_rows_kernel": {"rows": 64, "programs": 512},  # also count_experts_kernel, whose counts one program adds up
    # of_many: of more than 64 rows, which take longer to multiply than to read
    "project_few_kernel": {
        "columns": 32,
        "stages": 4,
        "rows_of_many": 128,
        "step_of_many": 64,
        "warps_of_many": 8,
        "stages_of_many": 4,
    },
    "quantize_rows_kernel": {"elements": 2048, "columns": 1024},
    "quantize_weights_kernel": {"warps": 8},
    "rotary_kernel": {"pairs": 1024},  # also backward: a thread has eight of each array
    "route_few_kernel": {"scores_of_warp": 512, "warps": 16},
    "score_kernel": {"experts_of_warp": 256},
    "sort_few_kernel": {"step": 32},
    "sum_counts_kernel": {"experts": 16, "warps": 8},
    "top_k_kernel": {"elements": 2048},
    "unpack_kernel": {"rows": 16, "columns": 256, "rows_of_pairs": 32, "columns_of_pairs": 128},
    "weigh_kernel": {"warps": 1},
}
_OF_MUCH_SHARED_MEMORY = {"delta_rule_kernel": {"warps": 4, "stages": 3}}
_ON_HOPPER = {"attend_kernel": {"wide": 256, "queries_of_widest": 32, "programs_by_tma": 2}}
# by compute capability, where they differ
OF_GPU: dict[int, dict[str, dict[str, int]]] = {
    90: _ON_HOPPER | _OF_MUCH_SHARED_MEMORY,
    **dict.fromkeys((100, 103, 110), _OF_MUCH_SHARED_MEMORY),
}
_RANGES = {"warps": (1, 32), "stages": (1, 8), "programs_by_tma": (1, 2)}


def check_tiles(kernel: str, tiles: Mapping[str, object]) -> None:
    """Raises ValueError or TypeError if a kernel cannot have these tiles in place of the table's."""
    check(kernel in TILES, f"tiles must be of one of {[*TILES]}, got {kernel!r}.")
    for name, value in tiles.items():
        check(name in TILES[kernel], f"tiles of {kernel} must be among {[*TILES[kernel]]}, got {name!r}.")
        given, what = TILES[kernel][name], f"tiles of {kernel}: {name}"
        # products need 16 rows and columns, and blocks of FP8 scales 128 columns, which half of a tile still has
        least, most = _RANGES.get(name.removesuffix("_of_wide"), (min(given, max(16, given // 2)), 8 * given))
        size = as_int(what, value)
        is_right = least <= size <= most and (name == "stages" or size & (size - 1) == 0)
        expected = "an int" if name == "stages" else "a power of two"
        check(is_right, f"{what} must be {expected} from {least} to {most}, got {value}.")
