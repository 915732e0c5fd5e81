"""The test of published agents, compared with the recorded returns."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from published_agents import ENV

from sb3_td3x.agents.command import main
from sb3_td3x.agents.evaluate import allowed_loss, format_table, format_zoo, summarize
from sb3_td3x.agents.training import TEST_SEED, Training, find_agents
from sb3_td3x.studies.measure import play_test
from sb3_td3x.zoo.runs import ZooRun


def test_any_number_of_episodes_begins_alike(published: Path) -> None:
    (folder,) = find_agents(published)
    run = ZooRun(folder)
    few, many = (play_test(run, run.last_agent, n, TEST_SEED) for n in (4, 14))
    assert few == many[:4] == Training.read(folder).published.test_returns
    assert len(set(many)) == 14  # as many start states


def test_another_number_of_envs_plays_the_same_start_states(published: Path) -> None:
    run = ZooRun(find_agents(published)[0])
    one, three = (play_test(run, run.last_agent, 4, TEST_SEED, n_envs) for n_envs in (1, 3))
    assert one == pytest.approx(three, rel=0.05)


def test_check(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "-f", str(published), "--check"]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    (folder,) = find_agents(copy)
    training = Training.read(folder)
    better = replace(training.published, test_returns=[value / 2 for value in training.published.test_returns])
    seeds = [better if seed.seed == better.seed else seed for seed in training.seeds]
    replace(training, seeds=seeds).write(folder)
    assert main(["evaluate", "-f", str(copy), "--check", "--episodes", "3"]) == 1
    assert "WORSE" in capsys.readouterr().err


def test_figures(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "agents.json"
    assert main(["evaluate", "-f", str(published), "-o", str(path), "--env", ENV]) == 0
    (agent,) = json.loads(path.read_text())["agents"]
    training = Training.read(find_agents(published)[0])
    assert agent["published"]["returns"] == training.published.test_returns
    assert agent["published"]["solved"] is None
    assert agent["all_seeds"]["means"] == pytest.approx([np.mean(seed.test_returns) for seed in training.seeds])
    # Two seeds are too few for an interval
    assert "mean_95" not in agent["all_seeds"]
    table = capsys.readouterr().out
    assert table.startswith("| env | episodes |")
    assert "td3 -151.9 ± 90.2 at 20k" in table


def test_table_of_an_env_with_a_bar(published: Path) -> None:
    training = replace(Training.read(find_agents(published)[0]), env="BipedalWalkerHardcore-v3")
    seeds = [replace(training.seeds[0], seed=seed, test_returns=[10.0 * seed]) for seed in range(1, 6)]
    training = replace(training, seeds=seeds, published_seed=1)
    row = format_table([summarize(training, [312.0] * 95 + [0.0] * 5)], 10).splitlines()[2]
    assert row.startswith("| BipedalWalkerHardcore-v3 (seed 1) | 100 | 296.4 [")
    assert "| 312.0 | 95.0% reach 300 | 0.0 | 30.0 [" in row
    assert "| 30.0 | 10.0, 20.0, 30.0, 40.0, 50.0 in 1 episodes each |" in row


@pytest.mark.parametrize(
    ("options", "error"), [([], "there are no agents in"), (["--env", "Pendulum"], "has no agent for Pendulum")]
)
def test_agents_that_do_not_exist(
    options: list[str], error: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published if options else tmp_path
    assert main(["evaluate", "-f", str(folder), *options]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("returns", "allowed"),
    [
        ([-100.0, -100.0, -100.0, -100.0], 1.0),
        # All are 5 lower, which chance does not explain: only rounding is allowed
        ([-105.0, -105.0, -105.0, -105.0], 1.0),
        # The differences are 0 and 20, 10 from their mean: 1.96 * 10 / sqrt(4) = 9.8
        ([-100.0, -120.0, -100.0, -120.0], 10.8),
    ],
)
def test_allowed_loss(returns: list[float], allowed: float) -> None:
    assert allowed_loss([-100.0] * 4, returns) == pytest.approx(allowed)


def test_best_of_the_zoo() -> None:
    expected = "td3 -98.1 ± 16.1 at 10M, tqc 235.2 ± 110.6 at 2M"
    assert format_zoo("BipedalWalkerHardcore-v3") == expected
    assert format_zoo("Unknown-v0") == ""
