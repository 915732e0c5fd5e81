"""Fixtures of the tests of the zoo."""

import shutil
from pathlib import Path

import pytest
from run_folders import make_run_folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("td3x"))


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))
