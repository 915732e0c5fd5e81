"""Bad data from envs, actors and noises stops training before it is stored."""

import io
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, DictObs, Episode, Poison, saved_and_loaded, tiny_agent, vec_env
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X

NAN, INF = float("nan"), float("inf")


def assert_finite_buffer(model: TD3X, stored: int) -> None:
    """Assert that ``stored`` transitions of each env are in the buffer, all of them finite."""
    buffer = model.replay_buffer
    assert (buffer.pos, buffer.full) == (stored, False)
    for name in ("observations", "next_observations", "actions", "rewards"):
        arrays = getattr(buffer, name)
        for array in arrays.values() if isinstance(arrays, dict) else [arrays]:
            assert np.isfinite(array).all(), name


def assert_usable_when_saved(model: TD3X) -> None:
    """Assert that the agent from before the bad value can still be saved, loaded and used."""
    loaded = saved_and_loaded(model)
    for key, value in loaded.policy.state_dict().items():
        assert th.isfinite(value).all(), key
    space = model.observation_space
    obs: Any = (
        {key: np.ones(2, np.float32) for key in space} if isinstance(space, spaces.Dict) else np.ones(2, np.float32)
    )
    assert np.isfinite(loaded.predict(obs)[0]).all()


EPISODES = (Episode(6, True), Episode(4, False))
# Case: (quantity, number of the reset or step, transitions stored until then, its name in the error)
BAD_DATA = {
    "first reset": ("reset", 1, 0, "observation after the reset"),
    "reset after a termination": ("reset", 2, 5, "observation after the reset"),
    "reset after a time-out": ("reset", 3, 9, "observation after the reset"),
    "observation": ("observation", 3, 2, "observation"),
    "last observation before a termination": ("observation", 6, 5, "observation"),
    "last observation before a time-out": ("observation", 10, 9, "observation"),
    "observation after updates": ("observation", 18, 17, "observation"),
    "reward": ("reward", 3, 2, "reward"),
    "reward of a termination": ("reward", 6, 5, "reward"),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("normalize", [False, True], ids=["", "VecNormalize"])
@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_stops_training_before_it_is_stored(case: str, n_envs: int, normalize: bool) -> None:
    quantity, at, stored, named = BAD_DATA[case]
    bad_env = n_envs // 2
    # VecNormalize clips the last observation of an episode, so infinity is stored as a finite number
    for value in (NAN,) if normalize and case.startswith("last") else (NAN, INF, -INF):
        envs: list[gym.Env] = [CountingEnv(EPISODES, 100 * idx) for idx in range(n_envs)]
        envs[bad_env] = Poison(envs[bad_env], quantity, at, value)
        env: VecEnv = vec_env(*envs)
        if normalize:
            env = VecNormalize(env)
        model = tiny_agent(env, learning_starts=12, action_noise=normal_noise())
        timestep = 0 if case == "first reset" else (stored + 1) * n_envs
        with pytest.raises(ValueError, match=rf"The {named} of env {bad_env} is {value}\b.* at timestep {timestep}\b"):
            model.learn(60)
        assert_finite_buffer(model, stored)
        assert_usable_when_saved(model)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("quantity", ["reset", "observation"])
def test_bad_entries_of_dict_observations_are_named(quantity: str, n_envs: int) -> None:
    for key in ("count", "minus"):
        envs: list[gym.Env] = [DictObs(CountingEnv(EPISODES)) for _ in range(n_envs)]
        envs[-1] = Poison(envs[-1], quantity, 2, NAN, key)
        model = tiny_agent(vec_env(*envs), "MultiInputPolicy")
        with pytest.raises(ValueError, match=rf"The observation.*'{key}'.* of env {n_envs - 1} is nan"):
            model.learn(60)
        assert_finite_buffer(model, 5 if quantity == "reset" else 1)
        assert_usable_when_saved(model)


@pytest.mark.parametrize("n_envs", [1, 3])
def test_bad_actions_stop_training_before_the_env_receives_them(n_envs: int) -> None:
    model = tiny_agent(vec_env(*(CountingEnv(EPISODES) for _ in range(n_envs))), learning_starts=0, gradient_steps=0)
    model.learn(4 * n_envs)
    with th.no_grad():
        next(model.actor.parameters()).fill_(NAN)
    with pytest.raises(ValueError, match=rf"The action of env 0 is nan at index \[0\] at timestep {4 * n_envs}\b"):
        model.learn(4, reset_num_timesteps=False)
    assert_finite_buffer(model, 4)
    assert model.num_timesteps == 4 * n_envs
    model.save(io.BytesIO())


class BadNoise(ActionNoise):
    """Noise that is NaN for the second env at the third call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __call__(self) -> np.ndarray:
        self.calls += 1
        sample = np.zeros((2, 1))
        if self.calls == 3:
            sample[1] = NAN
        return sample

    def reset(self, indices: list[int] | None = None) -> None:
        pass


def test_bad_noise_stops_training() -> None:
    model = tiny_agent(vec_env(CountingEnv(), CountingEnv()), learning_starts=0)
    bad_noise = BadNoise()

    def collect_rollouts() -> None:
        callback = model._init_callback(None)
        model.collect_rollouts(model.env, callback, model.train_freq, model.replay_buffer, bad_noise)

    model.learn(2)
    collect_rollouts()
    bad_noise.calls = 2
    with pytest.raises(ValueError, match=r"The action of env 1 is nan"):
        collect_rollouts()
    assert_finite_buffer(model, 2)


@pytest.mark.parametrize("again", ["learn", "load"])
def test_a_bad_observation_at_the_start_of_a_second_training_stops_it(again: str) -> None:
    """During the warm-up, in which no action depends on it."""
    env = vec_env(Poison(CountingEnv(EPISODES), "reset", 2))
    model = tiny_agent(env, learning_starts=100).learn(3)
    if again == "load":
        model = saved_and_loaded(model, env=env)
    stored = model.replay_buffer.pos
    with pytest.raises(ValueError, match="The observation after the reset of env 0 is nan"):
        model.learn(3)
    assert_finite_buffer(model, stored)


class Float64Rewards(DummyVecEnv):
    """A ``VecEnv`` with rewards in float64, as ``SubprocVecEnv`` returns them."""

    def __init__(self, env_fns: list[Callable[[], gym.Env]]) -> None:
        super().__init__(env_fns)
        self.buf_rews = self.buf_rews.astype(np.float64)


def test_rewards_too_large_for_float32_stop_training() -> None:
    """The replay buffer would convert them to infinity."""
    model = tiny_agent(Float64Rewards([lambda: Poison(CountingEnv(EPISODES), "reward", 3, 1e39)]))
    with pytest.raises(ValueError, match="The reward of env 0 is"):
        model.learn(20)
    assert_finite_buffer(model, 2)


class Float64Observations(gym.ObservationWrapper):
    """A wrapper with observations in float64, too large for float32 at the third step of each episode."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation.astype(np.float64) * (1e300 if observation[1] == 3 else 1)


def test_observations_too_large_for_float32_stop_training() -> None:
    """The networks would convert them to infinity."""
    model = tiny_agent(Float64Observations(CountingEnv(EPISODES)))
    with pytest.raises(ValueError, match="The observation of env 0 is"):
        model.learn(20)
    assert_finite_buffer(model, 2)


def test_integer_observations_are_accepted() -> None:
    class Integers(gym.ObservationWrapper):
        def __init__(self) -> None:
            super().__init__(CountingEnv())
            self.observation_space = spaces.Box(-1000, 1000, (2,), np.int64)

        def observation(self, observation: np.ndarray) -> np.ndarray:
            return observation.astype(np.int64)

    assert tiny_agent(Integers()).learn(30).num_timesteps == 30
