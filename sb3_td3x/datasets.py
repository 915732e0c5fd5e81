"""Replay buffers filled from demonstrations and other recorded episodes."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.preprocessing import maybe_transpose

from sb3_td3x.buffers import check_terminations_can_be_stored, end_open_episodes
from sb3_td3x.rollout import EnvStep, Observations, shape_step
from sb3_td3x.td3x import TD3X

# Tolerance for rounded actions, in the scaled action space
_ROUNDING = 1e-5


class Episode(NamedTuple):
    """
    One recorded episode of T steps. The ``EpisodeData`` of Minari has the same attributes.

    :param observations: observations before each step and after the last one, not normalized, (T + 1, ...), or a
        dictionary of such arrays
    :param actions: actions as sent to the env, in its own action space, ``(T, *action_shape)``
    :param rewards: the env's rewards, neither normalized nor shaped, (T,)
    :param terminations: whether a step reached a terminal state, bool, (T,)
    :param truncations: whether the episode was cut off after a step, such as by a time limit, bool, (T,)
    """

    observations: Observations
    actions: np.ndarray
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


def fill_replay_buffer(model: TD3X, episodes: Iterable[Episode]) -> int:
    """
    Store recorded episodes in an agent's replay buffer as if its env had just played them.

    Actions are scaled to [-1, 1], rewards are shaped, time-outs are told from terminations, and n-step returns stay
    within their episode. ``VecNormalize`` normalizes the episodes when they are sampled; its statistics do not change.

    With several envs, each gets an equal share of consecutive steps. A share that ends within an episode ends with a
    time-out. Up to one step per env is stored twice to make the shares equal.

    :param model: the agent. Its reward shaping hook gets empty ``infos``
    :param episodes: a dataset of Minari, or a list of ``Episode``
    :return: number of recorded steps
    :raises ValueError: an episode does not fit the agent's spaces, or the replay buffer is too small; nothing is stored
    """
    recorded_space = getattr(episodes, "action_space", model.action_space)
    if recorded_space != model.action_space:
        raise ValueError(f"The episodes have actions of {recorded_space}, expected {model.action_space}")
    recorded = [_checked(model, episode, f"Episode {idx}") for idx, episode in enumerate(episodes)]
    if not recorded:
        raise ValueError("There are no episodes, expected at least one")
    observations = {
        key: np.concatenate([episode.observations[key] for episode in recorded]) for key in recorded[0].observations
    }
    actions, rewards, terminations, truncations = map(np.concatenate, list(zip(*recorded, strict=True))[1:])
    lengths = [len(episode.rewards) for episode in recorded]
    # Each episode has one more observation than steps
    obs_rows = np.arange(len(rewards)) + np.repeat(np.arange(len(recorded)), lengths)

    share = -(-len(rewards) // model.n_envs)
    replay_buffer = model.replay_buffer
    if share > replay_buffer.buffer_size:
        raise ValueError(
            f"buffer_size={model.buffer_size} is not enough for the {len(rewards)} steps of the episodes, expected at "
            f"least {share * model.n_envs}"
        )
    model._check_shaping()
    end_open_episodes(replay_buffer)
    first_rows = np.linspace(0, len(rewards) - share, model.n_envs).astype(int)
    for idx in range(share):
        rows = first_rows + idx
        obs, next_obs = (
            {key: part[obs_rows[rows] + offset] for key, part in observations.items()} for offset in (0, 1)
        )
        dones = terminations[rows] | truncations[rows] | (idx == share - 1)
        infos = [{"TimeLimit.truncated": bool(timeout)} for timeout in dones & ~terminations[rows]]
        step = EnvStep(obs.get(None, obs), actions[rows], rewards[rows], next_obs.get(None, next_obs), dones, infos)
        if model._shaping is not None:
            step = shape_step(model._shaping, step, model.gamma, model.num_timesteps)
            if step.dones is not dones:
                check_terminations_can_be_stored(replay_buffer, model._shaping)
        scaled_actions = np.clip(model.policy.scale_action(step.actions), -1, 1)
        replay_buffer.add(
            step.observations, step.next_observations, scaled_actions, step.rewards, step.dones, step.infos
        )
    return len(rewards)


def _checked(model: TD3X, episode: Episode, name: str) -> Any:
    """Return an episode as arrays that fit the agent; its observations as a dictionary, with None as the only key."""
    length = len(episode.rewards)
    space, observations = model.observation_space, episode.observations
    parts: dict[Any, spaces.Space] = {None: space}
    if isinstance(space, spaces.Dict):
        parts = dict(space.spaces)
        if not isinstance(observations, dict) or observations.keys() != parts.keys():
            raise ValueError(f"{name} has observations other than the agent's, expected a dictionary of {list(parts)}")
    else:
        observations = {None: observations}
    observations = {
        key: _array(observations[key], length + 1, part.shape, part.dtype, f"{name} has observations", part)
        for key, part in parts.items()
    }
    actions = _array(episode.actions, length, model.action_space.shape, np.float32, f"{name} has actions")
    if (np.abs(model.policy.scale_action(actions)) > 1 + _ROUNDING).any():
        raise ValueError(f"{name} has actions outside of {model.action_space}: clip them if the env does")
    rewards = _array(episode.rewards, length, (), np.float32, f"{name} has rewards")
    terminations = _array(episode.terminations, length, (), np.bool_, f"{name} has terminations")
    truncations = _array(episode.truncations, length, (), np.bool_, f"{name} has truncations")
    ends = terminations | truncations
    if ends[:-1].any():
        raise ValueError(f"{name} has {length} steps but ends at step {ends.argmax() + 1}: split it into episodes")
    # A recording that stops within an episode is a time-out, too
    truncations = truncations | (np.arange(length) == length - 1)
    return Episode(observations, actions, rewards, terminations, truncations)


def _array(
    values: Any, length: int, shape: Any, dtype: Any, name: str, space: spaces.Space | None = None
) -> np.ndarray:
    """Return values as a checked array of ``length`` finite entries; images with their channels first."""
    array = np.asarray(values)
    if space is not None:
        array = maybe_transpose(array, space)
    if array.shape != (length, *shape) or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ValueError(
            f"{name} of shape {array.shape} and type {array.dtype}, expected {(length, *shape)} and {np.dtype(dtype)}"
        )
    if array.dtype.kind == "f" and not np.isfinite(array.astype(np.float32)).all():
        raise ValueError(f"{name} with NaN or infinity")
    return array
