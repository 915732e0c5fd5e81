"""
The folder that checkpoints are kept in: each is a folder of its own that is there as a whole or not at all, with a
manifest of sizes and checksums, and shares with the others the files of the replay buffer::

    000007_70000_steps/  manifest.json, model.zip, state.json, and what else the checkpoint consists of
    replay_buffer/       the rows that were new at each checkpoint
"""

import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sb3_td3x.files.atomic import TEMPORARY_PATTERN, FileRecord, atomic_write, file_record, sync_folder
from sb3_td3x.files.segments import Chain, Segment

FORMAT = 1
MANIFEST = "manifest.json"
REPLAY_BUFFER = "replay_buffer"

_NAME = re.compile(r"(\d{6,})_(\d+)_steps")


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """
    A checkpoint whose manifest is whole.

    :param path: its folder
    :param files: its files
    :param chain: the files of its replay buffer
    """

    path: Path
    files: tuple[FileRecord, ...]
    chain: Chain

    @property
    def replay_buffer_folder(self) -> Path:
        """Where the files of its replay buffer are."""
        return self.path.parent / REPLAY_BUFFER

    def check(self) -> None:
        """
        :raises DamagedCheckpointError: a file is missing or changed; names it
        """
        for folder, records in (
            (self.path, self.files),
            (self.replay_buffer_folder, [segment.record for segment in self.chain.segments]),
        ):
            for record in records:
                _check_file(folder / record.name, record)


def write_checkpoint(directory: Path, files: dict[str, bytes], chain: Chain, timesteps: int) -> Checkpoint:
    """
    Write a checkpoint beside those that are there.

    :param directory: the folder of all checkpoints
    :param files: its files, by name
    :param chain: the files of the replay buffer, which are written
    :param timesteps: number of env timesteps, for its name
    :return: the checkpoint
    :raises OSError: it cannot be written, or the disk is full; nothing is left of it
    """
    number = 1 + max(map(_number, list_checkpoints(directory)), default=0)
    path = directory / f"{number:06d}_{timesteps}_steps"
    partial = directory / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        partial.mkdir()
        for name, content in files.items():
            with atomic_write(partial / name) as file:
                file.write(content)
        checkpoint = Checkpoint(path, tuple(file_record(partial / name) for name in files), chain)
        with atomic_write(partial / MANIFEST) as file:
            file.write(_manifest(checkpoint))
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(directory)
    return checkpoint


def read_checkpoint(path: Path) -> Checkpoint:
    """
    :param path: folder of a checkpoint
    :return: the checkpoint, its files not looked at
    :raises DamagedCheckpointError: its manifest is missing or damaged
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest.pop("sha256") != _checksum(manifest):
            raise ValueError("its checksum is another")
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {manifest['format']}, this version of sb3_td3x reads format {FORMAT}")
        segments = [
            Segment(FileRecord(**entry.pop("record")), **entry) for entry in manifest["replay_buffer"].pop("segments")
        ]
        return Checkpoint(
            path,
            tuple(FileRecord(**record) for record in manifest["files"]),
            Chain(segments=tuple(segments), **manifest["replay_buffer"]),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path / MANIFEST} is damaged: {error}") from None


def newest_whole_checkpoint(directory: Path) -> Checkpoint:
    """
    Find where to go on. Each newer checkpoint that is damaged is named in a warning.

    :param directory: the folder of all checkpoints
    :return: the newest checkpoint that is whole
    :raises ValueError: there is none
    """
    problems = []
    for path in reversed(list_checkpoints(directory)):
        try:
            checkpoint = read_checkpoint(path)
            checkpoint.check()
        except DamagedCheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}. Going on from {path.name}, which is older", stacklevel=2)
        return checkpoint
    raise ValueError(f"There is no whole checkpoint in {directory}" + "".join(f"; {problem}" for problem in problems))


def list_checkpoints(directory: Path) -> list[Path]:
    """
    :param directory: the folder of all checkpoints, which may not exist yet
    :return: the folders of the checkpoints, damaged ones included, the oldest first
    """
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _NAME.fullmatch(path.name)), key=_number)


def remove_all_but(directory: Path, kept: list[Checkpoint]) -> None:
    """
    Delete checkpoints, and files of the replay buffer that no other needs, leftovers of killed processes included.

    :param directory: the folder of all checkpoints
    :param kept: the checkpoints to keep
    """
    for path in list_checkpoints(directory):
        if path not in [checkpoint.path for checkpoint in kept]:
            # A kill while it is being deleted must not leave a checkpoint that looks damaged
            partial = directory / f".{path.name}.{secrets.token_hex(4)}.partial"
            path.rename(partial)
    for partial in directory.glob(TEMPORARY_PATTERN):
        shutil.rmtree(partial, ignore_errors=True)
    needed = {segment.record.name for checkpoint in kept for segment in checkpoint.chain.segments}
    for path in (directory / REPLAY_BUFFER).iterdir():
        if path.name not in needed:
            path.unlink()


def _number(path: Path) -> int:
    """
    :param path: folder of a checkpoint
    :return: its place in the order of all
    """
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _manifest(checkpoint: Checkpoint) -> bytes:
    """
    :param checkpoint: a checkpoint
    :return: the contents of its manifest
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "files": [dataclasses.asdict(record) for record in checkpoint.files],
        "replay_buffer": dataclasses.asdict(checkpoint.chain),
    }
    return json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1).encode()


def _checksum(manifest: dict[str, Any]) -> str:
    """
    :param manifest: a manifest without its checksum
    :return: the checksum
    """
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_file(path: Path, record: FileRecord) -> None:
    """
    :param path: a file
    :param record: what it must be
    :raises DamagedCheckpointError: it is not
    """
    try:
        if os.path.getsize(path) != record.size:
            raise DamagedCheckpointError(
                f"{path} is damaged: it has {os.path.getsize(path)} bytes, expected {record.size}"
            )
        if file_record(path) != record:
            raise DamagedCheckpointError(f"{path} is damaged: its checksum is another")
    except OSError as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror}") from None
