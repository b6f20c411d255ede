"""The order of imports that CONTRIBUTING.md gives: every room imports only from those after it."""

import ast
import re

import pytest

from tests.support.processes import ROOT

PACKAGE = ROOT / "jgg"


def rooms():
    """The rooms in CONTRIBUTING.md's order: folders of jgg, and the modules that people import."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (listed,) = re.findall(r"imports\s+only\s+from\s+later\s+ones:\s(.*?)\.\s", text, re.DOTALL)
    return [name.strip(" `\n/") for name in listed.split(",")]


def imported(path):
    """The modules that a file imports from jgg, in functions too, but not for type checkers alone."""
    return (name for name in _imported(path) if name.startswith("jgg."))


def _imported(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules():
    return {path: path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.glob("**/*.py")}


def test_every_room_has_a_place():
    """And what stands in jgg/ itself is what people import."""
    there = {parts[0] for parts in modules().values()} - {"__init__", "__main__"} | {"kernels"}  # which is a link
    assert there == set(rooms())


def test_rooms_import_from_later_ones():
    place = {room: number for number, room in enumerate(rooms())}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, (room, *_) in modules().items()
        if room in place
        for name in imported(path)
        if place.get(name.split(".")[1], place[room]) < place[room]
    ]
    assert not wrong


@pytest.mark.parametrize("room", ["cli", "train", "data", "optim", "models"])
def test_what_stands_beyond_the_fence_is_not_imported(room):
    """What makes an operation of kernels is in jgg.extend."""
    beyond = ("jgg.products", "jgg.primitives", "jgg.launching")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, parts in modules().items()
        if parts[0] == room
        for name in imported(path)
        if name.startswith(beyond)
    ]
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    files = {".".join(("jgg", *parts)).removesuffix(".__init__"): path for path, parts in modules().items()}
    imports = {
        module: {
            name if name in files else name.rpartition(".")[0]
            for name in imported(path)
            if name in files or name.rpartition(".")[0] in files
        }
        for module, path in files.items()
        if module != "jgg"
    }
    done = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in imports.get(module, ()):
                visit(other, [*path, module])
            done.add(module)

    for module in imports:
        visit(module, [])
