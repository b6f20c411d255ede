"""Configurations of the hopper kernel, and cases of several of its tiles."""

import dataclasses

from jgg.launching.heuristic import hopper_config
from jgg.launching.kernel_configs import CONFIG_TYPES
from tests.support.cases import EVERYTHING, Case

ARGUMENTS = {"forward": "kernel_config_fwd", "dx": "kernel_config_bwd_dx", "dw": "kernel_config_bwd_dw"}


def specialized_configs(w_layout, columns=256, dw_step=64, **options):
    for op, name in ARGUMENTS.items():
        config = hopper_config(CONFIG_TYPES[op], w_layout, columns, dw_step if op == "dw" and columns == 256 else 64)
        yield name, dataclasses.replace(config, **options)


# several tiles of 256 and 128 rows, whole and in part, and steps past the end of a short reduced axis
LARGE = {"group_sizes": (300, 0, 1, 64, 129, 257, 512, 65), "in_features": 520, "out_features": 392}
LARGE_CASES = [
    Case("large", **LARGE),
    Case("large-ekn", w_layout="ekn", **LARGE),
    Case("large-tail", num_rows=1700, poison="tail", **LARGE),
    Case("large-everything", num_rows=1400, poison="tail", **EVERYTHING, **LARGE),
    Case("large-everything-ekn", w_layout="ekn", num_rows=1400, **EVERYTHING, **LARGE),
    Case("large-scattered", permute_y=True, gather="random", weighted=True, **LARGE),
    Case("large-gathered", permute_x=True, topk=4, gather="random", **LARGE),
    Case("large-gathered-ekn", permute_x=True, topk=2, gather="random", w_layout="ekn", num_rows=1400, **LARGE),
    Case("large-gathered-dy", permute_y=True, gather="random", **LARGE),
    Case("large-gathered-dy-ekn", permute_y=True, gather="random", w_layout="ekn", poison="rows", **LARGE),
    Case("large-biased", biased=True, **LARGE),
    Case("large-short-steps", (300, 0, 700, 24), None, 72, 136, poison=""),
    Case("large-short-steps-ekn", (300, 0, 700, 24), None, 136, 72, w_layout="ekn"),
    Case("large-poisoned", (300, 2, 700, 24, 100), None, 264, 520, poison="rows"),
    Case("large-in-float32", out_dtype="float32", **LARGE),
    Case("large-in-float32-ekn", w_layout="ekn", num_rows=1400, poison="tail", out_dtype="float32", **LARGE),
    Case("large-in-float32-everything", num_rows=1400, out_dtype="float32", **EVERYTHING, **LARGE),
    Case("large-in-float32-gathered", permute_x=True, topk=2, gather="random", out_dtype="float32", **LARGE),
    Case("large-in-float32-gathered-dy", permute_y=True, gather="random", out_dtype="float32", **LARGE),
]


def columns_of(case):
    """The number of columns of the widest tiles that the kernel has for a case's output dtype."""
    return 128 if case.out_dtype == "float32" else 256
