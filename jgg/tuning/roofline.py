"""The roofline: the least time that a computation can take on a device. Every benchmark compares its times with it.

    least time = max(bytes / speed of a copy, FLOPs / speed of a dense product)

Bytes are weights that are read, rows that are read and results that are written, each once and in its dtype; for a
product, `GroupedGemmProblem.bytes_accessed` counts them. Both speeds are measured in the run whose times are compared:
the copy's in bytes read and written, the dense product's for the same FLOPs in the same dtype. A computation in
several passes over memory, such as a layer, takes at least the sum of the least times of its passes; a pass that
multiplies nothing, such as a cast, takes at least the time of its bytes.

Arrays that stay in a cache, as small ones do on a CPU, can be read faster than that.
"""

import jax
import jax.numpy as jnp

from jgg.tuning.timing import measure


def least_seconds(num_bytes: float, copy_speed: float | None, dense_seconds: float | None = 0.0) -> float | None:
    """The least time of one pass over memory in seconds: max(bytes / copy_speed, FLOPs / dense speed).

    Args:
      num_bytes: bytes that the pass must read and write.
      copy_speed: bytes a second, read and written, of a copy; None if it was not measured.
      dense_seconds: FLOPs / dense speed, the time of a dense product of as many FLOPs and the same dtype; 0 for a pass
        that multiplies nothing, None if it was not measured.

    Returns: seconds, or None if a speed is missing.
    """
    if not copy_speed or dense_seconds is None:
        return None
    return max(num_bytes / copy_speed, dense_seconds)


def percent_of_roofline(least: float | None, seconds: float | None) -> float | None:
    """The least time in percent of a measured time; None if one of them is missing."""
    return 100 * least / seconds if least and seconds else None


def copy_bandwidth() -> float:
    """Measures a plain copy on the device; returns bytes a second, read and written."""
    array = jnp.zeros(2**28 if jax.default_backend() == "gpu" else 2**23, jnp.int32)
    arrays = {"array": array, "group_sizes": jnp.zeros(1, jnp.int32)}
    num_bytes = 2 * array.nbytes
    timed = measure(lambda arrays: arrays["array"] ^ arrays["group_sizes"][0], arrays, 0, num_bytes)
    return num_bytes / timed.seconds
