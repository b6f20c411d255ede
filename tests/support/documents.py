"""The Python of documents, which tests run."""

import re

from tests.support.processes import ROOT


def code_of(document, section):
    """The Python blocks of a section, each as one text.

    Args:
      document: its file in docs.
      section: its heading.
    """
    text = (ROOT / "docs" / document).read_text()
    (body,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```", body, re.DOTALL | re.MULTILINE)


def run_code(code):
    """Runs a block; its names by name."""
    names = {"__name__": "document"}
    exec(compile(code, "document", "exec"), names)
    return names
