"""From an env's step to a stored transition: last observations, checks of the data, reward shaping."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_td3x.shaping import RewardShaping, ShapingBatch, shape
from sb3_td3x.validation import check_finite

Observations = Any  # (n_envs, ...), or a dictionary of such arrays


class EnvStep(NamedTuple):
    """
    One transition of each env.

    :param observations: unnormalized observations, (n_envs, ...), or a dictionary of such arrays
    :param actions: actions as sent to the envs, (n_envs, *action_shape)
    :param rewards: unnormalized rewards, (n_envs,)
    :param next_observations: unnormalized observations that the actions led to, also at the end of an episode
    :param dones: whether the episode ended, by termination or time-out, (n_envs,)
    """

    observations: Observations
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: Observations
    dones: np.ndarray
    infos: list[dict[str, Any]]


class OverlappingVecEnv(VecEnvWrapper):
    """
    Do something while the envs take the last step of a rollout: after they were sent their actions, and before their
    results are asked for.
    """

    def __init__(self, venv: VecEnv, during_last_step: Callable[[], None]):
        super().__init__(venv)
        self._during_last_step = during_last_step
        # Steps until the end of the rollout
        self.n_steps_left = 0

    def reset(self) -> VecEnvObs:
        return self.venv.reset()

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions)
        self.n_steps_left -= 1
        if self.n_steps_left == 0:
            try:
                self._during_last_step()
            except BaseException:
                # Processes of envs have sent their results, which the next reset would take for its own
                self.venv.step_wait()
                raise

    def step_wait(self) -> VecEnvStepReturn:
        return self.venv.step_wait()


def complete_step(step: EnvStep, vec_normalize: VecNormalize | None, num_timesteps: int) -> EnvStep:
    """
    Put the last observations of finished episodes into a step, and check it for NaN and infinity.

    :param step: what the envs returned; ``next_observations`` of finished envs are the first of the next episode
    :param vec_normalize: the env's ``VecNormalize``, if it has one
    :param num_timesteps: number of env timesteps so far, for errors
    :raises ValueError: an observation or a reward is not finite
    """
    if step.dones.any():
        ended = np.flatnonzero(step.dones)
        check_finite("observation after the reset", step.next_observations, num_timesteps, ended)
    next_obs = with_last_observations(step.next_observations, step.dones, step.infos, vec_normalize)
    check_finite("observation", next_obs, num_timesteps)
    check_finite("reward", step.rewards, num_timesteps)
    return step._replace(next_observations=next_obs)


def with_last_observations(
    obs: Observations, dones: np.ndarray, infos: list[dict[str, Any]], vec_normalize: VecNormalize | None
) -> Observations:
    """
    Replace the first observations of new episodes by the last observations of the finished ones, because vectorized
    envs reset a finished env at once.

    :param infos: the envs' infos, with the last observations, normalized if the env is
    :param vec_normalize: the env's ``VecNormalize``, if it has one
    :return: the observations that the actions led to; ``obs`` itself if no episode ended
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


def shape_step(hook: RewardShaping, step: EnvStep, gamma: float, num_timesteps: int) -> EnvStep:
    """
    Apply a shaping hook to a step. An end of an episode that the hook declares not terminal becomes a time-out, so that
    its value is bootstrapped and n-step returns do not continue into the next episode.

    :param step: the step, with the last observations of finished episodes
    :param num_timesteps: env timesteps of the training so far, this step included
    :return: the step to store; ``dones`` is the same array unless the hook changed terminations
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
        return step._replace(rewards=rewards)
    shaped_dones = dones | terminations
    shaped_infos = [
        {**info, "TimeLimit.truncated": bool(done and not terminated)}
        for info, done, terminated in zip(step.infos, shaped_dones, terminations, strict=True)
    ]
    return step._replace(rewards=rewards, dones=shaped_dones, infos=shaped_infos)


def check_unnormalized_shapes(obs: Observations, observation_space: spaces.Space) -> None:
    """
    Check that no wrapper around ``VecNormalize`` changes the observations, which are stored unnormalized.

    :param obs: observations before ``VecNormalize`` normalizes them
    :raises ValueError: their shapes differ
    """
    if isinstance(observation_space, spaces.Dict):
        for key, space in observation_space.spaces.items():
            check_unnormalized_shapes(obs[key], space)
    elif obs.shape[1:] != observation_space.shape:
        raise ValueError(
            "no wrapper that changes observations is allowed around VecNormalize, such as frame stacking, or for "
            "images VecTransposeImage, which SB3 puts there unless it is inside: VecNormalize(VecTransposeImage(env)). "
            f"It has observations of shape {obs.shape[1:]}, the agent {observation_space.shape}"
        )
