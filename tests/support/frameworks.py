"""Marks of tests that need a framework which the development environment does not have, and tasks of lm-eval."""

import importlib.util
import json

import pytest


def framework(*names):
    """Skips where one of these packages is not installed; their warnings are theirs."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed; docs/development.md says how to run these tests"
    return [pytest.mark.skipif(bool(missing), reason=reason), pytest.mark.filterwarnings("default")]


def write_task(folder, name, data, **settings):
    """Writes a task of lm-eval into a folder, whose documents are the lines of JSON in the file `data`."""
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **settings}))  # which is YAML too
