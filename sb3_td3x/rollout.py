"""What the envs gave in one step, on its way to the replay buffer."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.shaping import RewardShaping, ShapingBatch, shape

Observations = Any  # (n_envs, ...), or a dictionary of such


@dataclass(frozen=True)
class EnvStep:
    """
    One transition of each env.

    :param observations: unnormalised observations, (n_envs, ...), or a dictionary of such
    :param actions: actions as sent to the envs, (n_envs, *action_shape)
    :param rewards: unnormalised rewards, (n_envs,)
    :param next_observations: what the actions led to, also at an episode's end
    :param dones: whether the episode ended, by termination or time-out, (n_envs,)
    :param infos: the envs' infos
    """

    observations: Observations
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: Observations
    dones: np.ndarray
    infos: list[dict[str, Any]]


def with_last_observations(
    obs: Observations, dones: np.ndarray, infos: list[dict[str, Any]], vec_normalize: VecNormalize | None
) -> Observations:
    """
    Vectorised envs reset a finished env at once: put the last observation of its episode back.

    :param obs: unnormalised observations, of finished envs the first of the next episode
    :param dones: whether the episode ended
    :param infos: the envs' infos, with the last observations, normalised if the env is
    :param vec_normalize: what normalises them, if anything does
    :return: what the actions led to; ``obs`` itself if no episode ended
    """
    if not dones.any():
        return obs
    next_obs = deepcopy(obs)
    for idx in np.flatnonzero(dones):
        last_obs = infos[idx].get("terminal_observation")
        if last_obs is None:
            continue
        if vec_normalize is not None:
            last_obs = vec_normalize.unnormalize_obs(last_obs)
        if isinstance(next_obs, dict):
            for key in next_obs:
                next_obs[key][idx] = last_obs[key]
        else:
            next_obs[idx] = last_obs
    return next_obs


def shape_step(
    hook: RewardShaping, step: EnvStep, gamma: float, num_timesteps: int
) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
    """
    An episode's end that the hook declares not terminal becomes a time-out, so that its value is bootstrapped
    and n-step sums do not cross the reset.

    :param hook: the shaping hook
    :param step: what the envs gave
    :param gamma: the discount factor
    :param num_timesteps: env timesteps of the training so far, with this step
    :return: rewards, dones and infos to store; the latter two are ``step``'s unless the hook changed terminations
    """
    timeouts = np.array([info.get("TimeLimit.truncated", False) for info in step.infos], dtype=bool)
    dones = np.asarray(step.dones, dtype=bool)
    batch = ShapingBatch(
        observations=step.observations,
        actions=step.actions,
        rewards=step.rewards.astype(np.float32),
        next_observations=step.next_observations,
        terminations=dones & ~timeouts,
        truncations=dones & timeouts,
        infos=step.infos,
        gamma=gamma,
        num_timesteps=num_timesteps,
    )
    rewards, terminations = shape(hook, batch)
    if (terminations == batch.terminations).all():
        return rewards, step.dones, step.infos
    shaped_dones = dones | terminations
    shaped_infos = [
        {**info, "TimeLimit.truncated": bool(done and not terminated)}
        for info, done, terminated in zip(step.infos, shaped_dones, terminations, strict=True)
    ]
    return rewards, shaped_dones, shaped_infos
