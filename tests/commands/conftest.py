"""What tests of several files of this folder start from."""

import pytest

from jgg.launching import tuned_files


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """The user's file is one that does not exist yet, and none comes with jgg."""
    path = tmp_path / "own" / "tuned.json"
    monkeypatch.setenv("JGG_TUNED", str(path))
    monkeypatch.setattr(tuned_files, "shipped_files", lambda: [tmp_path / "shipped.json"])
    return path
