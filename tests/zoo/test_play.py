"""``python -m sb3_td3x play``."""

import shutil
from pathlib import Path
from typing import Any

import hostile
import pytest
from run_folders import ENV, change, make_run_folder

from sb3_td3x.cli import main


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_folder(tmp_path_factory.mktemp("td3x"))


@pytest.fixture
def folder(run_folder: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(run_folder, tmp_path / "run"))


def test_prints_returns(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--best"], ["--stochastic", "--seed", "3"]):
        assert main(["play", str(run_folder), "-n", "16", *options]) == 0
        output = capsys.readouterr().out
        # Rewards 1, 2, 3, 4, 5 and 1, 2, 3, in turn
        assert "Episode 1: 15.00\nEpisode 2: 6.00\n" in output
        assert "4 episodes, mean return 10.50 +/- 4.50" in output


def test_no_episode_ends(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", str(run_folder), "-n", "3"]) == 0
    assert capsys.readouterr().out == "No episode ended; return so far 6.00\n"


def test_returns_of_episodes_that_a_wrapper_cuts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limit = {"gymnasium.wrappers.TimeLimit": {"max_episode_steps": 2}}
    wrappers = ["gymnasium.wrappers.RecordEpisodeStatistics", limit]
    change(folder, "config.yml", normalize=False, env_wrapper=wrappers)
    assert main(["play", str(folder), "-n", "8"]) == 0
    assert "4 episodes, mean return 3.00 +/- 0.00" in capsys.readouterr().out


def test_frames_that_the_agent_does_not_know(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, "config.yml", normalize=False, frame_stack=2)
    assert main(["play", str(folder), "-n", "8"]) == 1
    assert "shape" in capsys.readouterr().err


def test_gadget_is_not_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sentinel = tmp_path / "sentinel"
    (folder / ENV / "vecnormalize.pkl").write_bytes(next(iter(hostile.GADGETS.values()))(str(sentinel)))
    assert main(["play", str(folder)]) == 1
    assert "vecnormalize.pkl" in capsys.readouterr().err
    assert not sentinel.exists()


@pytest.mark.parametrize(
    "wrapper", ["gymnasium.wrappers.\x1b[2J", {"gymnasium.wrappers.TimeLimit": {"\x1b[2J": 3}}], ids=repr
)
def test_errors_hold_nothing_that_a_terminal_obeys(
    folder: Path, wrapper: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "config.yml", env_wrapper=wrapper)
    assert main(["play", str(folder), "-n", "5"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yml" in line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "is not the folder of a run"),
        (["-n", "-3"], "n_timesteps=-3 is not allowed"),
        (["--seed", "-1"], "seed=-1 is not allowed"),
        (["--gym-packages", "no_such_package"], "No module named 'no_such_package'"),
    ],
)
def test_wrong_arguments_get_one_sentence(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", str(tmp_path), *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
