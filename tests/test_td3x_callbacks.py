"""SB3's callbacks in a training with TD3X."""

import multiprocessing
import pathlib
import time
from typing import Any

import numpy as np
import pytest
from envs import CountingEnv, counting_vec_env, tiny_agent
from noises import normal_noise
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_td3x import TD3X


class CountCalls(BaseCallback):
    """
    A callback that counts the calls of its methods.

    :param stop_after: Number of steps after which it stops the training; None for never
    """

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.calls = {"start": 0, "rollout start": 0, "step": 0, "rollout end": 0, "end": 0}
        self.stop_after = stop_after

    def _on_training_start(self) -> None:
        self.calls["start"] += 1

    def _on_rollout_start(self) -> None:
        self.calls["rollout start"] += 1

    def _on_step(self) -> bool:
        self.calls["step"] += 1
        assert {"actions", "buffer_actions", "new_obs", "rewards", "dones", "infos"} <= self.locals.keys()
        return self.calls["step"] != self.stop_after

    def _on_rollout_end(self) -> None:
        self.calls["rollout end"] += 1

    def _on_training_end(self) -> None:
        self.calls["end"] += 1


@pytest.mark.lowest_sb3
def test_callbacks_are_called() -> None:
    callback = CountCalls()
    tiny_agent(train_freq=2).learn(20, callback)
    assert callback.calls == {"start": 1, "rollout start": 10, "step": 20, "rollout end": 10, "end": 1}


@pytest.mark.lowest_sb3
def test_a_callback_stops_the_training() -> None:
    callback = CountCalls(stop_after=13)
    model = tiny_agent().learn(100, callback)
    assert model.num_timesteps == callback.calls["step"] == 13
    assert callback.calls["end"] == 1
    assert model.replay_buffer.pos == 12
    model.learn(5, reset_num_timesteps=False)
    assert model.num_timesteps == 18


def test_functions_and_lists_as_callbacks() -> None:
    assert tiny_agent().learn(10, lambda variables, _: variables["num_collected_steps"] < 7).num_timesteps == 10
    assert tiny_agent().learn(10, lambda variables, _: variables["self"].num_timesteps < 7).num_timesteps == 7
    assert tiny_agent().learn(10, [CountCalls(), CountCalls(stop_after=4)]).num_timesteps == 4


@pytest.mark.lowest_sb3
def test_evaluations_checkpoints_and_events(tmp_path: pathlib.Path) -> None:
    counter = CountCalls()
    evaluation = EvalCallback(
        VecNormalize(counting_vec_env(1), training=False, norm_reward=False),
        callback_on_new_best=StopTrainingOnRewardThreshold(1e9),
        callback_after_eval=StopTrainingOnNoModelImprovement(100),
        n_eval_episodes=2,
        eval_freq=10,
        log_path=str(tmp_path),
        best_model_save_path=str(tmp_path),
        verbose=0,
    )
    checkpoints = CheckpointCallback(10, str(tmp_path), save_replay_buffer=True, save_vecnormalize=True)
    callbacks = CallbackList([evaluation, checkpoints, EveryNTimesteps(8, counter)])
    model = tiny_agent(VecNormalize(counting_vec_env(2)), action_noise=normal_noise()).learn(60, callbacks)
    assert evaluation.last_mean_reward == pytest.approx((15 + 6) / 2)
    assert counter.calls["step"] == 7
    saved = np.load(tmp_path / "evaluations.npz")
    np.testing.assert_array_equal(saved["timesteps"], [20, 40, 60])
    best = TD3X.load(tmp_path / "best_model")
    assert best.num_timesteps == 20
    last = TD3X.load(tmp_path / "rl_model_60_steps", env=VecNormalize(counting_vec_env(2)), device="cpu")
    assert last.num_timesteps == 60
    last.load_replay_buffer(tmp_path / "rl_model_replay_buffer_60_steps.pkl")
    assert last.replay_buffer.pos == 29  # callbacks run before the step is stored
    VecNormalize.load(str(tmp_path / "rl_model_vecnormalize_60_steps.pkl"), counting_vec_env(2))
    assert last.learn(10, reset_num_timesteps=False).num_timesteps == 70
    assert model.num_timesteps == 60


@pytest.mark.parametrize(
    ("callback", "timesteps"),
    [
        (
            lambda: EvalCallback(
                counting_vec_env(1), StopTrainingOnRewardThreshold(1.0, verbose=0), eval_freq=7, verbose=0
            ),
            7,
        ),
        (lambda: StopTrainingOnMaxEpisodes(3), 13),
    ],
)
def test_stopping_callbacks_of_sb3(callback: Any, timesteps: int) -> None:
    assert tiny_agent().learn(100, callback()).num_timesteps == timesteps


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_agent().learn(20, progress_bar=True).num_timesteps == 20
    assert "20/20" in "".join(capsys.readouterr())


class Fork(BaseCallback):
    """A callback that starts a process which outlives the training."""

    def _on_training_start(self) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        self.process.start()

    def _on_step(self) -> bool:
        return True


def test_training_does_not_wait_for_processes_of_callbacks() -> None:
    env = SubprocVecEnv([CountingEnv] * 2, start_method="fork")
    callback = Fork()
    tiny_agent(env).learn(20, callback)
    assert callback.process.is_alive()
    callback.process.kill()
    env.close()
