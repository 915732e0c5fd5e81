"""The notebooks in examples/ run from top to bottom, with shorter trainings, in an empty folder."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORT = {
    r"^STEPS = [\d_]+": "STEPS = 300",
    r'^SEEDS = ".*"': 'SEEDS = "1 2"',
    r"learning_starts=[\d_]+": "learning_starts=100",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_has_no_stored_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    # Plots must go into the notebook, not to the backend of the tests
    monkeypatch.delenv("MPLBACKEND", raising=False)
    # The kernel must import the same package as the tests
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for pattern, replacement in SHORT.items():
            cell.source = re.sub(pattern, replacement, cell.source, flags=re.MULTILINE)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = {kind for output in outputs for kind in output.get("data", {})}
    assert shown & {"image/png", "image/gif", "text/html", "text/markdown"}
