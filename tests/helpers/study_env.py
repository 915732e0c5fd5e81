"""An environment with short episodes for studies, registered with Gymnasium where this module is imported."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

EPISODE_LENGTH = 10


class PointEnv(gym.Env[np.ndarray, np.ndarray]):
    """
    A point that moves by the action, and 1 for each step.

    :param delay: duration of a step in seconds, after the first ones, which are enough for a test of an agent
    """

    def __init__(self, delay: float = 0.0) -> None:
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = spaces.Box(-2, 1, (2,), np.float32)
        self.delay = delay
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.point = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.point, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps > 2 * EPISODE_LENGTH:
            time.sleep(self.delay)
        self.point = np.clip(self.point + 0.1 * action, -10, 10).astype(np.float32)
        return self.point, 1.0, False, False, {}


class LivesEnv(PointEnv):
    """The same with the lives of a game of Atari: three, of which one is lost after each three steps."""

    @property
    def ale(self) -> "LivesEnv":
        return self

    def lives(self) -> int:
        return 3 - self.steps % EPISODE_LENGTH // 3


gym.register("StudyPoint-v0", f"{__name__}:PointEnv", max_episode_steps=EPISODE_LENGTH)
gym.register("StudyLives-v0", f"{__name__}:LivesEnv", max_episode_steps=EPISODE_LENGTH)
