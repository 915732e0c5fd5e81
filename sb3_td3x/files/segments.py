"""A replay buffer on disk, as files of the rows that were new at each checkpoint."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_td3x.buffers import KNOWN_CLASSES, PackedReplayBuffer
from sb3_td3x.files.atomic import FileRecord, atomic_write, file_record

# A longer chain is begun anew, so that a manifest stays short
MAX_SEGMENTS = 500


@dataclass(frozen=True)
class Segment:
    """
    A file of consecutive rows.

    :param record: the file
    :param first: number of its first row; row ``n`` lies at ``n % buffer_size`` in the buffer
    :param last: number of the row after its last
    """

    record: FileRecord
    first: int
    last: int


@dataclass(frozen=True)
class Chain:
    """
    The files that hold a replay buffer together.

    :param name: what their names begin with
    :param segments: the files, oldest rows first
    :param n_rows: number of the row that will be written next
    """

    name: str
    segments: tuple[Segment, ...]
    n_rows: int


def check_supported(replay_buffer: ReplayBuffer) -> None:
    """
    :param replay_buffer: a replay buffer
    :raises ValueError: its class may hold what a checkpoint would miss
    """
    if type(replay_buffer) not in KNOWN_CLASSES:
        names = ", ".join(cls.__name__ for cls in KNOWN_CLASSES)
        raise ValueError(
            f"replay_buffer_class={type(replay_buffer).__name__} is not allowed with ResumableCheckpoint, "
            f"expected one of {names}: of others it does not know what to save"
        )


def write_segments(folder: Path, replay_buffer: ReplayBuffer, chain: Chain | None, n_new: int | None) -> Chain:
    """
    Write the rows that are new.

    :param folder: where to
    :param replay_buffer: the replay buffer
    :param chain: what was written of it before, if anything was
    :param n_new: how many rows were added since; None: unknown, all are written again
    :return: the files that hold it now; those of ``chain`` that are missing in it are needed no longer
    :raises OSError: they cannot be written, or the disk is full; what was written before is untouched
    """
    size = replay_buffer.buffer_size
    if chain is None or n_new is None or n_new >= size or len(chain.segments) >= MAX_SEGMENTS:
        start = replay_buffer.pos if replay_buffer.full else 0
        chain = Chain(secrets.token_hex(4), (), start)
        n_new = size if replay_buffer.full else replay_buffer.pos
    end = chain.n_rows + n_new
    segments = [segment for segment in chain.segments if segment.last > end - size]
    arrays = columns(replay_buffer)
    for first, last in _pieces(chain.n_rows, end, size):
        path = folder / f"{chain.name}_{first}_{last}.npy"
        position = first % size
        with atomic_write(path) as file:
            for name, array in arrays.items():
                _write_array(file, name, array[position : position + last - first])
        segments.append(Segment(file_record(path), first, last))
    return Chain(chain.name, tuple(segments), end)


def read_segments(folder: Path, replay_buffer: ReplayBuffer, chain: Chain) -> None:
    """
    Fill a replay buffer.

    :param folder: where the files are
    :param replay_buffer: an empty replay buffer like the one that was written
    :param chain: the files
    :raises ValueError: the files hold rows of another replay buffer
    """
    size = replay_buffer.buffer_size
    arrays = columns(replay_buffer)
    for segment in chain.segments:
        with (folder / segment.record.name).open("rb") as file:
            for name, array in arrays.items():
                rows = _read_array(file, name)
                expected = (segment.last - segment.first, *array.shape[1:])
                if rows.shape != expected or rows.dtype != array.dtype:
                    raise ValueError(
                        f"{name} in {segment.record.name} are {rows.dtype} of shape {rows.shape}, "
                        f"expected {array.dtype} of shape {expected}"
                    )
                position = segment.first % size
                array[position : position + len(rows)] = rows
    replay_buffer.pos = chain.n_rows % size
    replay_buffer.full = chain.n_rows >= size


def columns(replay_buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """
    :param replay_buffer: a replay buffer
    :return: the arrays that get a row with each call of ``add``, (buffer_size, n_envs, ...), not copied
    """
    if isinstance(replay_buffer, PackedReplayBuffer):
        return replay_buffer.blocks
    arrays: dict[str, np.ndarray] = {}
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        if name == "next_observations" and replay_buffer.optimize_memory_usage:
            continue
        value = getattr(replay_buffer, name)
        if isinstance(value, dict):
            arrays.update({f"{name}.{key}": array for key, array in value.items()})
        else:
            arrays[name] = value
    if isinstance(replay_buffer, HerReplayBuffer) and replay_buffer.copy_info_dict:
        arrays["infos"] = replay_buffer.infos
    return arrays


def bookkeeping(replay_buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """
    :param replay_buffer: a replay buffer
    :return: what changes in rows that are already on disk, to be written at each checkpoint
    """
    if isinstance(replay_buffer, HerReplayBuffer):
        # `ep_length` of an episode is set at its end, and taken back where the ring overwrites its start
        names = ("ep_start", "ep_length", "_current_ep_start")
        return {name: getattr(replay_buffer, name) for name in names}
    if replay_buffer.optimize_memory_usage:
        # The last next observation, in the place of the next row's observation
        return {"last_next_observation": replay_buffer.observations[replay_buffer.pos % replay_buffer.buffer_size]}
    return {}


def restore_bookkeeping(replay_buffer: ReplayBuffer, arrays: dict[str, np.ndarray]) -> None:
    """
    :param replay_buffer: a replay buffer that was just filled
    :param arrays: what ``bookkeeping`` returned
    """
    if isinstance(replay_buffer, HerReplayBuffer):
        for name in ("ep_start", "ep_length", "_current_ep_start"):
            getattr(replay_buffer, name)[...] = arrays[name]
    elif replay_buffer.optimize_memory_usage:
        replay_buffer.observations[replay_buffer.pos] = arrays["last_next_observation"]


def _pieces(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """
    :param first: number of the first row
    :param last: number of the row after the last
    :param size: number of rows in the ring
    :return: first and last of ranges that do not cross the ring's end
    """
    while first < last:
        end = min(last, (first // size + 1) * size)
        yield first, end
        first = end


def _write_array(file: BinaryIO, name: str, array: np.ndarray) -> None:
    """
    Write an array in NumPy's format.

    :param file: where to
    :param name: the array's name
    :param array: rows of an array in C order
    """
    if array.dtype == object:
        text = json.dumps([[_info_to_json(info, name) for info in row] for row in array.tolist()])
        array = np.frombuffer(text.encode(), dtype=np.uint8)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    # Not `np.save`, whose error hides that the disk is full
    file.write(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")


def _read_array(file: BinaryIO, name: str) -> np.ndarray:
    """
    :param file: where ``_write_array`` wrote to
    :param name: the array's name
    :return: the array
    """
    array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    if name != "infos":
        return array
    rows = json.loads(array.tobytes())
    infos = np.empty((len(rows), len(rows[0])), dtype=object)
    for row_idx, row in enumerate(rows):
        for env_idx, info in enumerate(row):
            infos[row_idx, env_idx] = _info_from_json(info)
    return infos


def _info_to_json(value: Any, name: str) -> Any:
    """
    :param value: an env's info, or a part of it
    :param name: what to call it in an error
    :return: the same of JSON's types
    """
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _info_to_json(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_info_to_json(entry, name) for entry in value]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return {"__dtype__": value.dtype.str, "__values__": value.tolist()}
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(
        f"{name} of type {type(value).__name__} is not allowed in a checkpoint, expected arrays, numbers, text, or "
        "lists and dictionaries of such; copy_info_dict=False needs no infos"
    )


def _info_from_json(value: Any) -> Any:
    """
    :param value: what ``_info_to_json`` returned
    :return: the info; tuples have become lists
    """
    if isinstance(value, dict) and "__dtype__" in value:
        return np.array(value["__values__"], dtype=value["__dtype__"])[()]
    if isinstance(value, dict):
        return {key: _info_from_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_info_from_json(entry) for entry in value]
    return value
