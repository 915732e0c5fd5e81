"""scripts/zoo_runs.py with a real run of RL Zoo."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from processes import run_python

ROOT = Path(__file__).parents[2]
PLAY = "--algo td3x --env Pendulum-v1 -f logs -n 400 --no-render"
TRAIN = (
    "--algo td3x --env Pendulum-v1 --seed 1 -n 120 -f logs --num-threads 1 --eval-freq 60 --eval-episodes 2 -params "
    "learning_starts:50 'policy_kwargs:{'\"'\"'net_arch'\"'\"': [8]}'"
)


def run(folder: Path, *command: str) -> str:
    """Run a command that must succeed, and return what it prints."""
    process = run_python(folder, *command)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_collects_command_evaluations_and_test(tmp_path: Path) -> None:
    run(tmp_path, "-m", "rl_zoo3.train", *shlex.split(TRAIN))
    output = run(tmp_path, "-m", "rl_zoo3.enjoy", *shlex.split(PLAY))
    folder = tmp_path / "logs/td3x/Pendulum-v1_1"
    (folder / "test-60.log").write_text("Episode Reward: 1.00\n")
    (folder / "test-120.log").write_text(output)
    other = {"env": "Ant-v5", "seed": 1, "command": "another"}
    noted = {"env": "Pendulum-v1", "seed": 1, "command": f"python -m rl_zoo3.train {TRAIN}", "note": "begun again"}
    older = {"env": "Pendulum-v1", "seed": 1, "command": f"python -m rl_zoo3.train {TRAIN}"}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"note": "Of 2026", "runs": [noted, older, other]}))
    table = run(tmp_path, str(ROOT / "scripts/zoo_runs.py"), str(folder), "-o", str(path))

    results = json.loads(path.read_text())
    assert results["note"] == "Of 2026"
    assert results["runs"][:2] == [other, noted]
    (figures,) = results["runs"][2:]
    assert figures["command"] == older["command"]
    returns = np.load(folder / "evaluations.npz")["results"]
    assert returns.shape == (2, 2)
    assert figures["evaluations"] == {
        "timesteps": [60, 120],
        "mean_returns": [round(float(np.mean(episodes)), 1) for episodes in returns],
    }
    assert figures["test"]["timesteps"] == 120
    assert len(figures["test"]["returns"]) == 2
    mean = re.search(r"Mean reward: (\S+)", output)
    assert mean is not None
    first, second = figures["test"]["returns"]
    assert (first + second) / 2 == pytest.approx(float(mean[1]), abs=0.1)

    before, after = figures["evaluations"]["mean_returns"]
    # With two returns the standard deviation over the root of 2 is half their distance
    test = f"{(first + second) / 2:,.1f} ± {1.96 * abs(first - second) / 2:,.1f} | 2"
    lowest = f"{min(before, after):,.1f}"
    assert table.splitlines()[2] == (
        f"| Pendulum-v1 | learning_starts:50 policy_kwargs:{{'net_arch': [8]}} | 120 | 1 | {test} "
        f"| {lowest} to {max(before, after):,.1f} | {lowest} |"
    )
    assert run(tmp_path, str(ROOT / "scripts/zoo_runs.py"), "-o", str(path)) == table


def test_compares_the_values_of_seeds(tmp_path: Path) -> None:
    """Seeds with the same values belong together, however their commands spell them."""
    entry = (
        " -params learning_rate:3e-4 gradient_steps:1 normalize:\"'dict(norm_obs=True, norm_reward=False)'\" "
        "policy_kwargs:\"{'layer_norm': True, 'net_arch': [256, 256]}\" prioritized_replay_alpha:0"
    )
    runs = [
        {
            "env": "Ant-v5",
            "seed": seed,
            "command": f"python -m rl_zoo3.train --env Ant-v5 --seed {seed}{changes}",
            "evaluations": {"timesteps": [50, 100], "mean_returns": [1.0, 2.0]},
            "test": {"timesteps": timesteps, "returns": [mean - 1.0, mean + 1.0]},
        }
        for seed, changes, timesteps, mean in (
            (1, "", 100, 10.0),
            (1, "", 50, 99.0),
            (1, " -params gamma:0.9", 100, 99.0),
            (2, entry, 100, 20.0),
            (3, "", 100, 30.0),
        )
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"note": "", "runs": runs}))
    table = run(tmp_path, str(ROOT / "scripts/zoo_runs.py"), "-o", str(path), "--pictures", "pictures")

    # The quantile of Student's t for two degrees of freedom is 4.3027, and 4.3027 * 10 / sqrt(3) is 24.8
    assert table.splitlines()[-1] == "| Ant-v5 |  | 100 | 1, 2, 3 | 20.0 ± 24.8 |"
    assert table.count("| 99.0 ±") == 2
    assert table.count("| gamma:0.9 |") == 1
    (picture,) = (tmp_path / "pictures").iterdir()
    assert picture.name == "Ant-v5.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_folder_has_one_sentence(tmp_path: Path) -> None:
    process = run_python(tmp_path, str(ROOT / "scripts/zoo_runs.py"), "nothing", "-o", "runs.json")
    assert process.returncode == 2
    assert process.stderr.endswith(
        "error: nothing is not the folder of a run of RL Zoo: 0 of its subfolders have a config.yml, expected one\n"
    )
    assert not (tmp_path / "runs.json").exists()


def test_wrong_file_has_one_sentence(tmp_path: Path) -> None:
    process = run_python(tmp_path, str(ROOT / "scripts/zoo_runs.py"), "-o", "runs.json")
    assert process.returncode == 2
    assert process.stderr.endswith("error: runs.json does not exist, and no run is given\n")
    assert not (tmp_path / "runs.json").exists()
