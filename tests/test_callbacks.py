"""StopWhenSolved: when it stops, what it evaluates in, and that it leaves the training alone."""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import get_callback_list
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.callbacks import StopWhenSolved, tuning

EPISODE = 5


class Counter(gym.Env):
    """Episodes of five steps; the k-th episode of this copy returns k, whatever the agent does."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.episode = 0
        self.steps = 0
        self.first_draws: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self.steps > 0 or self.episode == 0:  # two resets in a row begin one episode
            self.episode += 1
        self.steps = 0
        draw = self.np_random.normal(size=2)
        self.first_draws.append(float(draw[0]))
        return draw.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        obs = self.np_random.normal(size=2).astype(np.float32)
        return obs, self.episode / EPISODE, False, self.steps == EPISODE, {}


def make_model(env: Any = None, **kwargs: Any) -> TD3X:
    settings: dict[str, Any] = {"learning_starts": 10, "batch_size": 4, "buffer_size": 200, "seed": 3}
    settings["policy_kwargs"] = {"net_arch": [8]}
    return TD3X("MlpPolicy", env or Counter(), device="cpu", **(settings | kwargs))


def zoo_callback(**kwargs: Any) -> StopWhenSolved:
    """Built as the zoo builds it from YAML"""
    (callback,) = get_callback_list({"callback": [{"sb3_td3x.callbacks.StopWhenSolved": kwargs}]})
    assert isinstance(callback, StopWhenSolved)
    return callback


def test_stops_at_the_first_window_whose_mean_reaches_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    # The k-th evaluation returns k: the mean of the last three reaches 5 at 4, 5, 6, after the sixth training episode
    callback = StopWhenSolved(5.0, window=3, eval_env=Counter())
    model = make_model().learn(1000, callback)
    assert model.num_timesteps == 6 * EPISODE
    assert list(callback.returns) == [4, 5, 6]
    assert model.logger.name_to_value["eval/solved_mean"] == 5.0
    assert "SOLVED after 30 timesteps" in capsys.readouterr().out


def test_waits_for_a_full_window_and_is_silent_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model().learn(1000, StopWhenSolved(-1.0, window=4, eval_env=Counter(), verbose=0))
    assert model.num_timesteps == 4 * EPISODE
    assert capsys.readouterr().out == ""


def test_another_training_begins_with_no_returns() -> None:
    callback = StopWhenSolved(threshold=3.0, window=3, eval_env=Counter(), verbose=0)
    timesteps = [make_model().learn(100, callback=callback).num_timesteps for _ in range(2)]
    assert timesteps[0] == 20  # 2 + 3 + 4 >= 9
    # Its own three episodes, not two of the first training's and one
    assert timesteps[1] == 15
    model = make_model().learn(10, callback=callback)
    assert len(callback.returns) == 2
    assert model.learn(5, callback=callback, reset_num_timesteps=False).num_timesteps == 15


def test_trials_are_of_one_length() -> None:
    callback = StopWhenSolved(-1.0, window=2)
    token = tuning.set(True)
    try:
        assert make_model().learn(60, callback).num_timesteps == 60
    finally:
        tuning.reset(token)
    assert not callback.returns


def test_goes_on_to_the_end_when_not_solved() -> None:
    model = make_model().learn(60, StopWhenSolved(1000.0, window=3, eval_env=Counter()))
    assert model.num_timesteps == 60


def test_one_evaluation_for_each_of_several_envs() -> None:
    callback = StopWhenSolved(1000.0, window=100, eval_env=Counter())
    make_model(make_vec_env(Counter, n_envs=3)).learn(3 * EPISODE * 2, callback)
    assert list(callback.returns) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("nested", [False, True])
def test_finds_the_env_of_the_eval_callback_beside_it(nested: bool) -> None:
    eval_env = make_vec_env(Counter, seed=0)
    eval_callback: BaseCallback = EvalCallback(eval_env, eval_freq=10_000)
    if nested:
        eval_callback = EveryNTimesteps(10_000, CallbackList([eval_callback]))
    callback = zoo_callback(threshold=5, window=3.0)
    model = make_model().learn(1000, [callback, eval_callback])
    assert callback.eval_env is eval_env
    assert model.num_timesteps == 6 * EPISODE


def test_no_env_to_evaluate_in() -> None:
    with pytest.raises(ValueError, match=r"eval_env=None is not allowed without an EvalCallback .* --eval-freq > 0"):
        make_model().learn(10, zoo_callback(threshold=5))


def test_returns_are_raw_and_statistics_those_of_the_training() -> None:
    env = VecNormalize(make_vec_env(Counter))
    eval_env = VecNormalize(make_vec_env(Counter), training=False)
    callback = StopWhenSolved(5.0, window=3, eval_env=eval_env)
    model = make_model(env, reward_shaping={"sb3_td3x.shaping.RewardScale": {"scale": 100.0}}).learn(1000, callback)
    assert list(callback.returns) == [4, 5, 6]
    assert model.num_timesteps == 6 * EPISODE
    # The last step of the training has been counted before the evaluation
    assert isinstance(eval_env.obs_rms, RunningMeanStd)
    assert isinstance(env.obs_rms, RunningMeanStd)
    np.testing.assert_array_equal(eval_env.obs_rms.mean, env.obs_rms.mean)


@pytest.mark.parametrize("normalize", [False, True])
def test_training_is_the_same_with_and_without(normalize: bool) -> None:
    def parameters(*callbacks: BaseCallback) -> tuple[list[th.Tensor], tuple[Any, ...]]:
        env = make_vec_env("Pendulum-v1", n_envs=2, seed=3, env_kwargs={"max_episode_steps": 20})
        model = make_model(VecNormalize(env) if normalize else env).learn(100, list(callbacks))
        return list(model.policy.state_dict().values()), (random.random(), np.random.rand(), th.rand(()))  # noqa: NPY002

    env = make_vec_env("Pendulum-v1", seed=1, env_kwargs={"max_episode_steps": 20})
    callback = StopWhenSolved(1000.0, eval_env=VecNormalize(env, training=False) if normalize else env)
    with_callback, draws_with = parameters(callback)
    without_callback, draws_without = parameters()
    assert len(callback.returns) == 4
    assert all(th.equal(*pair) for pair in zip(with_callback, without_callback, strict=True))
    assert draws_with == draws_without


def test_own_env_is_seeded_with_the_models_seed() -> None:
    eval_envs = [Counter(), Counter()]
    for eval_env in eval_envs:
        make_model().learn(20, StopWhenSolved(1000.0, eval_env=eval_env))
    assert eval_envs[0].first_draws == eval_envs[1].first_draws


def test_from_yaml_through_the_zoo(tmp_path: Path) -> None:
    hyperparams = {
        "n_timesteps": 1000,
        "policy_kwargs": {"net_arch": [8]},
        "learning_starts": 10,
        "callback": [{"sb3_td3x.callbacks.StopWhenSolved": {"threshold": -1e6, "window": 2}}],
    }
    manager = ExperimentManager(
        Namespace(), "td3x", "Pendulum-v1", str(tmp_path), hyperparams=hyperparams, log_interval=-1, device="cpu"
    )
    result = manager.setup_experiment()
    assert result is not None
    manager.learn(result[0])
    manager.save_trained_model(result[0])
    assert result[0].num_timesteps == 400
    assert (Path(manager.save_path) / "Pendulum-v1.zip").is_file()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"threshold": float("nan")}, "threshold=nan is not allowed, expected a number"),
        ({"threshold": "200"}, "threshold='200' is not allowed, expected a number"),
        ({"threshold": 200, "window": 0}, "window=0 is not allowed, expected an integer >= 1"),
        ({"threshold": 200, "window": 1.5}, "window=1.5 is not allowed, expected an integer >= 1"),
        ({"threshold": 200, "eval_env": "Pendulum-v1"}, "eval_env='Pendulum-v1' is not allowed, expected an environ"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopWhenSolved(**kwargs)
