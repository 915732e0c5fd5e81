"""Agents that the tests of this folder share."""

from pathlib import Path

import pytest
from published_agents import train_two_seeds

from sb3_td3x.agents.command import main


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Train two seeds of one env."""
    return train_two_seeds(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def published(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish their agent, and return the log folder."""
    output = tmp_path_factory.mktemp("published")
    options = ["--selection-episodes", "3", "--test-episodes", "4", "--cpu", "a fast one"]
    assert main(["publish", *map(str, runs), "-o", str(output), *options, "--jobs", "2"]) == 0
    return output
