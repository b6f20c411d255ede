"""The most memory that a device had in use."""

import jax


def peak_bytes() -> int | None:
    """The most bytes that this process's first device ever had in use; None where that is not known."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def peak_gib() -> float | None:
    """The same in GiB."""
    peak = peak_bytes()
    return None if peak is None else peak / 2**30
