"""The memory that a compiled program needs of each device, as XLA plans it before the program runs."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a program needs on a device.

    Attributes:
      arguments: of its arguments.
      results: of its results, except those written over arguments.
      temporaries: of what is there only while it runs.
      on_host: of what it keeps in the host's memory while it runs, which is in none of the others.
      peak_in_use: the most bytes that the device ever had in use, other arrays included; None unless a run of the
        program made it larger.
    """

    arguments: int
    results: int
    temporaries: int
    on_host: int = 0
    peak_in_use: int | None = None

    @property
    def total(self) -> int:
        """Bytes that must be allocated at the same time."""
        return self.arguments + self.results + self.temporaries


def planned_memory(compiled: jax.stages.Compiled) -> Memory:
    """The memory that a compiled program plans.

    Raises: RuntimeError: XLA cannot say.
    """
    stats: Any = compiled.memory_analysis()
    if stats is None:
        raise RuntimeError("XLA must say what memory the program takes, got nothing.")
    return Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes - stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        on_host=stats.host_temp_size_in_bytes,
    )
