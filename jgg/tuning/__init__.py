"""Finds the fastest configurations: what is measured, the ways to compute it, the clock, the search."""

from jgg.launching import tuned_files
from jgg.launching.requirements import KERNEL_REQUIREMENTS
from jgg.launching.tuned_files import Entry

__all__ = ["KERNEL_REQUIREMENTS", "Entry", "tuned_files"]
