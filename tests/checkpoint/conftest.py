"""Fixtures of the tests of checkpoints."""

from pathlib import Path

import pytest
from checkpoints import counting_agent

from sb3_td3x.checkpoint import ResumableCheckpoint


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return a folder with two checkpoints, at 40 and 50 timesteps."""
    counting_agent().learn(50, ResumableCheckpoint(tmp_path, 10))
    return tmp_path
