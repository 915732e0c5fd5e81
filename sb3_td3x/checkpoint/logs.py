"""The files that a run logs to, cut back to the moment of a checkpoint, so that a resumed run repeats nothing."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor

from sb3_td3x.files.atomic import atomic_write


def monitor_sizes(folder: Path) -> dict[str, int]:
    """
    :param folder: the folder of a run
    :return: sizes in bytes of its Monitor's files, which are whole lines between two env steps
    """
    return {path.name: path.stat().st_size for path in folder.glob(f"*{Monitor.EXT}")}


def cut_monitor_files(folder: Path, sizes: dict[str, int]) -> None:
    """
    Cut off the episodes that came after a checkpoint. Before the envs are made, whose ``Monitor`` then needs
    ``override_existing=False``.

    :param folder: the folder of a run
    :param sizes: what ``monitor_sizes`` returned at the checkpoint
    """
    for name, size in sizes.items():
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)


def write_evaluations(callback: EvalCallback) -> None:
    """
    Write ``evaluations.npz`` again, which may hold evaluations that came after a checkpoint, or be cut short by a kill.

    :param callback: the callback, with the evaluations that are known
    """
    if callback.log_path is None:
        return
    path = Path(f"{callback.log_path}.npz")
    if not callback.evaluations_timesteps:
        path.unlink(missing_ok=True)
        return
    successes = {"successes": callback.evaluations_successes} if callback.evaluations_successes else {}
    with atomic_write(path) as file:
        np.savez(
            file,
            timesteps=callback.evaluations_timesteps,
            results=callback.evaluations_results,
            ep_lengths=callback.evaluations_length,
            **successes,  # type: ignore[arg-type]
        )


def cut_tensorboard(folder: str | Path, timesteps: int) -> None:
    """
    Drop the values that were logged after a checkpoint, and what a kill left of a last one.

    :param folder: the folder of one run, with its event files
    :param timesteps: number of env timesteps of the checkpoint
    """
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    for path in Path(folder).glob("events.out.tfevents.*"):
        content = path.read_bytes()
        kept, start = [], 0
        # A record is its length (8 bytes), a checksum of that (4), the event, and a checksum of that (4)
        while start + 12 <= len(content):
            (length,) = struct.unpack_from("<Q", content, start)
            end = start + 12 + length + 4
            if end > len(content):
                break
            if Event.FromString(content[start + 12 : end - 4]).step <= timesteps:
                kept.append(content[start:end])
            start = end
        if sum(map(len, kept)) < len(content):
            with atomic_write(path) as file:
                file.writelines(kept)


def monitor_start(path: Path) -> float | None:
    """
    :param path: a Monitor's file
    :return: when its run was started, in seconds since 1970; None: its first line says nothing
    """
    with path.open() as file:
        try:
            return float(json.loads(file.readline().lstrip("#"))["t_start"])
        except (ValueError, LookupError, TypeError):
            return None


def go_on_monitoring(start: float | None, env_wrapper: Callable[[gym.Env], gym.Env] | None, env: gym.Env) -> gym.Env:
    """
    :param start: when the run was started, in seconds since 1970; None: unknown
    :param env_wrapper: the wrapper of the run's envs, if they have one
    :param env: an env in its ``Monitor``
    :return: the wrapped env, whose episodes are timed from the run's start, so that they sort after those before
    """
    if start is not None:
        env.t_start = start  # type: ignore[attr-defined]
    return env if env_wrapper is None else env_wrapper(env)
