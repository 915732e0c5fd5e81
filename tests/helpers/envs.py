"""Small deterministic environments, and tiny agents to train in them."""

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.envs import FakeImageEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X


def tiny(**kwargs: Any) -> dict[str, Any]:
    """
    Return constructor arguments of an agent that trains as fast as possible.

    :param kwargs: Arguments that replace the defaults
    :return: The arguments
    """
    return {
        # A new dictionary each time, because SB3's DDPG writes into it
        "policy_kwargs": {"net_arch": [8]},
        "buffer_size": 1000,
        "batch_size": 4,
        "learning_starts": 5,
        "seed": 0,
        **kwargs,
    }


def tiny_agent(env: Any = None, policy: Any = "MlpPolicy", cls: Any = TD3X, **kwargs: Any) -> Any:
    """
    Make an agent that trains as fast as possible.

    :param env: Its env; None for a ``CountingEnv``
    :param policy: Its policy
    :param cls: Its class
    :param kwargs: Further constructor arguments
    :return: The agent
    """
    return cls(policy, CountingEnv() if env is None else env, **tiny(**kwargs))


def zip_of(model: Any, **kwargs: Any) -> io.BytesIO:
    """Save an agent in memory, with arguments of ``save``, and return the zip file at its start."""
    file = io.BytesIO()
    model.save(file, **kwargs)
    file.seek(0)
    return file


def saved_and_loaded(model: Any, **kwargs: Any) -> TD3X:
    """
    Save an agent, and load it as a TD3X agent.

    :param model: The agent
    :param kwargs: Arguments of ``load``
    :return: The loaded agent
    """
    return TD3X.load(zip_of(model), **{"trusted": True, **kwargs})


class Episode(NamedTuple):
    """
    An episode of ``CountingEnv``.

    :param length: Number of steps
    :param terminated: Whether it ends in a terminal state; otherwise it is truncated
    :param last_reward: Reward of the last step; None for the number of that step
    """

    length: int
    terminated: bool
    last_reward: float | None = None


class CountingEnv(gym.Env[np.ndarray, np.ndarray]):
    """
    An env that counts its episodes and steps.

    Observations are [number of the episode, number of the step], and the reward is the number of the step. Actions
    change nothing, so tests know every transition in advance.

    :param episodes: The episodes, played in this order again and again
    :param first_episode: Number of the first episode, to distinguish the envs of a ``VecEnv``
    :param action_space: The action space; None for [-1, 1]
    """

    def __init__(
        self,
        episodes: Sequence[Episode] = (Episode(5, True), Episode(3, False)),
        first_episode: int = 0,
        action_space: spaces.Space | None = None,
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = action_space or spaces.Box(-1, 1, (1,), np.float32)
        self.episodes = list(episodes)
        self.first_episode = first_episode
        self.n_resets = 0
        self.steps = 0

    def _obs(self) -> np.ndarray:
        return np.array([self.first_episode + self.n_resets - 1, self.steps], dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_resets += 1
        self.steps = 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        episode = self.episodes[(self.n_resets - 1) % len(self.episodes)]
        last = self.steps >= episode.length
        reward = float(self.steps)
        if last and episode.last_reward is not None:
            reward = episode.last_reward
        return self._obs(), reward, last and episode.terminated, last and not episode.terminated, {"step": self.steps}


class RecordingEnv(CountingEnv):
    """A ``CountingEnv`` that records its actions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actions: list[np.ndarray] = []

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.actions.append(np.array(action))
        return super().step(action)


class SpacesEnv(gym.Env):
    """
    An env that can be reset but not stepped, for tests that only need its spaces.

    :param observation_space: The observation space
    :param action_space: The action space
    """

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}


def image_env(**kwargs: Any) -> FakeImageEnv:
    """Make an env with gray images of 36 x 36 pixels, the smallest that ``NatureCNN`` accepts."""
    return FakeImageEnv(**{"screen_height": 36, "screen_width": 36, "n_channels": 1, "discrete": False, **kwargs})


class DictObs(gym.ObservationWrapper):
    """A wrapper that returns the observation twice in a dictionary, once negated."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict({"count": env.observation_space, "minus": env.observation_space})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"count": observation, "minus": -observation}


class Poison(gym.Wrapper):
    """
    A wrapper that inserts a bad value once.

    :param env: The env
    :param quantity: What to change: ``reset`` for the last entry of the observation after a reset, ``observation`` for
        the last entry of the observation after a step, ``reward`` for the reward
    :param at: Number of the reset or step, counted from 1
    :param value: The bad value
    :param key: Key of the observation to change, for dictionary observations
    """

    def __init__(self, env: gym.Env, quantity: str, at: int, value: float = np.nan, key: str | None = None) -> None:
        super().__init__(env)
        self.quantity = quantity
        self.at = at
        self.value = value
        self.key = key
        self.n_resets = 0
        self.n_steps = 0

    def _poisoned(self, obs: Any) -> Any:
        if self.key is not None:
            return {**obs, self.key: self._poisoned_array(obs[self.key])}
        return self._poisoned_array(obs)

    def _poisoned_array(self, obs: np.ndarray) -> np.ndarray:
        obs = obs.copy()
        obs[-1] = self.value
        return obs

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self.n_resets += 1
        if self.quantity == "reset" and self.n_resets == self.at:
            obs = self._poisoned(obs)
        return obs, info

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.n_steps += 1
        if self.n_steps == self.at and self.quantity == "observation":
            obs = self._poisoned(obs)
        if self.n_steps == self.at and self.quantity == "reward":
            reward = self.value
        return obs, reward, terminated, truncated, info


def readable(value: Any) -> str:
    """Return the test id of a parameter, without function addresses, which differ between pytest-xdist processes."""
    return re.sub(r"(<locals>\.)?| at 0x\w+", "", str(value))


def vec_env(*envs: gym.Env) -> DummyVecEnv:
    """Combine envs in a ``DummyVecEnv``, each wrapped in a ``Monitor``."""
    return DummyVecEnv([lambda env=env: Monitor(env) for env in envs])


def counting_vec_env(n_envs: int, episodes: Sequence[Episode] = (Episode(5, True), Episode(3, False))) -> DummyVecEnv:
    """Make a ``VecEnv`` of counting envs whose first episodes are numbered 0, 100, 200, ..."""
    return vec_env(*(CountingEnv(episodes, 100 * idx) for idx in range(n_envs)))
