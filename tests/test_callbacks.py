"""StopWhenSolved: when it stops, which env it evaluates in, and that it changes nothing else in the training."""

import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import tiny_agent
from gymnasium import spaces
from rl_zoo3.exp_manager import ExperimentManager
from rl_zoo3.utils import get_callback_list
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.callbacks import StopWhenSolved, tuning

EPISODE = 5


class Counter(gym.Env):
    """An env with episodes of five steps. The k-th episode returns k, whatever the agent does."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self) -> None:
        self.episode = 0
        self.steps = 0
        self.first_draws: list[float] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self.steps > 0 or self.episode == 0:  # two resets in a row start one episode
            self.episode += 1
        self.steps = 0
        draw = self.np_random.normal(size=2)
        self.first_draws.append(float(draw[0]))
        return draw.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        obs = self.np_random.normal(size=2).astype(np.float32)
        return obs, self.episode / EPISODE, False, self.steps == EPISODE, {}


def counter_agent(env: Any = None, **kwargs: Any) -> TD3X:
    return tiny_agent(env or Counter(), learning_starts=10, **kwargs)


def zoo_callback(**kwargs: Any) -> StopWhenSolved:
    """Make the callback as the zoo does from YAML."""
    (callback,) = get_callback_list({"callback": [{"sb3_td3x.callbacks.StopWhenSolved": kwargs}]})
    assert isinstance(callback, StopWhenSolved)
    return callback


def test_stops_when_the_mean_of_the_window_reaches_the_threshold(capsys: pytest.CaptureFixture[str]) -> None:
    # The k-th evaluation returns k. The last three returns are 4, 5, 6 after the sixth training episode
    callback = StopWhenSolved(5.0, window=3, eval_env=Counter())
    model = counter_agent().learn(1000, callback)
    assert model.num_timesteps == 6 * EPISODE
    assert list(callback.returns) == [4, 5, 6]
    assert model.logger.name_to_value["eval/solved_mean"] == 5.0
    assert "SOLVED after 30 timesteps" in capsys.readouterr().out


def test_waits_for_a_full_window_and_prints_nothing_with_verbose_0(capsys: pytest.CaptureFixture[str]) -> None:
    model = counter_agent().learn(1000, StopWhenSolved(-1.0, window=4, eval_env=Counter(), verbose=0))
    assert model.num_timesteps == 4 * EPISODE
    assert capsys.readouterr().out == ""


def test_a_new_training_starts_without_returns() -> None:
    callback = StopWhenSolved(threshold=3.0, window=3, eval_env=Counter(), verbose=0)
    timesteps = [counter_agent().learn(100, callback=callback).num_timesteps for _ in range(2)]
    assert timesteps[0] == 20  # 2 + 3 + 4 >= 9
    # After three episodes of the second training
    assert timesteps[1] == 15
    model = counter_agent().learn(10, callback=callback)
    assert len(callback.returns) == 2
    assert model.learn(5, callback=callback, reset_num_timesteps=False).num_timesteps == 15


def test_does_not_stop_trials_of_hyperparameter_tuning() -> None:
    callback = StopWhenSolved(-1.0, window=2)
    token = tuning.set(True)
    try:
        assert counter_agent().learn(60, callback).num_timesteps == 60
    finally:
        tuning.reset(token)
    assert not callback.returns


def test_trains_to_the_end_if_not_solved() -> None:
    model = counter_agent().learn(60, StopWhenSolved(1000.0, window=3, eval_env=Counter()))
    assert model.num_timesteps == 60


def test_one_evaluation_per_episode_of_several_envs() -> None:
    callback = StopWhenSolved(1000.0, window=100, eval_env=Counter())
    counter_agent(make_vec_env(Counter, n_envs=3)).learn(3 * EPISODE * 2, callback)
    assert list(callback.returns) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("nested", [False, True])
def test_uses_the_env_of_the_eval_callback(nested: bool) -> None:
    eval_env = make_vec_env(Counter, seed=0)
    eval_callback: BaseCallback = EvalCallback(eval_env, eval_freq=10_000)
    if nested:
        eval_callback = EveryNTimesteps(10_000, CallbackList([eval_callback]))
    callback = zoo_callback(threshold=5, window=3.0)
    model = counter_agent().learn(1000, [callback, eval_callback])
    assert callback.eval_env is eval_env
    assert model.num_timesteps == 6 * EPISODE


def test_needs_an_env_or_an_eval_callback() -> None:
    with pytest.raises(ValueError, match=r"eval_env=None is not allowed without an EvalCallback .* --eval-freq > 0"):
        counter_agent().learn(10, zoo_callback(threshold=5))


def test_returns_are_raw_and_statistics_are_synchronized() -> None:
    env = VecNormalize(make_vec_env(Counter))
    eval_env = VecNormalize(make_vec_env(Counter), training=False)
    callback = StopWhenSolved(5.0, window=3, eval_env=eval_env)
    model = counter_agent(env, reward_shaping={"sb3_td3x.shaping.RewardScale": {"scale": 100.0}}).learn(1000, callback)
    assert list(callback.returns) == [4, 5, 6]
    assert model.num_timesteps == 6 * EPISODE
    # The statistics include the last step before the evaluation
    np.testing.assert_array_equal(eval_env.obs_rms.mean, env.obs_rms.mean)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_training_is_the_same_with_and_without_it(normalize: bool) -> None:
    def parameters(*callbacks: BaseCallback) -> tuple[list[th.Tensor], tuple[Any, ...]]:
        env = make_vec_env("Pendulum-v1", n_envs=2, seed=3, env_kwargs={"max_episode_steps": 20})
        model = counter_agent(VecNormalize(env) if normalize else env).learn(100, list(callbacks))
        return list(model.policy.state_dict().values()), (random.random(), np.random.rand(), th.rand(()))  # noqa: NPY002

    env = make_vec_env("Pendulum-v1", seed=1, env_kwargs={"max_episode_steps": 20})
    callback = StopWhenSolved(1000.0, eval_env=VecNormalize(env, training=False) if normalize else env)
    with_callback, draws_with = parameters(callback)
    without_callback, draws_without = parameters()
    assert len(callback.returns) == 4
    assert all(th.equal(*pair) for pair in zip(with_callback, without_callback, strict=True))
    assert draws_with == draws_without


def test_a_users_env_is_seeded_with_the_models_seed() -> None:
    eval_envs = [Counter(), Counter()]
    for eval_env in eval_envs:
        counter_agent().learn(20, StopWhenSolved(1000.0, eval_env=eval_env))
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
def test_bad_arguments_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopWhenSolved(**kwargs)
