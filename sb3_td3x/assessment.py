"""Policy checkpoints: which policy of a training plays, by the returns of its episodes (TD7, Fujimoto et al. 2023)."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sb3_td3x.files.records import check_number, register_object


def _build(state: dict[str, Any]) -> "Assessment":
    numbers = {name: check_number(state[name]) for name in ("best_return", "n_episodes", "n_waiting_updates")}
    return Assessment(**numbers, episode_returns=[*map(check_number, state["episode_returns"])])


@register_object(
    *("best_return", "n_episodes", "n_waiting_updates", "episode_returns", "_returns", "_is_whole"), build=_build
)
@dataclass
class Assessment:
    """
    The returns of the whole episodes that the current policy has played in the training, in all envs together. Episodes
    that are running when it is saved do not count later.

    :param best_return: the lowest return of the best policy so far
    :param n_episodes: in how many episodes
    :param n_waiting_updates: updates that wait for the decision
    :param episode_returns: returns of the current policy
    """

    best_return: float = -math.inf
    n_episodes: int = 0
    n_waiting_updates: int = 0
    episode_returns: list[float] = field(default_factory=list)
    # Of the running episodes, (n_envs,): their returns so far, and whether all their steps were this policy's
    _returns: np.ndarray = field(default_factory=lambda: np.zeros(()), init=False, repr=False)
    _is_whole: np.ndarray = field(default_factory=lambda: np.zeros((), dtype=bool), init=False, repr=False)

    def add(self, rewards: np.ndarray, starts: np.ndarray, dones: np.ndarray) -> None:
        """
        Count one step of each env.

        :param rewards: the envs' own rewards, (n_envs,)
        :param starts: whether it was the first step of an episode, (n_envs,)
        :param dones: whether it was the last one, (n_envs,)
        """
        self._returns = np.where(starts, 0.0, self._returns) + rewards
        self._is_whole = self._is_whole | starts
        self.episode_returns += self._returns[self._is_whole & dones].tolist()

    def decide(self, n_updates: int, n_episodes: int) -> tuple[bool, int]:
        """
        Decide about the current policy, if possible. After its updates it will be another one.

        :param n_updates: number of updates that fall due now
        :param n_episodes: number of episodes whose lowest return decides
        :return: whether it is the best policy so far, and how many updates to do now; 0: not decided yet
        """
        self.n_waiting_updates += n_updates
        if n_episodes != self.n_episodes:
            # The lowest returns of one and of several episodes cannot be compared
            self.best_return, self.n_episodes = -math.inf, n_episodes
        returns = self.episode_returns[:n_episodes]
        is_best = len(returns) == n_episodes and min(returns) >= self.best_return
        is_worse = any(value < self.best_return for value in returns)
        if not (is_best or is_worse):
            return False, 0
        if is_best:
            self.best_return = min(returns)
        n_updates, self.n_waiting_updates = self.n_waiting_updates, 0
        self.episode_returns = []
        self._is_whole = np.zeros((), dtype=bool)
        return is_best, n_updates
