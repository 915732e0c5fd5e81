"""Trainings with checkpoints."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from envs import counting_vec_env, tiny_agent
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from zoo_helpers import GoalEnv

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import newest_whole_checkpoint
from sb3_td3x.files.replay import columns, late_columns


def pendulum() -> gym.Env:
    return Monitor(gym.make("Pendulum-v1"))


def goal_env() -> gym.Env:
    return Monitor(gym.wrappers.TimeLimit(GoalEnv(), 7))


def counting_agent(n_envs: int = 1, **kwargs: Any) -> TD3X:
    """Make a tiny agent for envs that count their steps."""
    model: TD3X = tiny_agent(counting_vec_env(n_envs), **kwargs)
    return model


def fail() -> None:
    raise LookupError("stopped by the test")


def saved_timesteps(folder: Path) -> int:
    """Return the number of env timesteps of the newest checkpoint."""
    return newest_whole_checkpoint(folder).num_timesteps


def resume_and_train(folder: Path, env: VecEnv, total: int, *callbacks: BaseCallback, **kwargs: Any) -> TD3X:
    """Resume a training with further checkpoints, until it has a total number of env timesteps."""
    model = TD3X.resume(folder, env)
    checkpoint = ResumableCheckpoint(folder, verbose=0, **kwargs)
    return model.learn(total - model.num_timesteps, [checkpoint, *callbacks], reset_num_timesteps=False)


def contents(replay_buffer: ReplayBuffer) -> dict[str, Any]:
    """Return all that a replay buffer holds, for ``np.testing.assert_equal``."""
    arrays = {**columns(replay_buffer), **late_columns(replay_buffer)}
    lists = {name: array.tolist() for name, array in arrays.items() if array.dtype == object}
    return {**arrays, **lists, "position": (replay_buffer.pos, replay_buffer.full)}


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files in a folder and its subfolders."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(path: Path, how: str) -> None:
    """Damage a file: ``missing``, ``cut short``, ``flipped`` or ``another``."""
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "cut short":
        del content[-10:]
    elif how == "flipped":
        content[len(content) // 2] ^= 1
    else:
        content[:] = b"{}"
    path.write_bytes(content)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let longer files fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_same_replay_buffer(expected: ReplayBuffer, actual: ReplayBuffer) -> None:
    np.testing.assert_equal(contents(actual), contents(expected))
