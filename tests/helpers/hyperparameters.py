"""Comparing the hyperparameters of agents, and an env for ``HerReplayBuffer``."""

from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.noise import ActionNoise

from sb3_td3x import TD3X

BIT_FLIPPING = "TD3XBitFlipping-v0"
gym.register(BIT_FLIPPING, "stable_baselines3.common.envs:BitFlippingEnv", kwargs={"n_bits": 4, "continuous": True})


def describe(value: Any) -> Any:
    """Something comparable for an attribute of a model."""
    if isinstance(value, ActionNoise):
        return type(value).__name__, {key: describe(item) for key, item in sorted(vars(value).items())}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if callable(value) and not isinstance(value, type):  # a schedule
        return [value(progress) for progress in (1.0, 0.3, 0.0)]
    return value


HYPERPARAMETERS = (
    "action_noise",
    "action_noise_decay",
    "action_noise_min_scale",
    "actor_average_tau",
    "batch_size",
    "buffer_size",
    "clipped_double_q",
    "gamma",
    "gradient_steps",
    "learning_starts",
    "lr_schedule",
    "n_steps",
    "optimize_memory_usage",
    "policy_class",
    "policy_checkpoint_episodes",
    "policy_delay",
    "policy_kwargs",
    "prioritized_replay_alpha",
    "qf_lr_schedule",
    "replay_buffer_class",
    "replay_buffer_kwargs",
    "target_noise_clip",
    "target_policy_noise",
    "tau",
    "top_quantiles_to_drop_per_net",
    "train_freq",
)


def hyperparameters(model: TD3X) -> dict[str, Any]:
    return {name: describe(getattr(model, name)) for name in HYPERPARAMETERS}
