"""Marks of tests that need a framework which the development environment does not have."""

import importlib.util

import pytest


def framework(*names):
    """Skips where one of these packages is not installed; their warnings are theirs."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed; docs/development.md says how to run these tests"
    return [pytest.mark.skipif(bool(missing), reason=reason), pytest.mark.filterwarnings("default")]
