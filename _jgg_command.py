"""The command `jgg` under its earlier name, for programs that import `main` from here; new ones take `jgg.cli`."""

from jgg.cli import main

__all__ = ["main"]
