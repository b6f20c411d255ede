"""The version of jgg, and the versions of Triton and jax-triton that it works with, found without importing them."""

import functools
import importlib.metadata
import re
from collections.abc import Mapping

__version__ = "0.4.0.dev0"  # of jgg; between releases, the next release's with .dev0
REQUIREMENTS = {  # as in pyproject.toml; a checkout that is not installed has no metadata to read
    "jax": ">=0.11.1,<0.13",
    "jax-triton": ">=0.4.1,<0.5",
    "triton": ">=3.7.1",
}
# FIXED: the beginnings of the versions that launching/jax_triton_fixes.py is for. WARP_SPECIALIZED: the beginnings of
# the versions that compile kernels/hopper.py. Its language, Gluon, changes between releases of Triton, and before 3.9
# it cannot arrive at another multiprocessor's barrier.
FIXED = {"triton": ("3.7.", "3.8.", "3.9."), "jax-triton": ("0.4.1",)}
WARP_SPECIALIZED = {"triton": ("3.9.",), "jax-triton": ("0.4.1",)}


@functools.cache
def installed(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def unlike(wanted: Mapping[str, tuple[str, ...]], versions: Mapping[str, str | None] | None = None) -> str | None:
    """A sentence about the first package whose version is not a wanted one, or None.

    Args:
      wanted: beginnings of versions by package, such as FIXED.
      versions: versions by package; by default the installed ones.
    """
    for package, beginnings in wanted.items():
        version = installed(package) if versions is None else versions[package]
        if version is None:
            return f"{package} is not installed"
        if not version.startswith(beginnings):
            tested = ", ".join(beginning.rstrip(".") for beginning in beginnings)
            return f"{package} {version} was not tested with them, only {tested}"
    return None


def check_kernels_can_run() -> None:
    """Raises ImportError if Triton or jax-triton is too old for any kernel; the message says what to install."""
    for package in ("triton", "jax-triton"):
        version, at_least = installed(package), REQUIREMENTS[package].partition(",")[0]
        if version is not None and numbers(version) < numbers(at_least):
            brings = " (PyTorch 2.12 and later bring one)" if package == "triton" else ""
            raise ImportError(
                f"The kernels need {package}{at_least}{brings}, got {version}: "
                f"pip install '{package}{REQUIREMENTS[package]}', or use implementation='xla'."
            )


def satisfies(version: str, specifier: str) -> bool:
    """Whether a version is in a range such as ">=0.4.1,<0.5"."""
    at_least, _, below = specifier.partition(",")
    return numbers(at_least) <= numbers(version) and (not below or numbers(version) < numbers(below))


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 11, 2) for "0.11.2.dev3"."""
    found = re.search(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
