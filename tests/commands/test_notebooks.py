"""Runs the notebooks; their own assertions are the test."""

import pytest

from tests.support.processes import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# the client asks for an event loop in a way that newer Pythons warn of
@pytest.mark.filterwarnings("default")
def test_notebook(path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": path.parent}}).execute()
