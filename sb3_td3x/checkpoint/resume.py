"""Resuming: an agent from a checkpoint, ready to continue its training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_td3x.buffers import end_open_episodes
from sb3_td3x.checkpoint import state as training_state
from sb3_td3x.checkpoint.folder import Checkpoint, newest_whole_checkpoint
from sb3_td3x.checkpoint.logs import continue_tensorboard
from sb3_td3x.files.replay import describe, make_empty

AnyAgent = TypeVar("AnyAgent", bound=OffPolicyAlgorithm)

# Arguments of the agent that decide which replay buffer it makes
_REPLAY_BUFFER_ARGUMENTS = {
    *("buffer_size", "replay_buffer_class", "replay_buffer_kwargs", "optimize_memory_usage"),
    "prioritized_replay_alpha",
}
# What cannot change
_FIXED = (
    *("class", "n_envs", "buffer_size", "handle_timeout_termination", "optimize_memory_usage"),
    "prioritized_replay_alpha",
)


@dataclass
class Resumed:
    """Where a resumed agent comes from, for the callbacks of its training."""

    checkpoint: Checkpoint
    env_seed: int
    generators: dict[str, Any]


def resume(load: Callable[..., AnyAgent], directory: Path, env: Any, **kwargs: Any) -> AnyAgent:
    """
    Resume from the newest whole checkpoint, see ``TD3X.resume``.

    :raises ValueError: there is no whole checkpoint, or the envs or arguments do not fit it
    """
    checkpoint = newest_whole_checkpoint(directory)
    state = checkpoint.state
    # Without a loaded replay buffer, which the checkpoint has
    model: Any = load(checkpoint.path, env=env, **kwargs)
    model.replay_buffer = _make_replay_buffer(model, checkpoint, kwargs)
    checkpoint.fill(model.replay_buffer)
    end_open_episodes(model.replay_buffer)
    training_state.restore_normalization(model.get_vec_normalize_env(), state["normalization"])
    training_state.restore_generators(model, state["generators"])
    env_seed = state["env_seed"] if state["exact"] else int(np.random.randint(2**31))
    reset_envs(model, env_seed)
    # Another training may log where that of a copy did
    if state["save_path"] == str(directory.resolve()):
        logger = continue_tensorboard(state["tensorboard"], model.num_timesteps, model.verbose)
        if logger is not None:
            model.set_logger(logger)
    model._resumed = Resumed(checkpoint, env_seed, training_state.generators(model))
    resumed: AnyAgent = model
    return resumed


def _make_replay_buffer(model: Any, checkpoint: Checkpoint, kwargs: dict[str, Any]) -> ReplayBuffer:
    """
    Make an empty replay buffer like the one in a checkpoint, which may be one that the user gave the agent.

    :raises ValueError: the arguments ask for another one, or there is another number of envs
    """
    # Single steps are stored, and their rewards are summed at sampling
    saved = dict(checkpoint.replay_buffer)
    saved.update((name, getattr(model, name)) for name in ("n_steps", "gamma") if name in saved)
    if kwargs.keys() & _REPLAY_BUFFER_ARGUMENTS or saved["n_envs"] != model.n_envs:
        own = describe(model.replay_buffer)
        for name in _FIXED:
            if own.get(name) != saved.get(name):
                raise ValueError(
                    f"The replay buffer in {checkpoint.path} has {name}={saved.get(name)}, expected {own.get(name)}"
                )
    return make_empty(saved, model, saved["buffer_size"])


def reset_envs(model: OffPolicyAlgorithm, seed: int) -> None:
    """
    Begin a new episode in every env.

    :param seed: seed of the first env; the second has the next number, and so on
    """
    assert model.env is not None
    model.env.seed(seed)
    model._last_obs = model.env.reset()  # type: ignore[assignment]
    model._last_episode_starts = np.ones((model.n_envs,), dtype=bool)
    vec_normalize = model.get_vec_normalize_env()
    if vec_normalize is not None:
        model._last_original_obs = vec_normalize.get_original_obs()
