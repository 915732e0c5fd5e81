"""The agents in ``rl-trained-agents``."""

import argparse
import shlex
import shutil
import subprocess
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import yaml
from published_agents import AGENTS, ENV, ROOT, run_python
from rl_zoo3.utils import StoreDict

from sb3_td3x import TD3X
from sb3_td3x.agents.evaluate import allowed_loss
from sb3_td3x.agents.publish import check_portable
from sb3_td3x.agents.training import SELECTION_SEED, TEST_SEED, Training, best_candidate, find_agents
from sb3_td3x.files.agent import open_agent
from sb3_td3x.studies.measure import play_test
from sb3_td3x.zoo.register import hyperparams_path
from sb3_td3x.zoo.runs import ZooRun, action_repeat

FOLDERS = [pytest.param(folder, id=folder.name) for folder in find_agents(AGENTS)]
# Agents whose episodes take no time
QUICK = [
    pytest.param(folder, id=folder.name) for folder in find_agents(AGENTS) if folder.name.startswith(("Pend", "Mount"))
]
MAX_SIZE = 10_000_000


def test_there_are_agents() -> None:
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_loads_without_trust(folder: Path) -> None:
    path = ZooRun(folder).last_agent
    TD3X.load(path, device="cpu", trusted=False)
    agent = open_agent(path)
    assert agent.pickles == {}
    assert agent.is_sealed


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_paths_of_a_machine(folder: Path) -> None:
    check_portable(folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_figures_belong_together(folder: Path) -> None:
    training = Training.read(folder)
    run = ZooRun(folder)
    assert folder.name == f"{training.env}_1"  # the folder that the zoo takes
    assert training.env in gym.registry
    assert len({seed.seed for seed in training.seeds}) == len(training.seeds)
    for seed in training.seeds:
        assert seed.selected == best_candidate(seed.selection)
        published = training.published.selection[training.published.selected]
        assert np.mean(seed.selection[seed.selected]) <= np.mean(published)
        assert len(seed.test_returns) >= 100
        assert f"--seed {seed.seed} " in seed.command + " "
        # No training or selection has seen a start state of the test
        assert seed.seed + 1000 < SELECTION_SEED
        assert SELECTION_SEED + len(seed.selection[seed.selected]) <= TEST_SEED
    decisions = open_agent(run.last_agent).data["num_timesteps"]
    # The agent may decide at every env step, though the training repeated actions
    parser = argparse.ArgumentParser()
    parser.add_argument("-params", nargs="+", action=StoreDict, default={})
    changes = parser.parse_known_args(shlex.split(training.published.command))[0].params
    trained_repeat = action_repeat({**yaml.safe_load(hyperparams_path().read_text())[training.env], **changes})
    assert decisions * trained_repeat == training.published.selected_timesteps
    assert run.action_repeat in (1, trained_repeat)


def test_size() -> None:
    assert sum(path.stat().st_size for path in AGENTS.rglob("*") if path.is_file()) < MAX_SIZE


@pytest.mark.parametrize("folder", QUICK)
def test_is_not_worse_than_recorded(folder: Path) -> None:
    training = Training.read(folder)
    run = ZooRun(folder)
    returns = play_test(run, run.last_agent, 10, TEST_SEED)
    recorded = training.published.test_returns[:10]
    assert np.mean(recorded) - np.mean(returns) <= allowed_loss(recorded, returns)


@pytest.mark.parametrize("folder", QUICK)
def test_enjoy(folder: Path, tmp_path: Path) -> None:
    """From another folder, the zoo takes the published agent by default."""
    env = ZooRun(folder).env_id
    output = run_python(
        tmp_path, "-m", "rl_zoo3.enjoy", "--algo", "td3x", "--env", env, "--no-render", "-n", "200", "-f", str(AGENTS)
    )
    assert f"{env}_1/{env}.zip" in output
    assert "Episodes" in output


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_enjoy() -> None:
    command = ["make", "-n", "enjoy", f"ENV={ENV}", "ARGS=--no-render"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"-m rl_zoo3.enjoy --algo td3x --env {ENV} -f rl-trained-agents --no-render" in output
