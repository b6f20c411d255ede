"""The notebooks run, and their outputs in the repository are those of their code. If not: make notebooks."""

import math
import re

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks need the extra notebooks")
from tools import notebooks  # noqa: E402

DECIMAL = re.compile(r"\d+\.\d*(?:e[+-]?\d+)?")
COLAB = "https://colab.research.google.com/github/jgg-project/jgg/blob/main/notebooks"
each_notebook = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def alike(one, other):
    """Whether two texts have the same words and integers, and decimals that are close."""
    if DECIMAL.sub("#", one).split() != DECIMAL.sub("#", other).split():
        return False
    pairs = zip(DECIMAL.findall(one), DECIMAL.findall(other), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=0.1, abs_tol=1e-3) for a, b in pairs)


def kinds(cell):
    """The kinds of each output of a cell: texts, pictures."""
    return [sorted(output.get("data", [output.get("name")])) for output in cell.outputs]


def assert_alike(committed, ran):
    """Asserts that two runs of a cell show the same, but for times."""
    assert kinds(committed) == kinds(ran)
    if "times" not in committed.metadata.get("tags", []):
        for one, other in zip(notebooks.texts(committed), notebooks.texts(ran), strict=True):
            assert alike(one, other), f"{one}\nis now\n{other}"


def test_they_are_few_and_small():
    assert len(notebooks.NOTEBOOKS) == 8
    assert sum(path.stat().st_size for path in notebooks.NOTEBOOKS) < 600_000


@each_notebook
def test_outputs_are_of_the_code_beside_them(path):
    notebook = notebooks.read(path)
    cells = notebooks.code_cells(notebook)
    assert notebook.metadata[notebooks.FINGERPRINT] == notebooks.fingerprint(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in kind for cell in cells for kind in kinds(cell))
    assert not notebooks.machine_paths(notebook)


@each_notebook
def test_they_begin_with_colab(path):
    title, install, *_ = notebooks.read(path).cells
    assert title.source.startswith("[![Open in Colab](")
    assert f"({COLAB}/{path.name})" in title.source
    assert all(line.startswith("#") for line in install.source.splitlines())
    assert "git+https://github.com/jgg-project/jgg" in install.source


@pytest.mark.sweep
@pytest.mark.parametrize(
    "path",
    [path for path in notebooks.NOTEBOOKS if notebooks.device(notebooks.read(path)) == "cpu"],
    ids=lambda path: path.stem,
)
# the client asks for an event loop in a way that newer Pythons warn of
@pytest.mark.filterwarnings("default")
def test_they_show_what_is_committed(path):
    committed, ran = (notebooks.code_cells(notebook) for notebook in (notebooks.read(path), notebooks.execute(path)))
    for one, other in zip(committed, ran, strict=True):
        assert_alike(one, other)


def cell_with(*texts, picture=False, tags=()):
    """A cell with these printed texts and a picture."""
    outputs = [nbformat.v4.new_output("stream", text=text) for text in texts]
    outputs += [nbformat.v4.new_output("display_data", {"image/png": ""})] * picture
    return nbformat.v4.new_code_cell(outputs=outputs, metadata={"tags": list(tags)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (cell_with("4 rows, loss 0.162"), cell_with("4 rows, loss  0.170\n")),
        (cell_with("differ by 5.96e-07"), cell_with("differ by 0.0")),
        (cell_with("3.1 ms", tags=["times"]), cell_with("about 7.9 ms", tags=["times"])),
    ],
)
def test_what_may_differ(one, other):
    assert_alike(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (cell_with("4 rows"), cell_with("5 rows")),
        (cell_with("loss 0.162"), cell_with("loss 0.182")),
        (cell_with("loss 0.162"), cell_with("Loss 0.162")),
        (cell_with("loss 0.162"), cell_with()),
        (cell_with(picture=True), cell_with()),
        (cell_with("3.1 ms", tags=["times"]), cell_with(picture=True, tags=["times"])),
    ],
)
def test_what_may_not_differ(one, other):
    with pytest.raises(AssertionError):
        assert_alike(one, other)


def test_an_edited_cell_has_another_fingerprint():
    notebook = notebooks.read(notebooks.NOTEBOOKS[0])
    notebook.cells[0].source += "more prose"
    assert notebooks.fingerprint(notebook) == notebook.metadata[notebooks.FINGERPRINT]
    notebooks.code_cells(notebook)[-1].source += "\n"
    assert notebooks.fingerprint(notebook) != notebook.metadata[notebooks.FINGERPRINT]


def test_paths_of_a_machine_are_found():
    notebook = nbformat.v4.new_notebook(cells=[cell_with("Wrote /tmp/tmp1/x.json at 3 GB/s, see https://a.org/b/c")])
    assert notebooks.machine_paths(notebook) == ["/tmp/tmp1/x.json"]
