"""The notebook in examples/: its stored outputs, and running it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "examples" / "td3x_tour.ipynb"


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def assert_shows_all(notebook: Any) -> None:
    """Assert that a notebook shows all plots and two animations, without errors or warnings."""
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert not [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    shown = [output.data for output in outputs(notebook) if "data" in output]
    assert sum("Recording(" in data["text/plain"] for data in shown) == 2
    assert sum("image/png" in data for data in shown) == 12


def test_stored_outputs() -> None:
    assert NOTEBOOK.stat().st_size < 1_500_000
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    # The cells were run once, from top to bottom
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert_shows_all(notebook)
    assert "/home/" not in NOTEBOOK.read_text(encoding="utf-8")


@pytest.mark.slow
def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOUR_STEPS", "450")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # The kernel must import the same package as the tests
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{path}" if path else str(ROOT))
    # Plots must go into the notebook, not to the backend of the tests
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert_shows_all(notebook)
