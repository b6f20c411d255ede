"""Finds phrases that make jgg's texts read as translated, and counts the words of its docs.

    python -m tools.prose

It reads README and docs (without the reference and the changelog), the docstrings of public names, every `--help` and
the notebooks, prints file:line of each of PHRASES, and exits with 1 if there is one or if the docs have more than
MOST_WORDS.
"""

import ast
import collections
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from jgg.cli.parsing import make_parser

ROOT = Path(__file__).parent.parent
PHRASES = (
    "in the place of", "of which", "by which", "is concerned", "anew", "mend", "as it is", "as they are", "so many",
    "those that are", "those who", "that of", "beside",
)  # fmt: skip
MOST_WORDS = 24_000  # of docs/*.md without the changelog
Text = tuple[str, str]  # where it stands, with what comes before a number of a line, and what it says


def pages() -> Iterator[Text]:
    """README and the pages of the site."""
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
        yield f"{path.relative_to(ROOT)}:", path.read_text()


def docstrings() -> Iterator[Text]:
    """The docstrings of modules, and of the classes, functions and methods in them, whose names have no underscore."""
    for path in sorted(ROOT.glob("jgg/**/*.py")):
        if all(part == "__init__.py" or not part.startswith("_") for part in path.relative_to(ROOT).parts):
            yield f"{path.relative_to(ROOT)}:", _docstrings_in(path.read_text())


def _docstrings_in(code: str) -> str:
    """The lines of a module that are docstrings of public names; other lines are empty, so that numbers stay."""
    lines, kept, owners = code.splitlines(), collections.defaultdict(str), [ast.parse(code)]
    for owner in owners:
        if ast.get_docstring(owner):
            text = owner.body[0]
            kept |= {number: lines[number - 1] for number in range(text.lineno, text.end_lineno + 1)}
        members = [] if isinstance(owner, ast.FunctionDef) else owner.body
        owners += [
            each for each in members
            if isinstance(each, ast.ClassDef | ast.FunctionDef) and (each.name[0] != "_" or each.name == "__call__")
        ]  # fmt: skip
    return "\n".join(kept[number] for number in range(1, len(lines) + 1))


def helps() -> Iterator[Text]:
    """What `jgg --help` and `jgg COMMAND --help` print."""
    parser = make_parser()
    yield "jgg --help:", parser.format_help()
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    for name, command in commands.items():
        yield f"jgg {name} --help:", command.format_help()


def notebooks() -> Iterator[Text]:
    """The cells of the notebooks, without outputs."""
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        for i, cell in enumerate(json.loads(path.read_text())["cells"]):
            yield f"{path.relative_to(ROOT)}:cell {i}:", "".join(cell["source"])


KINDS = {"pages": pages, "docstrings": docstrings, "help": helps, "notebooks": notebooks}


def found(kind: str) -> dict[str, list[str]]:
    """Where each phrase stands in the texts of a kind."""
    places = collections.defaultdict(list)
    for where, text in KINDS[kind]():
        for phrase in PHRASES:
            # matches "mended" too, and line breaks for spaces
            pattern = rf"\b{phrase}(?:s|ed|ing)?\b".replace(" ", r"\s+")
            for match in re.finditer(pattern, text, re.IGNORECASE):
                places[phrase].append(f"{where}{text.count('\n', 0, match.start()) + 1}")
    return dict(places)


def complaints() -> Iterator[str]:
    """A line for each place of a phrase, and one if the docs have too many words, as `wc -w` counts them."""
    for kind in KINDS:
        for phrase, places in found(kind).items():
            yield from (f'{place}: "{phrase}" in {kind}' for place in places)
    words = sum(len(path.read_text().split()) for path in ROOT.glob("docs/*.md"))
    if words > MOST_WORDS:
        yield f"docs/*.md: {words:,} words, more than {MOST_WORDS:,}"


def main() -> int:
    """Prints what is wrong."""
    lines = list(complaints())
    print(*lines, sep="\n", end="\n" * bool(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
