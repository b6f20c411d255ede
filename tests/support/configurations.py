"""All configurations of the forward product that a GPU could get: the heuristic's, tuned ones, and what is tried."""

import dataclasses

from jgg.launching import tuned_files
from jgg.launching.kernel_configs import KernelConfigForward
from jgg.launching.requirements import can_run
from jgg.tuning.search import first_candidates, second_candidates

ROWS = (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 1024, 8192)  # of a group


def all_configs(problem, target):
    """Configurations that differ in the tile or the kernel, whichever number of rows they were chosen for."""
    configs = {}
    for rows in ROWS:
        of_rows = dataclasses.replace(problem, num_rows=rows * problem.num_experts * problem.topk)
        chosen = first_candidates("forward", of_rows, target)
        chosen += second_candidates("forward", of_rows, chosen[0])
        for config in chosen:
            configs[_kind(config)] = config
    for path in tuned_files.shipped_files():
        for entry in tuned_files.parse(path):
            if isinstance(entry.config, KernelConfigForward) and entry.problem.dtype.itemsize == problem.dtype.itemsize:
                configs.setdefault(_kind(entry.config), entry.config)
    return [config for config in configs.values() if can_run(problem, target, config)]


def _kind(config):
    """What of a configuration could decide the order in which a product is added up."""
    tile = config.block_m, config.block_n, config.block_k, config.kernel
    return tile if config.kernel == "hopper" else (*tile, config.num_warps)
