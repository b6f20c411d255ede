"""A grouped GEMM and how to compute it, as the static argument of functions that are differentiated."""

import dataclasses
from typing import NamedTuple

import jax

from jgg.backends.choice import How
from jgg.gpu_target import Target
from jgg.problem import GroupedGemmProblem
from jgg.products.product import Product


@dataclasses.dataclass(frozen=True)
class Operation:
    """A grouped GEMM and how to compute it.

    Attributes:
      implementation: one of `choice.NAMES` or None; "xla" for a problem of symbolic shapes.
      target: the GPU that "triton" is for.
      configs: of its products' kernels; for others one is chosen.
    """

    problem: GroupedGemmProblem
    implementation: str | None
    target: Target
    configs: tuple = ()

    def __post_init__(self):
        if not self.problem.is_symbolic:
            return
        if self.implementation not in (None, "xla"):
            raise ValueError(
                "implementation must be None or 'xla' for symbolic shapes, since kernels are chosen by sizes, "
                f"got {self.implementation!r}."
            )
        object.__setattr__(self, "implementation", "xla")

    @property
    def how(self) -> How:
        """Of products that have no configuration."""
        return How(self.implementation, self.target)

    def run(self, product: Product, operands: NamedTuple) -> list[jax.Array]:
        """The results of one of the problem's products."""
        config = next((c for c in self.configs if type(c) is product.config_type), None)
        return product(self.how._replace(config=config), operands, problem=self.problem)
