"""The test of published agents, compared with the recorded returns."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch as th
from published_agents import ENV
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.agents import training as training_module
from sb3_td3x.agents.command import main
from sb3_td3x.agents.evaluate import allowed_loss, format_table, format_zoo, read_zoo_benchmark, summarize
from sb3_td3x.agents.training import TEST_SEED, Training, episodes_of_test, find_agents, play_agent
from sb3_td3x.zoo.play import Episode
from sb3_td3x.zoo.runs import ZooRun


def test_any_number_of_episodes_begins_alike(published: Path) -> None:
    (folder,) = find_agents(published)
    few, many = (play_agent(folder, f"{ENV}.zip", n, TEST_SEED) for n in (4, 14))
    assert few == many[:4] == Training.read(folder).published.test_returns
    assert len(set(many)) == 14  # as many start states


def test_another_number_of_envs_plays_the_same_start_states(published: Path) -> None:
    (folder,) = find_agents(published)
    one, three = (play_agent(folder, f"{ENV}.zip", 4, TEST_SEED, n_envs) for n_envs in (1, 3))
    assert one == pytest.approx(three, rel=0.05)


def test_agents_play_with_one_thread(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns depend on the number of threads, so they are played with one, whatever the caller uses."""
    threads: list[int] = []
    load_agent = ZooRun.load_agent

    def count_threads(self: ZooRun, *args: object) -> object:
        threads.append(th.get_num_threads())
        return load_agent(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ZooRun, "load_agent", count_threads)
    before = th.get_num_threads()
    try:
        th.set_num_threads(2)
        play_agent(find_agents(published)[0], f"{ENV}.zip", 1, TEST_SEED)
        assert (threads, th.get_num_threads()) == ([1], 2)
    finally:
        th.set_num_threads(before)


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


def test_tests_are_longer_where_luck_decides() -> None:
    assert episodes_of_test("BipedalWalkerHardcore-v3") == episodes_of_test("LunarLanderContinuous-v3") == 1000
    assert episodes_of_test(ENV) == 100


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
    figures = read_zoo_benchmark()
    assert format_zoo(figures["BipedalWalkerHardcore"]) == "td3 -98.1 ± 16.1 at 10M, tqc 235.2 ± 110.6 at 2M"
    assert format_zoo({}) == ""


def test_an_episode_does_not_depend_on_earlier_ones(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Envs such as BipedalWalker keep state over ``reset``, so no copy of the env plays a second counted episode."""
    seen: list[VecEnv] = []

    def play_episodes(model: object, env: VecEnv, n_episodes: int, seed: int) -> list[Episode]:
        assert n_episodes <= env.num_envs
        assert env not in seen
        seen.append(env)
        return [Episode(float(seed + idx), 1) for idx in range(n_episodes)]

    monkeypatch.setattr(training_module, "play_episodes", play_episodes)
    (folder,) = find_agents(published)
    assert play_agent(folder, f"{ENV}.zip", 14, first_seed=5, n_envs=10) == [float(seed) for seed in range(5, 19)]
    assert len(seen) == 2
