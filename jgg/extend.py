"""Building blocks for operations that run as kernels or as plain JAX, for `jgg.models` and for your own models.

An `Operation` takes a NamedTuple of operands. Its `plain` function or kernels run by a `Launcher` compute it.
"""

from jgg.launching.choice import How, Launcher, check_implementation, is_plain_jax
from jgg.launching.kernel_configs import power_of_2
from jgg.launching.launch import Launch, matrices
from jgg.launching.tuned_configs import tiles_of
from jgg.primitives import vmap
from jgg.primitives.barrier import barrier
from jgg.primitives.operation import Operation, array_type
from jgg.primitives.partitioning import WHOLE, Letters

__all__ = [
    "WHOLE",
    "How",
    "Launch",
    "Launcher",
    "Letters",
    "Operation",
    "array_type",
    "barrier",
    "check_implementation",
    "is_plain_jax",
    "matrices",
    "power_of_2",
    "tiles_of",
    "vmap",
]
