"""Texts have no more of the phrases that read as translated than `tools.prose` allows."""

from tools import prose


def test_texts_have_no_phrase_more_often_than_allowed():
    """If not: python -m tools.prose says where."""
    assert not list(prose.too_many())


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
