"""Which dense products the kernels compute, and which XLA does: by a table of measurements.

`python -m benchmarks.dense --write` measures and writes the table, dense_products.json.
"""

import functools
import json
import math
from collections.abc import Iterable
from importlib import resources
from typing import NamedTuple

from jgg.core.gpu_target import Target
from jgg.core.problem import GroupedGemmProblem

_FILE = "dense_products.json"
_ROWS_OF_DECODING = 256  # so few are hardly trained with; where there is LoRA, XLA then has two products more to launch


class Measured(NamedTuple):
    """A dense layer with 16-bit operands that was measured both ways.

    Attributes:
      compute_capability: of the GPU, 10 * major + minor.
      rows, k, n: x is [rows, k], w [k, n].
      has_term: whether the layer has frozen weights with LoRA; None for either, in a forward pass alone.
      kernels, xla: microseconds.
    """

    compute_capability: int
    rows: int
    k: int
    n: int
    has_term: bool | None
    kernels: float
    xla: float

    def distance(self, problem: GroupedGemmProblem) -> float:
        """How far a problem is from this layer, in doublings of rows, K and N."""
        sizes = (problem.num_rows, self.rows), (problem.in_features, self.k), (problem.out_features, self.n)
        return sum(abs(math.log2(max(1, size) / own)) for size, own in sizes)


def is_faster_by_kernels(problem: GroupedGemmProblem, target: Target, has_term: bool) -> bool:
    """Whether kernels were faster for the nearest layer that was measured on such a GPU.

    XLA computes what has no measurement: other dtypes, other GPUs, symbolic sizes.
    """
    if problem.dtype.itemsize != 2 or problem.is_symbolic or not problem.rows_are_aligned:
        return False
    near = [
        entry
        for entry in _table()
        if entry.compute_capability == target.compute_capability and entry.has_term in (None, has_term)
    ]
    if has_term and problem.num_rows <= _ROWS_OF_DECODING:
        near = [entry for entry in near if entry.has_term is None] or near
    if not near:
        return False
    nearest = min(near, key=lambda entry: entry.distance(problem))
    return nearest.kernels < nearest.xla


@functools.cache
def _table() -> tuple[Measured, ...]:
    text = (resources.files("jgg.launching") / _FILE).read_text()
    return tuple(Measured(**entry) for entry in json.loads(text))


def as_text(entries: Iterable[Measured]) -> str:
    """The content of the file, a line for each entry."""
    return "[\n" + ",\n".join(json.dumps(entry._asdict()) for entry in entries) + "\n]\n"
