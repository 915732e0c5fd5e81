"""Log files of a training: cut back to the moment of a checkpoint, so that a resumed training repeats nothing."""

import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.logger import HumanOutputFormat, KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.monitor import Monitor

from sb3_td3x.files.atomic import atomic_write


def monitor_sizes(folder: Path) -> dict[str, int]:
    """
    Return the sizes of the files of ``Monitor``, which hold whole lines between two env steps.

    :return: sizes in bytes by the names of the files
    """
    return {path.name: path.stat().st_size for path in folder.glob(f"*{Monitor.EXT}")}


def cut_monitor_files(folder: Path, sizes: dict[str, int]) -> None:
    """
    Cut off the episodes that came after a checkpoint. Call this before the envs are made, and make their ``Monitor``
    with ``override_existing=False``.

    :param sizes: the result of ``monitor_sizes`` at the checkpoint
    """
    for name, size in sizes.items():
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)


def monitor_start(path: Path) -> float | None:
    """
    Return when the run of a ``Monitor`` was started.

    :param path: the file of the ``Monitor``
    :return: seconds since 1970; None if the first line does not say
    """
    with path.open() as file:
        try:
            return float(json.loads(file.readline().lstrip("#"))["t_start"])
        except (ValueError, LookupError, TypeError):
            return None


def continue_monitoring(start: float | None, env_wrapper: Callable[[gym.Env], gym.Env] | None, env: gym.Env) -> gym.Env:
    """
    Let a ``Monitor`` count the time from the start of its run, so that its new episodes sort after the old ones.

    :param start: the result of ``monitor_start``
    :param env_wrapper: the wrapper of the run's envs, if they have one
    :param env: an env in its ``Monitor``
    """
    if start is not None:
        env.t_start = start  # type: ignore[attr-defined]
    return env if env_wrapper is None else env_wrapper(env)


def write_evaluations(callback: EvalCallback) -> None:
    """
    Write ``evaluations.npz`` again, which may hold evaluations that came after a checkpoint, or be cut short by a kill.
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


def tensorboard_folder(logger: Logger) -> str | None:
    """
    Return the folder where a logger writes for TensorBoard.

    :return: the folder; None if it does not write for TensorBoard
    """
    for output in logger.output_formats:
        if isinstance(output, TensorBoardOutputFormat):
            return str(Path(output.writer.log_dir).resolve())
    return None


def continue_tensorboard(folder: str | None, timesteps: int, verbose: int) -> Logger | None:
    """
    Make a logger like SB3's own that continues in the TensorBoard folder of a training, without the values that were
    logged after a checkpoint.

    :param folder: the result of ``tensorboard_folder`` at the checkpoint
    :param verbose: verbosity level of the agent
    :return: the logger; None if there is no such folder
    """
    if folder is None or not Path(folder).is_dir():
        return None
    _cut_tensorboard(Path(folder), timesteps)
    outputs: list[KVWriter] = [HumanOutputFormat(sys.stdout)] if verbose >= 1 else []
    return Logger(folder, [*outputs, TensorBoardOutputFormat(folder)])


def _cut_tensorboard(folder: Path, timesteps: int) -> None:
    """Remove values that were logged after a timestep, and a last one that a kill cut short."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    for path in folder.glob("events.out.tfevents.*"):
        content = path.read_bytes()
        kept, start = [], 0
        # A record is its length (8 bytes), a checksum of the length (4), the event, and a checksum of the event (4)
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
