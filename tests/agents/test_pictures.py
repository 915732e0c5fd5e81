"""Learning curves and animations of agents."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from published_agents import ENV

from sb3_td3x.agents.command import main
from sb3_td3x.agents.plot import draw, learning_curve
from sb3_td3x.agents.training import Training, find_agents


def test_learning_curves(published: Path, tmp_path: Path) -> None:
    assert main(["plot", "-f", str(published), "-o", str(tmp_path)]) == 0
    assert (tmp_path / f"{ENV}.png").read_bytes().startswith(b"\x89PNG")
    training = Training.read(find_agents(published)[0])
    timesteps, returns = learning_curve(training)
    assert timesteps.tolist() == [120, 240]
    assert returns.shape == (2, 2)
    axes = Figure().subplots()
    draw(training.env, timesteps, returns, axes)
    # The zoo's first evaluation came after 10,000 steps, and two seeds have no interval
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["td3x, mean of 2 seeds"]
    # Evaluations of the second seed that came later are interpolated
    training.seeds[1].evaluations["timesteps"] = [180, 300]
    early, late = returns[:, 1]
    np.testing.assert_allclose(learning_curve(training)[1][:, 1], [early, (early + late) / 2])


def test_mean_leaves_out_a_stopped_seed() -> None:
    axes = Figure().subplots()
    draw(ENV, np.array([100, 200]), np.array([[1.0, 3.0, -50.0], [2.0, 6.0, np.nan]]), axes)
    *seeds, mean = axes.get_lines()
    assert len(seeds) == 3
    np.testing.assert_allclose(mean.get_ydata(), [2.0, 4.0])
    assert mean.get_label() == "td3x, mean of 2 seeds"


def test_animation_needs_no_display(runs: list[Path], tmp_path: Path) -> None:
    """SDL reports a missing display on the standard error stream, past Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SDL_", "XDG_"))}
    command = [sys.executable, "-m", "sb3_td3x", "agents", "animate", runs[0], "-o", tmp_path / "episode.gif"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stderr) == (0, "")


def test_animation(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-o", str(tmp_path / "episode.gif"), "--every", "50", "--width", "120"]
    for choice in ([], ["--best"]):
        assert main(["animate", str(runs[0]), *choice, *options]) == 0
        assert (tmp_path / "episode.gif").read_bytes().startswith(b"GIF8")
    assert main(["animate", str(tmp_path), *options]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["animate", str(runs[0]), "--width", "99"])
    assert "argument --width: '99' is not allowed, expected a whole number of at least 100" in capsys.readouterr().err
