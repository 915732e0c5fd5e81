"""Errors in a training with checkpoints: the training is saved first, and then the error itself is raised."""

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from callbacks import At
from checkpoints import counting_agent, fail, file_size_limit, files_in, saved_timesteps
from envs import CountingEnv, Episode, Poison, counting_vec_env, tiny, vec_env
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import list_checkpoints


class Failing(gym.Wrapper):
    """
    An env that calls a function at one step of its life.

    :param env: the env
    :param at: number of the step
    :param function: the function
    """

    def __init__(self, env: gym.Env, at: int, function: Callable[[], Any] = fail) -> None:
        super().__init__(env)
        self.at = at
        self.function = function
        self.n_steps = 0

    def step(self, action: np.ndarray) -> Any:
        self.n_steps += 1
        if self.n_steps == self.at:
            self.function()
        return self.env.step(action)


def failing_hook(batch: Any) -> Any:
    if batch.infos[0]["step"] == 5:
        fail()
    return batch.rewards, batch.terminations


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *(("env", LookupError), ("callback", LookupError), ("hook", LookupError)),
        *(("NaN", ValueError), ("Ctrl-C", KeyboardInterrupt)),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_training_is_saved_at_an_error(where: str, error: type[BaseException], is_first: bool, tmp_path: Path) -> None:
    """Before the first checkpoint, and after some."""
    env: gym.Env = CountingEnv([Episode(50, True)])
    kwargs, callbacks = {}, []
    if where == "env":
        env = Failing(env, 5)
    elif where == "NaN":
        env = Poison(env, "observation", 5)
    elif where == "hook":
        kwargs = {"reward_shaping": failing_hook}
    else:
        callbacks = [At(5, fail if where == "callback" else lambda: signal.raise_signal(signal.SIGINT))]
    model = TD3X("MlpPolicy", vec_env(env), **tiny(n_steps=2, learning_starts=1, **kwargs))
    with pytest.raises(error) as caught:
        model.learn(20, [*callbacks, ResumableCheckpoint(tmp_path, 100 if is_first else 2)])
    assert where not in ("env", "callback", "hook") or caught.traceback[-1].name == "fail"
    # The fifth transition was not stored
    assert saved_timesteps(tmp_path) == 4
    resumed = TD3X.resume(tmp_path, counting_vec_env(1), device="cpu", reward_shaping=None)
    assert resumed.replay_buffer.pos == 4
    assert resumed.replay_buffer.timeouts[3] == 1
    resumed.learn(20 - 4, ResumableCheckpoint(tmp_path, 10), reset_num_timesteps=False)
    assert saved_timesteps(tmp_path) == 20


def test_full_disk_does_not_hide_the_error(tmp_path: Path) -> None:
    model = counting_agent()
    with file_size_limit(100), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LookupError, match="stopped by the test"):
            model.learn(20, [At(5, fail), ResumableCheckpoint(tmp_path, 100)])
    assert not list_checkpoints(tmp_path)


def test_zoo_may_end_a_training_again_after_an_error(tmp_path: Path) -> None:
    callback = ResumableCheckpoint(tmp_path, 10)
    with pytest.raises(LookupError):
        counting_agent().learn(20, [callback, At(15, fail)])
    before = files_in(tmp_path)
    callback.on_training_end()
    assert files_in(tmp_path) == before
    assert saved_timesteps(tmp_path) == 14


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_dead_process_names_its_env(start_method: str, tmp_path: Path) -> None:
    """After a fork, other processes hold the pipe open, and SB3 waits forever."""

    def make_env() -> gym.Env:
        return Monitor(CountingEnv())

    def make_dying_env() -> gym.Env:
        return Failing(make_env(), 5, lambda: os.kill(os.getpid(), signal.SIGKILL))

    env = VecNormalize(SubprocVecEnv([make_env, make_env, make_dying_env], start_method))
    model = TD3X("MlpPolicy", env, **tiny(seed=40))
    message = r"env 2 \(seed 42\) was killed by signal 9 at timestep 12"
    with pytest.raises(RuntimeError, match=message):
        model.learn(60, ResumableCheckpoint(tmp_path, 100))
    assert saved_timesteps(tmp_path) == 12


@pytest.mark.parametrize("nested", [False, True])
def test_one_folder_for_two_callbacks_is_refused(tmp_path: Path, nested: bool) -> None:
    first = ResumableCheckpoint(tmp_path / "run")
    second: BaseCallback = ResumableCheckpoint(f"{tmp_path}/../{tmp_path.name}/run")
    with pytest.raises(ValueError, match=r"save_path='.*run' is not allowed for two ResumableCheckpoint"):
        counting_agent().learn(20, [first, CallbackList([second])] if nested else [first, second])
    assert list(tmp_path.iterdir()) == []


def test_two_callbacks_with_a_folder_each(tmp_path: Path) -> None:
    callbacks = [ResumableCheckpoint(tmp_path / name) for name in "ab"]
    counting_agent().learn(20, callbacks)
    assert [saved_timesteps(tmp_path / name) for name in "ab"] == [20, 20]
