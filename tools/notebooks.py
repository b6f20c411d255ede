"""Runs the notebooks on the CPU, or those that say so on a GPU, and writes them with their outputs.

    python -m tools.notebooks                              # all of notebooks/ that need no GPU
    python -m tools.notebooks notebooks/01_grouped_gemm.ipynb
    python -m tools.notebooks notebooks/07_train_from_nothing.ipynb    # on a GPU

A notebook's metadata keeps the fingerprint of the code that its outputs came from: tests/commands/test_notebooks.py
fails if a cell was edited since, and runs the notebooks again to compare. A cell with the tag "times" prints what
differs from run to run; no other may. Notebooks whose metadata have the device "gpu" run on the GPU of this machine.
"""

import argparse
import copy
import hashlib
import json
import os
import platform
import re
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FINGERPRINT = "code_that_ran"
_SECONDS = {"cpu": 120, "gpu": 600}  # that a cell may take
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/\w[\w.-]*/\w\S*")


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook in a file."""
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fingerprint(notebook: nbformat.NotebookNode) -> str:
    """A hash of the code of all cells."""
    sources = json.dumps([cell.source for cell in code_cells(notebook)])
    return hashlib.sha256(sources.encode()).hexdigest()[:16]


def device(notebook: nbformat.NotebookNode) -> str:
    """Where a notebook runs: "cpu" or "gpu"."""
    return notebook.metadata.get("device", "cpu")


def texts(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell printed and displayed, but for pictures."""
    outputs = (output.get("data", {"text/plain": output.get("text", "")}) for output in cell.outputs)
    return [text for data in outputs for kind, text in data.items() if kind.startswith("text/")]


def machine_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """The absolute paths in the outputs."""
    return [path for cell in code_cells(notebook) for text in texts(cell) for path in _ABSOLUTE_PATH.findall(text)]


def execute(path: Path) -> nbformat.NotebookNode:
    """Runs a notebook on its device; returns it with its outputs and its metadata as they were.

    Raises: nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = read(path)
    metadata = copy.deepcopy(notebook.metadata)  # the client adds versions of this Python
    environment = dict(os.environ)
    if device(notebook) == "cpu":
        environment["JAX_PLATFORMS"] = "cpu"
    environment.pop("MPLBACKEND", None)  # the kernel's own puts pictures into the notebook
    client = nbclient.NotebookClient(
        notebook,
        timeout=_SECONDS[device(notebook)],
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    )
    client.execute(env=environment)
    notebook.metadata = metadata
    return notebook


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Writes a notebook that ran; exits where its outputs have errors or names of this machine."""
    cells = code_cells(notebook)
    errors = [output.text for cell in cells for output in cell.outputs if output.get("name") == "stderr"]
    shown = "\n".join(text for cell in cells for text in texts(cell))
    if found := [*errors, *machine_paths(notebook), *re.findall(rf"\b{re.escape(platform.node())}\b", shown)]:
        raise SystemExit(f"{path.name} was not written: its outputs have errors or names of this machine: {found}")
    notebook.metadata[FINGERPRINT] = fingerprint(notebook)
    nbformat.write(notebook, path)
    print(f"Wrote {path.name}, {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="NOTEBOOK", help="by default all that need no GPU")
    for path in parser.parse_args().paths or [path for path in NOTEBOOKS if device(read(path)) == "cpu"]:
        write(execute(path), path)


if __name__ == "__main__":
    main()
