"""The notebooks in examples/ run from their first cell to their last, on nano.

Run: pytest tests/test_notebooks.py        (MLXSTACKS_NOTEBOOKS_REAL=1: the third on SmolLM2)
"""

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
# What the reader must see.
SHOWN = {
    "1_a_fuse_that_never_lies": ("this fuse adds nothing of its own", "correlation", "Quinn"),
    "2_stacks_and_a_router": ("Gus", "islands"),
    "3_the_confound_on_a_real_model": ("nano (a test model)", "unlike the base"),
}


def test_every_notebook_is_here_small_and_says_what_its_cells_show() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)
    for path in NOTEBOOKS:
        assert path.stat().st_size < 100_000
        cells = nbformat.read(path, as_version=4).cells
        kinds = [cell.cell_type for cell in cells]
        assert kinds[0] == "markdown"
        assert kinds.count("markdown") >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = nbformat.read(path, as_version=4)
    if not os.environ.get("MLXSTACKS_NOTEBOOKS_REAL"):
        for cell in notebook.cells:
            cell.source = cell.source.replace("USE_REAL_MODEL = True", "USE_REAL_MODEL = False")
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    shown = str([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert all(words in shown for words in words_of(path))
    assert "Traceback" not in shown
    # A notebook that is saved with its outputs stays small.
    assert len(nbformat.writes(notebook)) < 1_500_000


def words_of(path: Path) -> Any:
    if os.environ.get("MLXSTACKS_NOTEBOOKS_REAL") and path.stem.startswith("3"):
        return ("SmolLM2", "unlike the base")
    return SHOWN[path.stem]
