"""
The folder of the checkpoints::

    000007_70000_steps.zip   an agent's file that also holds the state of the training
    replay_buffer/           the rows that were new at each checkpoint, shared by all checkpoints

All are sealed zip files: each exists as a whole or not at all, and damage is found.
"""

import json
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm

from sb3_td3x.files.agent import write_agent
from sb3_td3x.files.atomic import TEMPORARY_PATTERN
from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.records import from_record, to_record
from sb3_td3x.files.replay import (
    RowFiles,
    describe,
    late_columns,
    read_columns,
    read_rows,
    restore_position,
    write_columns,
)
from sb3_td3x.files.sealed_zip import open_checked_zip, write_sealed_zip

REPLAY_BUFFER = "replay_buffer"

# Member with the state of the training
_TRAINING = "training"
_NAME = re.compile(r"\d{6}_\d+_steps\.zip")

State = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole."""

    path: Path
    num_timesteps: int
    state: State
    replay_buffer: State
    rows: RowFiles

    def fill(self, replay_buffer: ReplayBuffer) -> None:
        """Read the transitions."""
        read_rows(self.path.parent / REPLAY_BUFFER, replay_buffer, self.rows)
        n_rows = min(self.rows.n_rows, replay_buffer.buffer_size)
        with open_checked_zip(self.path, "zip") as archive:
            read_columns(archive, late_columns(replay_buffer), 0, n_rows)
        restore_position(replay_buffer, self.replay_buffer, n_rows, str(self.path))


def write_checkpoint(
    directory: Path, model: OffPolicyAlgorithm, num_timesteps: int, state: State, rows: RowFiles
) -> Path:
    """
    Write a checkpoint next to the older ones.

    :param num_timesteps: number of env timesteps whose transitions are stored
    """
    replay_buffer = model.replay_buffer
    assert replay_buffer is not None
    older = [int(path.name.partition("_")[0]) for path in list_checkpoints(directory)]
    path = directory / f"{1 + max(older, default=0):06d}_{num_timesteps}_steps.zip"
    training = {"state": state, "replay_buffer": describe(replay_buffer), "rows": asdict(rows)}
    with write_sealed_zip(path, "zip") as archive:
        write_agent(archive, model, num_timesteps=num_timesteps)
        archive.writestr(_TRAINING, json.dumps(to_record(training), allow_nan=False))
        write_columns(archive, late_columns(replay_buffer), 0, replay_buffer.size())
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """
    Read a checkpoint, and check the checksums of its files.

    :raises FileRefused: a file is missing or damaged; names the file
    """
    name = str(path)
    try:
        with refusing(name), open_checked_zip(path, "zip") as archive:
            num_timesteps = json.loads(archive.read("data"))["num_timesteps"]
            training = from_record(json.loads(archive.read(_TRAINING)))
            rows = RowFiles(**training["rows"])
        for name in (str(path.parent / REPLAY_BUFFER / row_file) for row_file in rows.names):
            with open_checked_zip(name, "zip"):
                pass
    except OSError as error:
        raise FileRefused(f"{name} cannot be read: {error.strerror}") from None
    return Checkpoint(path, num_timesteps, training["state"], training["replay_buffer"], rows)


def newest_whole_checkpoint(directory: Path) -> Checkpoint:
    """Find the checkpoint to resume from. Warn of newer ones that are damaged."""
    problems = []
    for path in reversed(list_checkpoints(directory)):
        try:
            checkpoint = read_checkpoint(path)
        except FileRefused as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}. Resuming from {path.name}, which is older", stacklevel=2)
        return checkpoint
    raise ValueError(f"There is no whole checkpoint in {directory}" + "".join(f"; {problem}" for problem in problems))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the files of the checkpoints in a folder, if it exists, damaged ones included, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if _NAME.fullmatch(path.name))


def remove_all_but(directory: Path, kept: dict[Path, RowFiles]) -> None:
    """Delete old checkpoints, rows that no checkpoint needs, and what killed processes left behind."""
    needed = {name for rows in kept.values() for name in rows.names}
    for path in list_checkpoints(directory):
        if path not in kept:
            path.unlink()
    for path in directory.glob(TEMPORARY_PATTERN):
        path.unlink()
    for path in (directory / REPLAY_BUFFER).iterdir():
        if path.name not in needed:
            path.unlink()
