"""What integrations share: they replace functions of a framework, and log which kernels compute its experts."""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jgg import KernelConfigForward
from jgg.core.files import warn_once
from jgg.core.gpu_target import known_target
from jgg.core.problem import GroupedGemmProblem
from jgg.core.problem_checks import check_problem
from jgg.experts.sharding import MoESharding
from jgg.extend import is_plain_jax
from jgg.launching.tuned_configs import choose_config

_logger = logging.getLogger("jgg")


@dataclasses.dataclass(frozen=True)
class Framework:
    """A framework whose functions jgg replaces.

    Attributes:
      name: its usual spelling.
      distribution: what pip installs.
      tested: the versions that jgg was tested with.
    """

    name: str
    distribution: str
    tested: tuple[str, ...]

    def replace(self, module: str, path: str, replacement: Callable[..., Any]) -> None:
        """Replaces a function with `replacement`; raises ImportError like `find`, or if their parameters differ.

        Args:
          module: such as "maxtext.layers.moe".
          path: the function's name in the module, such as "RoutedMoE.sparse_matmul".
        """
        owner, name = self.find(module, path)
        theirs, ours = (inspect.signature(function).parameters for function in (getattr(owner, name), replacement))
        takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours.values())
        if list(theirs) != list(ours) and not takes_more:
            raise ImportError(
                f"jgg replaces {module}.{path}, which must have the parameters ({', '.join(ours)}), "
                f"got ({', '.join(theirs)}) in {self._versions}"
            )
        setattr(owner, name, replacement)

    def find(self, module: str, path: str) -> tuple[Any, str]:
        """The module or class that has the function, and the function's name there.

        Logs a warning if jgg was not tested with the installed version. Raises ImportError if the framework cannot be
        imported, or has no such function.
        """
        try:
            owner: Any = importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"{module} cannot be imported: {error}. docs/integrations.md says what to install for {self.name}."
            ) from error
        *classes, name = path.split(".")
        for attribute in classes:
            owner = getattr(owner, attribute, None)
        if not hasattr(owner, name):
            raise ImportError(f"jgg needs {module}.{path}, which is not in {self._versions}")
        if self._installed not in self.tested:
            warn_once(f"jgg was not tested with {self._versions}")
        return owner, name

    @property
    def _installed(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return "of an unknown version"

    @property
    def _versions(self) -> str:
        return f"{self.name} {self._installed}. Versions known to work: {', '.join(self.tested)}."


def log_experts(
    name: str, x: jax.Array, w_gate_up: jax.Array, dtype: DTypeLike, topk: int, sharding: MoESharding | None = None
) -> None:
    """Logs once for these sizes that jgg computes a framework's experts, and which kernels it uses.

    Args:
      name: the framework's.
      x: [T, H], the tokens of all devices.
      w_gate_up: [E, H, 2 * I], the experts of all devices.
      dtype: the dtype that experts are computed in.
      sharding: how both are split over devices.
    """
    (tokens, features), (experts, _, hidden) = x.shape, w_gate_up.shape
    if sharding is not None:
        tokens //= sharding.size(*sharding.token_axes)
        experts //= sharding.size(sharding.expert)
        hidden //= sharding.size(sharding.tensor)
    problem = check_problem(
        x=jax.ShapeDtypeStruct((tokens, features), dtype),
        w=jax.ShapeDtypeStruct((experts, features, hidden), dtype),
        group_sizes=jax.ShapeDtypeStruct((experts,), jnp.int32),
        gather_indices=jax.ShapeDtypeStruct((tokens * topk,), jnp.int32),
        topk=topk,
        permute_x=True,
        w_layout="ekn",
    )
    _log_once(
        f"jgg computes the experts of {name} by {_kernels_of(problem)}. On each device: x {[tokens, features]} and "
        f"w_gate_up {[experts, features, hidden]} in {jnp.dtype(dtype)}, {topk} experts for each token."
    )


def log_grouped_gemm(name: str, lhs: jax.Array, rhs: jax.Array) -> None:
    """Logs once for these sizes that jgg multiplies rows by their experts' matrices, and which kernels it uses.

    Args:
      name: the framework's.
      lhs: [m, k], rows of this device.
      rhs: [g, k, n], experts of this device.
    """
    problem = check_problem(
        x=lhs,
        w=jax.ShapeDtypeStruct(rhs.shape, lhs.dtype),
        w_layout="ekn",
        group_sizes=jax.ShapeDtypeStruct(rhs.shape[:1], jnp.int32),
    )
    _log_once(
        f"jgg computes the grouped GEMMs of {name} by {_kernels_of(problem)}. On each device: "
        f"rows {list(lhs.shape)} and experts {list(rhs.shape)} in {lhs.dtype}."
    )


def _kernels_of(problem: GroupedGemmProblem) -> str:
    """Names the kernels that compute a product on the GPU at hand, or on the one that `jgg.target` names."""
    target = known_target()
    if target is None or is_plain_jax(None) or problem.is_empty or problem.is_symbolic:
        return "plain JAX"
    kernel = choose_config(KernelConfigForward, problem, target).kernel
    return "plain Triton kernels" if kernel == "plain" else f"{kernel.capitalize()} kernels"


@functools.cache
def _log_once(message: str) -> None:
    """Logs a note, unless this process already did."""
    _logger.info(message)
