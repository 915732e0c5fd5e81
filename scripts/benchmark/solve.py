"""How long a training takes until its agent solves LunarLanderContinuous-v3."""

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rl_zoo3.utils import get_wrapper_class
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.schedules import make_schedule
from sb3_td3x.zoo.runs import action_repeat

ENV_ID = "LunarLanderContinuous-v3"
THRESHOLD = 200.0
EVAL_FREQ = 5_000
N_EVAL_EPISODES = 20
# Far from the seeds of the trainings
EVAL_SEED = 100_000


class StopWhenSolved(BaseCallback):
    """End a training when the mean return of some episodes reaches a threshold, and measure its time."""

    def __init__(self, eval_env: VecEnv, threshold: float, eval_freq: int, n_eval_episodes: int):
        super().__init__()
        self._eval_env = eval_env
        self.threshold = threshold
        self.eval_freq = eval_freq
        self.n_eval_episodes = n_eval_episodes
        self.seconds = 0.0
        # For each evaluation, the timesteps and the seconds of training before it, and the mean return
        self.evaluations: list[tuple[int, float, float]] = []

    @property
    def solved(self) -> bool:
        """Whether the last evaluation reached the threshold"""
        return bool(self.evaluations) and self.evaluations[-1][2] >= self.threshold

    def _on_training_start(self) -> None:
        self._start = time.perf_counter()

    def _on_step(self) -> bool:
        if self.num_timesteps % self.eval_freq != 0:
            return True
        # The clock stops during evaluations
        self.seconds += time.perf_counter() - self._start
        mean, _ = evaluate_policy(self.model, self._eval_env, self.n_eval_episodes)
        # JSON has no NumPy numbers
        self.evaluations.append((self.num_timesteps, round(self.seconds, 2), round(float(np.mean(mean)), 2)))
        self._start = time.perf_counter()
        return not self.solved

    def _on_training_end(self) -> None:
        self.seconds += time.perf_counter() - self._start


class Solver:
    """
    A training until its agent solves the env.

    :param own_kwargs: arguments that only TD3X has
    :param hyperparams: an entry of the zoo's YAML; what the class has no argument for is left out
    """

    def __init__(
        self,
        algorithm: Callable[..., BaseAlgorithm],
        own_kwargs: dict[str, Any],
        hyperparams: dict[str, Any],
        seed: int,
    ):
        arguments = parse_hyperparams(hyperparams)
        known = inspect.signature(algorithm).parameters
        self._left_out = sorted(arguments.keys() - known.keys())
        arguments = {name: value for name, value in arguments.items() if name in known}
        self._action_repeat = action_repeat(hyperparams)
        wrapper = get_wrapper_class(hyperparams)
        env, eval_env = (make_vec_env(ENV_ID, seed=env_seed, wrapper_class=wrapper) for env_seed in (seed, EVAL_SEED))
        self._model = algorithm(env=env, seed=seed, device="cpu", **arguments, **own_kwargs)
        self._callback = StopWhenSolved(eval_env, THRESHOLD, EVAL_FREQ // self._action_repeat, N_EVAL_EPISODES)

    def advance(self, steps: int) -> int:
        """Train until the env is solved."""
        self._model.learn(steps // self._action_repeat, callback=self._callback)
        return self._model.num_timesteps * self._action_repeat

    def figures(self) -> dict[str, Any]:
        """Return the course of the training."""
        return {
            "solved": self._callback.solved,
            "train_seconds": self._callback.seconds,
            "evaluations": [
                (timesteps * self._action_repeat, *others) for timesteps, *others in self._callback.evaluations
            ],
            "left_out": self._left_out,
        }


def read_hyperparams(path: Path) -> dict[str, Any]:
    """Read the entry of the env."""
    entry: dict[str, Any] = yaml.safe_load(path.read_text())[ENV_ID]
    return entry


def parse_hyperparams(entry: dict[str, Any]) -> dict[str, Any]:
    """Convert hyperparameters of the zoo to arguments of an algorithm."""
    keys_of_zoo = ("n_timesteps", "env_wrapper", "noise_type", "noise_std")
    arguments = {name: value for name, value in entry.items() if name not in keys_of_zoo}
    assert entry["noise_type"] == "normal"
    action_dim = 2
    arguments["action_noise"] = NormalActionNoise(np.zeros(action_dim), np.full(action_dim, entry["noise_std"]))
    arguments["learning_rate"] = make_schedule("learning_rate", entry["learning_rate"])
    # The zoo evaluates this text too
    arguments["policy_kwargs"] = eval(entry["policy_kwargs"])
    return arguments
