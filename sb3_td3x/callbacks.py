"""Callbacks for training with TD3X, in Python or from the zoo's YAML."""

from collections import deque
from contextvars import ContextVar

import gymnasium as gym
import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, EvalCallback, EventCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, sync_envs_normalization

from sb3_td3x.validation import check_integer, check_number

# True while hyperparameters are tuned. Trials are then not checkpointed, and all have the same length
tuning: ContextVar[bool] = ContextVar("tuning", default=False)


class StopWhenSolved(BaseCallback):
    """
    Stop training when the mean return of the last evaluation episodes reaches a threshold.

    One evaluation episode follows each training episode, with deterministic actions and the environment's own reward.
    Evaluations use no random generator of the training, so this callback changes only when the training stops. Use it
    in RL Zoo's ``callback:`` list::

        callback:
          - sb3_td3x.callbacks.StopWhenSolved:
              threshold: 200.0

    SB3's ``StopTrainingOnRewardThreshold`` does not work there: it must be the child of an ``EvalCallback``, and it
    considers only one evaluation. During hyperparameter tuning this callback does nothing, because the zoo ranks a
    trial that stops before its evaluations last.

    :param threshold: Mean return at which the task counts as solved
    :param window: Number of evaluation episodes in the mean. Training does not stop before that many
    :param eval_env: Environment to evaluate in, wrapped like the training environment. It is seeded with the model's
        seed. None uses the environment of the ``EvalCallback`` that runs in the same training, as in the zoo
    :param verbose: Verbosity level: 0 for no output, 1 for a message when solved
    :raises ValueError: If an argument is not allowed
    """

    def __init__(
        self,
        threshold: float,
        window: int = 100,
        eval_env: gym.Env | VecEnv | None = None,
        verbose: int = 1,
    ):
        super().__init__(verbose)
        self.threshold = check_number("threshold", threshold)
        self.window = check_integer("window", window, low=1)
        if isinstance(eval_env, gym.Env):
            monitored = Monitor(eval_env)
            eval_env = DummyVecEnv([lambda: monitored])
        elif eval_env is not None and not isinstance(eval_env, VecEnv):
            raise ValueError(f"eval_env={eval_env!r} is not allowed, expected an environment, a VecEnv or None")
        self.eval_env = eval_env
        self.returns: deque[float] = deque(maxlen=self.window)

    def _init_callback(self) -> None:
        if self.model.num_timesteps == 0:
            # A new training with the same callback
            self.returns.clear()

    def _on_training_start(self) -> None:
        if tuning.get():
            return
        # The zoo creates its EvalCallback after the callbacks of the YAML, and only the locals of `learn` contain the
        # list with both, so look for it here
        if self.eval_env is None:
            eval_callback = _find_eval_callback(self.locals["callback"])
            if eval_callback is None:
                raise ValueError(
                    "eval_env=None is not allowed without an EvalCallback in the same training, "
                    "expected an environment, or in the zoo an --eval-freq > 0"
                )
            self.eval_env = eval_callback.eval_env
        elif self.model.seed is not None:
            self.eval_env.seed(self.model.seed)

    def _on_step(self) -> bool:
        n_episodes = int(np.sum(self.locals["dones"]))
        if n_episodes == 0 or tuning.get():
            return True
        assert self.eval_env is not None
        if self.model.get_vec_normalize_env() is not None:
            sync_envs_normalization(self.training_env, self.eval_env)
        returns, _ = evaluate_policy(self.model, self.eval_env, n_episodes, return_episode_rewards=True)
        assert isinstance(returns, list)
        self.returns.extend(returns)
        mean = float(np.mean(self.returns))
        self.logger.record("eval/solved_mean", mean)
        if len(self.returns) < self.window or mean < self.threshold:
            return True
        if self.verbose >= 1:
            print(
                f"SOLVED after {self.num_timesteps} timesteps: the mean return of the last {self.window} evaluation "
                f"episodes is {mean:.2f} >= {self.threshold:g}"
            )
        return False


def _find_eval_callback(callback: BaseCallback | None) -> EvalCallback | None:
    """Return the first ``EvalCallback`` in a callback and its children."""
    if isinstance(callback, EvalCallback):
        return callback
    if isinstance(callback, CallbackList):
        return next((found for child in callback.callbacks if (found := _find_eval_callback(child))), None)
    return _find_eval_callback(callback.callback) if isinstance(callback, EventCallback) else None
