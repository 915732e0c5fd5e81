"""Playing agents, and ``python -m sb3_td3x play``."""

from pathlib import Path
from typing import Any

import hostile
import numpy as np
import pytest
from envs import CountingEnv, Episode, counting_vec_env, tiny, vec_env
from run_folders import ENV, change
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from sb3_td3x.cli import main
from sb3_td3x.zoo.play import play_episodes, play_steps
from sb3_td3x.zoo.runs import ZooRun


def test_prints_returns(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--best"], ["--stochastic", "--seed", "3"]):
        assert main(["play", str(run_folder), "-n", "16", *options]) == 0
        output = capsys.readouterr().out
        # Rewards 1, 2, 3, 4, 5 and 1, 2, 3, in turn
        assert "Episode 1: 15.00\nEpisode 2: 6.00\n" in output
        assert "4 episodes, mean return 10.50 +/- 4.50" in output


def test_every_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, "config.yml", env_wrapper="rl_zoo3.wrappers.FrameSkip")
    for options, returns in ([], "3 episodes, mean return 12.00"), (["--every-step"], "1 episodes, mean return 15.00"):
        assert main(["play", str(folder), "-n", "5", *options]) == 0
        assert returns in capsys.readouterr().out


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
    [([], "is not the folder of a run"), (["--gym-packages", "no_such_package"], "No module named 'no_such_package'")],
)
def test_what_cannot_be_played_gets_one_sentence(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["play", str(tmp_path), *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(("option", "value", "low"), [("-n", "-3", 1), ("--seed", "-1", 0)])
def test_numbers_out_of_range(
    option: str, value: str, low: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["play", str(tmp_path), f"{option}={value}"])
    assert f"{value!r} is not allowed, expected a whole number of at least {low}" in capsys.readouterr().err


class TestPlaying:
    def model(self) -> TD3X:
        return TD3X("MlpPolicy", CountingEnv(), **tiny())

    def test_each_copy_is_seeded(self) -> None:
        """Whatever the number of copies, episode i starts from the same state."""
        env = lambda n_envs: make_vec_env("Pendulum-v1", n_envs)  # noqa: E731
        model = TD3X("MlpPolicy", "Pendulum-v1", **tiny())
        episodes = play_episodes(model, env(4), 4, seed=7)
        assert len({episode.episode_return for episode in episodes}) == 4
        assert all(episode.length == 200 for episode in episodes)
        for idx in range(4):
            np.testing.assert_allclose(play_episodes(model, env(1), 1, seed=7 + idx)[0], episodes[idx], rtol=1e-4)
        assert play_episodes(model, env(4), 3, seed=7) == episodes[:3]

    def test_first_episode_of_each_copy(self) -> None:
        """A copy that ends early continues, and its next episode does not count."""
        env = vec_env(CountingEnv([Episode(2, True)]), CountingEnv([Episode(5, False)]))
        assert play_episodes(self.model(), env, 2) == [(3.0, 2), (15.0, 5)]

    def test_returns_are_raw(self, run_folder: Path) -> None:
        run = ZooRun(run_folder)
        model = run.load_agent(run.best_agent)
        assert play_episodes(model, run.make_env(2), 2) == [(15.0, 5), (15.0, 5)]

    def test_episode_that_a_wrapper_around_monitor_cuts(self, folder: Path) -> None:
        limit = {"gymnasium.wrappers.TimeLimit": {"max_episode_steps": 2}}
        change(folder, "config.yml", normalize=False, env_wrapper=limit)
        run = ZooRun(folder)
        assert play_episodes(run.load_agent(run.last_agent), run.make_env(3), 3) == [(3.0, 2)] * 3

    def test_lost_life_is_not_the_end_of_the_game(self) -> None:
        class Game(CountingEnv):
            """One life is lost at step 2 of 4."""

            @property
            def ale(self) -> Any:
                return type("Ale", (), {"lives": lambda _: 2 if self.steps < 2 else 1 if self.steps < 4 else 0})()

        env = DummyVecEnv([lambda: EpisodicLifeEnv(Monitor(Game([Episode(4, True)])))])
        assert play_episodes(self.model(), env, 1) == [(10.0, 4)]

    def test_recurrent_policy_is_given_its_state(self) -> None:
        env = counting_vec_env(2)
        model = RecurrentPPO("MlpLstmPolicy", env, n_steps=4, batch_size=4, device="cpu", seed=0)
        states: list[Any] = []
        predict = model.predict

        def recorded(obs: Any, state: Any, starts: np.ndarray, deterministic: bool) -> Any:
            states.append((state, starts.copy()))
            return predict(obs, state, starts, deterministic)

        model.predict = recorded  # type: ignore[assignment]
        steps = play_steps(model, env)
        for _ in range(7):
            next(steps)
        assert states[0][0] is None
        assert all(state is not None for state, _ in states[1:])
        assert [starts[0] for _, starts in states] == [True, False, False, False, False, True, False]
