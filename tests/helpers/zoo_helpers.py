"""
Two small environments for the zoo's commands, registered with Gymnasium where this module is imported. It stands alone:
the tests copy it to where a user would have a package of environments, for the zoo's ``--gym-packages``.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

EPISODE_LENGTH = 20


class GoalEnv(gym.Env[Any, np.ndarray]):
    """A point in a square that has to come close to a goal; reward 0 there and -1 elsewhere."""

    def __init__(self) -> None:
        square = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), square))
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def _obs(self) -> dict[str, np.ndarray]:
        point = self.point.copy()
        return {"observation": point, "achieved_goal": point.copy(), "desired_goal": self.goal.copy()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self.point = np.zeros(2, np.float32)
        self.goal = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._obs(), {}

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: Any) -> np.ndarray:
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return np.where(distance > 0.3, -1, 0).astype(np.float32)

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        self.point = np.clip(self.point + 0.2 * action, -1, 1).astype(np.float32)
        reward = float(self.compute_reward(self.point, self.goal, {}))
        return self._obs(), reward, False, False, {"is_success": reward == 0}


class ImageEnv(gym.Env[np.ndarray, np.ndarray]):
    """Noise to look at, and 1 for each step."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)

    def _obs(self) -> np.ndarray:
        return self.np_random.integers(0, 256, (36, 36, 1), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self._obs(), 1.0, False, False, {}


gym.register("TD3XGoal-v0", f"{__name__}:GoalEnv", max_episode_steps=EPISODE_LENGTH)
gym.register("TD3XImage-v0", f"{__name__}:ImageEnv", max_episode_steps=EPISODE_LENGTH)
