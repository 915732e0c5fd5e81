"""Small deterministic environments that several test modules share, and short ways to make agents of them."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv


def tiny(**kwargs: Any) -> dict[str, Any]:
    """
    :param kwargs: constructor arguments that matter to a test
    :return: the same with those of an agent that is as small as possible and needs no learning
    """
    return {
        # Made anew: SB3's DDPG writes into the user's dictionary
        "policy_kwargs": {"net_arch": [8]},
        "buffer_size": 1000,
        "batch_size": 4,
        "learning_starts": 5,
        "device": "cpu",
        "seed": 0,
        **kwargs,
    }


class Episode(NamedTuple):
    """
    How an episode of ``CountingEnv`` goes.

    :param length: its number of steps
    :param terminated: whether it ends in a terminal state; otherwise it is cut off
    :param last_reward: reward of its last step; by default the number of that step
    """

    length: int
    terminated: bool
    last_reward: float | None = None


class CountingEnv(gym.Env[np.ndarray, np.ndarray]):
    """
    Counts: the observation is [number of the episode, steps in it], the reward the number of the step.
    Nothing depends on the actions, so every transition is known beforehand.

    :param episodes: the episodes, played in turn again and again
    :param first_episode: number of the first episode; tells the envs of a ``VecEnv`` apart
    :param action_space: the action space
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


class DictObs(gym.ObservationWrapper):
    """The observation twice in a dictionary, once with its sign changed."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Box)
        self.observation_space = spaces.Dict({"count": env.observation_space, "minus": env.observation_space})

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {"count": observation, "minus": -observation}


class Poison(gym.Wrapper):
    """
    Puts a bad value where an env of the real world may have one.

    :param env: the env
    :param quantity: ``reset``: the last entry of the observation after a reset; ``observation``: of the one after
        a step; ``reward``: the reward
    :param at: at which reset or step of the env's life, counted from 1
    :param value: the bad value
    :param key: the entry of a Dict observation
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
    """
    :param value: a test's parameter
    :return: how to name it: without the addresses of functions, which differ between the processes of pytest-xdist
    """
    return re.sub(r"(<locals>\.)?| at 0x\w+", "", str(value))


def vec_env(*envs: gym.Env) -> DummyVecEnv:
    """
    :param envs: envs, each with a ``Monitor`` around it here
    :return: all of them as one
    """
    return DummyVecEnv([lambda env=env: Monitor(env) for env in envs])  # type: ignore[misc]


def counting_vec_env(n_envs: int, episodes: Sequence[Episode] = (Episode(5, True), Episode(3, False))) -> DummyVecEnv:
    """
    :param n_envs: number of envs
    :param episodes: the episodes of each of them
    :return: counting envs whose first episodes are numbered 0, 100, 200, ...
    """
    return vec_env(*(CountingEnv(episodes, 100 * idx) for idx in range(n_envs)))
