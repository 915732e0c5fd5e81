"""Log files of a training that is resumed: what came after the checkpoint must not appear twice."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
from stable_baselines3.common.logger import HumanOutputFormat, KVWriter, Logger, TensorBoardOutputFormat
from stable_baselines3.common.monitor import Monitor


def monitor_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files of ``Monitor``, which hold whole lines between two env steps, by their names."""
    return {path.name: path.stat().st_size for path in folder.glob(f"*{Monitor.EXT}")}


def cut_monitor_files(folder: Path, sizes: dict[str, int]) -> None:
    """
    Cut off the episodes that came after a checkpoint. Call this before the envs are made, and make their ``Monitor``
    with ``override_existing=False``.
    """
    for name, size in sizes.items():
        path = folder / name
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)


def monitor_start(path: Path) -> float | None:
    """Return when the run of a ``Monitor`` was started, in seconds since 1970, if its file says that."""
    with path.open() as file:
        try:
            return float(json.loads(file.readline().lstrip("#"))["t_start"])
        except (ValueError, LookupError, TypeError):
            return None


def continue_monitoring(start: float | None, env_wrapper: Callable[[gym.Env], gym.Env] | None, env: gym.Env) -> gym.Env:
    """Let a ``Monitor`` count the time from the start of its run, so that its new episodes sort after the old ones."""
    if start is not None:
        env.t_start = start  # type: ignore[attr-defined]
    return env if env_wrapper is None else env_wrapper(env)


def tensorboard_folder(logger: Logger) -> str | None:
    """Return the folder where a logger writes for TensorBoard, if it does."""
    for output in logger.output_formats:
        if isinstance(output, TensorBoardOutputFormat):
            return str(Path(output.writer.log_dir).resolve())
    return None


def continue_tensorboard(folder: str | None, timesteps: int, verbose: int) -> Logger | None:
    """
    Make a logger like SB3's own that continues in the TensorBoard folder of a training. TensorBoard drops the values
    that were logged there after a checkpoint.

    :param folder: the result of ``tensorboard_folder`` at the checkpoint
    """
    if folder is None or not Path(folder).is_dir():
        return None
    tensorboard = TensorBoardOutputFormat(folder)
    # It opens again with the next value, and marks the restart in its file then
    tensorboard.writer.close()
    tensorboard.writer.purge_step = timesteps + 1
    outputs: list[KVWriter] = [HumanOutputFormat(sys.stdout)] if verbose >= 1 else []
    return Logger(folder, [*outputs, tensorboard])
