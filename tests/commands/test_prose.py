"""Texts have none of the phrases that read as translated, and pages are no longer than `tools.prose` allows."""

from tools import prose


def test_texts_have_no_such_phrase_and_pages_are_short():
    assert list(prose.complaints()) == []


def test_phrases_are_found_across_lines_in_what_readers_see(monkeypatch):
    code = '''"""Mends it."""
def f():
    """Is in the
    place of g."""
    x = "beside"
def _g():
    """Beside f."""
'''
    monkeypatch.setitem(prose.KINDS, "docstrings", lambda: [("f.py:", prose._docstrings_in(code))])
    assert prose.found("docstrings") == {"mend": ["f.py:1"], "in the place of": ["f.py:3"]}
    assert all(list(read()) for read in prose.KINDS.values())


def test_long_pages_are_found(monkeypatch):
    monkeypatch.setattr(prose, "MOST_WORDS", 10)
    assert [line.split(":")[0] for line in prose.complaints()] == ["docs/*.md"]
