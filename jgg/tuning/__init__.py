"""Finds the fastest configurations: workloads, ways to compute them, timing and the search."""

from jgg.launching import tuned_files
from jgg.launching.requirements import KERNEL_REQUIREMENTS
from jgg.launching.tuned_files import Entry

__all__ = ["KERNEL_REQUIREMENTS", "Entry", "tuned_files"]
