"""Notebooks in git: paired with a .py file that says the same, and without outputs. `make test-all` executes them."""

import pathlib

import pytest

jupytext = pytest.importorskip("jupytext")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pair_agrees(path):
    notebook, script = jupytext.read(path), jupytext.read(path.with_suffix(".py"))
    cells = [[(cell.cell_type, cell.source) for cell in pair.cells] for pair in (notebook, script)]
    assert cells[0] == cells[1], f"run: jupytext --sync {path}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_has_no_outputs(path):
    cells = [cell for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)
