"""
Replay buffers on disk: one format for saved replay buffers and for checkpoints.

A saved replay buffer is a sealed zip file, which ``numpy.load`` opens too:

- ``replay_buffer``: class, arguments and position as JSON
- ``observations.npy``, ``actions.npy``, ...: SB3's arrays, (rows, n_envs, ...); for Dict observations one array per key
- ``infos.jsonl``: with ``copy_info_dict``, the infos of one row in each line

A checkpoint has its rows in several files with the same arrays: each checkpoint writes those that are new to another.
"""

import io
import json
import math
import pickle
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import quote

import numpy as np
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_td3x.files.atomic import SavePath, name_of, open_for_loading, open_for_saving
from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.pickles import Pickled, allowed_in_pickles, from_pickle, read_pickle
from sb3_td3x.files.records import CLASSES, NotARecordError, from_record, register_class, to_record
from sb3_td3x.files.sealed_zip import CHUNK_BYTES, CheckedZip, open_checked_zip, write_sealed_zip

BufferClass = TypeVar("BufferClass", bound=type[ReplayBuffer])
Arrays = Mapping[str, np.ndarray]

_DESCRIPTION = "replay_buffer"
_INFOS = "infos"
# Attributes of all replay buffers
_COMMON = ("buffer_size", "n_envs", "observation_space", "action_space", "handle_timeout_termination", "pos", "full")
# Arrays that `add` writes one row to
_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
# Arrays of HER whose rows change after `add`: at the end of an episode, and when it is overwritten
_EPISODES = ("ep_start", "ep_length")
# With prioritized sampling: the priorities, and the highest so far
_PRIORITIES, _MAX_PRIORITY = "priorities", "max_priority"
# All arrays whose rows change after `add`
_LATE_ARRAYS = (*_EPISODES, _PRIORITIES)
# Where HER's open episodes start, (n_envs,)
_EPISODE_STARTS = "_current_ep_start"
# With `optimize_memory_usage`: the observations after the newest transitions, which are stored in the next row
_LAST_OBSERVATIONS = "last_observations"
# Of replay buffers that lack these attributes
_DEFAULTS = {"n_steps": 1, "prioritized_replay_alpha": 0.0}


# Classes of replay buffers

# Arguments besides those that all replay buffers have; they are also attributes
KNOWN_BUFFERS: dict[type[ReplayBuffer], tuple[str, ...]] = {
    ReplayBuffer: ("optimize_memory_usage",),
    NStepReplayBuffer: ("n_steps", "gamma"),
    DictReplayBuffer: (),
    HerReplayBuffer: ("n_sampled_goal", "goal_selection_strategy", "copy_info_dict"),
}


def register_replay_buffer(*arguments: str) -> Callable[[BufferClass], BufferClass]:
    """
    Allow files to hold replay buffers of a class with SB3's arrays. A decorator.

    :param arguments: arguments of the class besides those that all replay buffers have; they must also be attributes
    """

    def register(cls: BufferClass) -> BufferClass:
        KNOWN_BUFFERS[register_class(cls)] = arguments
        return cls

    return register


def is_known_buffer(replay_buffer: Any) -> bool:
    """Return whether files can hold a replay buffer: another class may have more to save than SB3's arrays."""
    return type(replay_buffer) in KNOWN_BUFFERS


def columns(replay_buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """Return the arrays that get a row with each call of ``add``, by their names in files, not copied."""
    arrays = _named_arrays({name: getattr(replay_buffer, name, None) for name in _ARRAYS})
    if getattr(replay_buffer, "copy_info_dict", False):
        arrays[_INFOS] = cast(HerReplayBuffer, replay_buffer).infos
    return arrays


def late_columns(replay_buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """Return the arrays whose rows can change after ``add``, by their names in files, not copied."""
    return _named_arrays({name: getattr(replay_buffer, name, None) for name in _LATE_ARRAYS})


def _named_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by their names in files, those of Dict observations one by one."""
    arrays: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            # A key may be any string
            arrays.update({f"{name}.{quote(str(key), safe='')}": array for key, array in value.items()})
        elif value is not None:
            arrays[name] = value
    return arrays


def describe(replay_buffer: ReplayBuffer) -> dict[str, Any]:
    """Return everything but the columns: class, arguments and position."""
    cls = type(replay_buffer)
    description = {"class": cls, **{name: getattr(replay_buffer, name) for name in (*_COMMON, *KNOWN_BUFFERS[cls])}}
    for name in (_EPISODE_STARTS, _MAX_PRIORITY):
        if getattr(replay_buffer, name, None) is not None:
            description[name] = getattr(replay_buffer, name)
    if replay_buffer.optimize_memory_usage:
        row, observations = replay_buffer.pos % replay_buffer.buffer_size, cast(Any, replay_buffer.observations)
        is_dict = isinstance(observations, dict)
        description[_LAST_OBSERVATIONS] = (
            {key: array[row] for key, array in observations.items()} if is_dict else observations[row]
        )
    return description


def make_empty(description: Mapping[str, Any], model: OffPolicyAlgorithm, buffer_size: int) -> ReplayBuffer:
    """
    Make an empty replay buffer with the envs, spaces and device of an agent.

    :raises ValueError: it needs an env, and the agent has none
    """
    cls = description["class"]
    kwargs = {name: description[name] for name in ("handle_timeout_termination", *KNOWN_BUFFERS[cls])}
    if issubclass(cls, HerReplayBuffer):
        kwargs["env"] = _env_of(model)
    spaces = model.observation_space, model.action_space
    made: ReplayBuffer = cls(buffer_size * model.n_envs, *spaces, device=model.device, n_envs=model.n_envs, **kwargs)
    return made


def restore_position(replay_buffer: ReplayBuffer, description: Mapping[str, Any], n_rows: int, name: str) -> None:
    """
    Set everything but the columns, which were read.

    :raises FileRefused: an episode lies outside of the replay buffer, or its priorities are impossible
    """
    replay_buffer.full = n_rows == replay_buffer.buffer_size
    replay_buffer.pos = description["pos"] if description["full"] else n_rows % replay_buffer.buffer_size
    if replay_buffer.optimize_memory_usage:
        last, observations = description[_LAST_OBSERVATIONS], cast(Any, replay_buffer.observations)
        for key, array in observations.items() if isinstance(observations, dict) else ((..., observations),):
            array[replay_buffer.pos] = last[key]
    priorities = getattr(replay_buffer, _PRIORITIES, None)
    if priorities is not None:
        highest = description.get(_MAX_PRIORITY)
        # Also False for NaN
        if not (
            type(highest) is float
            and 1 <= highest < math.inf
            and (priorities >= 0).all()
            and priorities.max() <= highest
        ):
            raise FileRefused(f"{name} has bad {_PRIORITIES}")
        cast(Any, replay_buffer).max_priority = highest
    if isinstance(replay_buffer, HerReplayBuffer):
        starts = description.get(_EPISODE_STARTS)
        if not isinstance(starts, np.ndarray) or starts.shape != (replay_buffer.n_envs,) or starts.dtype != np.int64:
            raise FileRefused(f"{name} has a bad {_EPISODE_STARTS}")
        replay_buffer._current_ep_start = starts
        for key in (*_EPISODES, _EPISODE_STARTS):
            values = getattr(replay_buffer, key)
            if (values < 0).any() or (values > replay_buffer.buffer_size).any():
                raise FileRefused(f"{name} has a bad {key}: an episode lies outside of the buffer")


def _env_of(model: OffPolicyAlgorithm) -> Any:
    """Return the env of an agent for HER."""
    if model.env is None:
        raise FileRefused("a HerReplayBuffer needs an env: load the agent with env=...")
    return model.env


# Saved replay buffers


def write_replay_buffer(path: SavePath, replay_buffer: ReplayBuffer) -> None:
    """Save a replay buffer, as a whole or not at all. A replay buffer of an unknown class is pickled."""
    n_rows = replay_buffer.size()
    arrays = {**columns(replay_buffer), **late_columns(replay_buffer)}
    try:
        if not is_known_buffer(replay_buffer):
            raise NotARecordError
        description = to_record(describe(replay_buffer))
        for infos in arrays.get(_INFOS, ())[:n_rows]:
            # Check now: nothing must have been written when a pickle turns out to be needed
            to_record(list(infos))
    except NotARecordError:
        with open_for_saving(path, "pkl") as file:
            pickle.dump(replay_buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
        return
    with write_sealed_zip(path, "pkl") as archive:
        archive.writestr(_DESCRIPTION, json.dumps(description, allow_nan=False, indent=2))
        write_columns(archive, arrays, 0, n_rows)


def read_replay_buffer(
    path: SavePath, model: OffPolicyAlgorithm, truncate_last_traj: bool, trusted: bool
) -> ReplayBuffer:
    """
    Read a replay buffer that was saved by TD3X or by SB3.

    :param trusted: whether to run the pickle of another class than SB3's, which can do anything that the user can
    :raises ValueError: the file is damaged, needs to be trusted, or is not for this agent
    """
    name = name_of(path)
    with open_for_loading(path, "pkl") as file:
        start = file.tell()
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(start)
        if trusted and not is_zip:
            replay_buffer = _run_pickle(file, model, name)
        else:
            with refusing(name):
                source = _Zip(CheckedZip(file, name)) if is_zip else _Pickle(file, name)
                replay_buffer = _from_source(source, model, name)
    if isinstance(replay_buffer, HerReplayBuffer) and truncate_last_traj:
        replay_buffer.truncate_last_trajectory()
    replay_buffer.device = model.device
    return replay_buffer


class _Zip:
    """A replay buffer in our format."""

    def __init__(self, archive: CheckedZip) -> None:
        if _DESCRIPTION not in archive.members:
            raise FileRefused(f"{archive.name} is a zip file but no replay buffer")
        self.archive = archive
        self.description = from_record(json.loads(archive.read(_DESCRIPTION)))
        # Rewards are the column with the fewest bytes, at least 4 for each env
        self.max_rows = archive.members["rewards.npy"].file_size // 4

    def read(self, arrays: Arrays, n_rows: int) -> None:
        """Read the first rows of columns."""
        read_columns(self.archive, arrays, 0, n_rows)


class _Pickle:
    """A replay buffer in a pickle of SB3, which is not run."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        start = file.tell()
        size = file.seek(0, io.SEEK_END) - start
        file.seek(start)
        try:
            pickled = read_pickle(file, name, allowed_in_pickles())
        except FileRefused as error:
            raise FileRefused(f"{error}; load it with trusted=True if you trust its author") from None
        if not (isinstance(pickled, Pickled) and CLASSES.get(pickled.path) in KNOWN_BUFFERS):
            raise FileRefused(f"{name} holds no replay buffer")
        self.name = name
        cls, state = CLASSES[pickled.path], pickled.state
        names = (*_COMMON, *KNOWN_BUFFERS[cls], _EPISODE_STARTS)
        values = from_pickle({key: state[key] for key in names if key in state}, size)
        integers = {key: int(value) for key, value in values.items() if isinstance(value, np.integer)}
        self.description = {"class": cls, **values, **integers}
        self.arrays = _named_arrays(from_pickle({key: state.get(key) for key in (*_ARRAYS, *_LATE_ARRAYS)}, size))
        self.max_rows = len(self.arrays["rewards"])
        if self.description.get("optimize_memory_usage"):
            self.description[_LAST_OBSERVATIONS] = self.arrays["observations"][self.description["pos"]]
        if self.description.get("copy_info_dict"):
            infos = from_pickle(state[_INFOS].state[-1], size)
            self.arrays[_INFOS] = np.array([_check_info(info) for info in infos], dtype=object).reshape(
                self.arrays["rewards"].shape
            )

    def read(self, arrays: Arrays, n_rows: int) -> None:
        """Copy the first rows of columns."""
        for key, array in arrays.items():
            value, shape = self.arrays.get(key), (self.max_rows, *array.shape[1:])
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != array.dtype:
                raise FileRefused(f"{self.name} has a bad {key}: expected {array.dtype} of shape {shape}")
            array[:n_rows] = value[:n_rows]


def _from_source(source: _Zip | _Pickle, model: OffPolicyAlgorithm, name: str) -> ReplayBuffer:
    """Make the replay buffer that a file describes."""
    description = source.description
    _check_description(description, model, name)
    n_rows = description["buffer_size"] if description["full"] else description["pos"]
    if n_rows > source.max_rows:
        raise FileRefused(f"{name} has fewer than {n_rows} rows")
    # Take memory for the rows in the file, and for no more than the agent asks for
    buffer_size = min(description["buffer_size"], max(n_rows, model.buffer_size // model.n_envs, 1))
    replay_buffer = make_empty(description, model, buffer_size)
    source.read({**columns(replay_buffer), **late_columns(replay_buffer)}, n_rows)
    restore_position(replay_buffer, description, n_rows, name)
    return replay_buffer


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "class": lambda value: value in KNOWN_BUFFERS,
    "buffer_size": lambda value: type(value) is int and value >= 1,
    "pos": lambda value: type(value) is int and value >= 0,
    "full": lambda value: type(value) is bool,
    "handle_timeout_termination": lambda value: type(value) is bool,
    "optimize_memory_usage": lambda value: type(value) is bool,
    "copy_info_dict": lambda value: type(value) is bool,
    "n_steps": lambda value: type(value) is int and 1 <= value <= 10**6,
    "n_sampled_goal": lambda value: type(value) is int and 0 <= value <= 10**6,
    "gamma": lambda value: isinstance(value, int | float | np.floating) and bool(0 <= value <= 1),
    "prioritized_replay_alpha": lambda value: type(value) is float and 0 <= value <= 1,
    "dtype": lambda value: value in (np.float32, np.float64),
}


def _check_description(description: Any, model: OffPolicyAlgorithm, name: str) -> None:
    """Check the description of a replay buffer from a file."""
    if not isinstance(description, dict) or description.get("class") not in KNOWN_BUFFERS:
        raise FileRefused(f"{name} holds no replay buffer of SB3 or TD3X")
    absent = [key for key in (*_COMMON, *KNOWN_BUFFERS[description["class"]]) if key not in description]
    if absent:
        raise FileRefused(f"{name} is no whole replay buffer, it lacks {', '.join(absent)}")
    _check_is_for(model, description, name)
    for key, is_allowed in _CHECKS.items():
        if key in description and not is_allowed(description[key]):
            raise FileRefused(f"{name} has a bad {key}: {description[key]!s:.40}")
    if description["pos"] >= description["buffer_size"]:
        raise FileRefused(
            f"{name} has pos={description['pos']}, expected less than buffer_size={description['buffer_size']}"
        )


def _check_is_for(model: OffPolicyAlgorithm, description: Mapping[str, Any], name: str) -> None:
    """Check that a replay buffer fits an agent."""
    names = ["n_envs", "observation_space", "action_space"]
    if model.replay_buffer_class is None:
        names += ["n_steps", "prioritized_replay_alpha"]
        if model.n_steps > 1:
            names.append("gamma")
    for key in names:
        # SB3's replay buffers know less
        loaded, expected = description.get(key, _DEFAULTS.get(key)), getattr(model, key)
        if loaded != expected:
            raise FileRefused(f"The replay buffer in {name} has {key}={loaded}, expected {expected}")


def _run_pickle(file: BinaryIO, model: OffPolicyAlgorithm, name: str) -> ReplayBuffer:
    """Unpickle a replay buffer from a file that is trusted."""
    replay_buffer = pickle.load(file)
    if not isinstance(replay_buffer, ReplayBuffer):
        raise FileRefused(f"{name} holds {type(replay_buffer).__name__}, expected a ReplayBuffer")
    _check_is_for(model, vars(replay_buffer), name)
    if isinstance(replay_buffer, HerReplayBuffer):
        replay_buffer.set_env(_env_of(model))
    return replay_buffer


def _check_info(info: Any) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise TypeError("its infos are no dictionaries")
    return info


# Columns in a zip file


def write_columns(archive: zipfile.ZipFile, arrays: Arrays, first: int, last: int) -> None:
    """
    Write some rows of columns. Row ``n`` lies at ``n % buffer_size``.

    :param last: the row after the last
    """
    for name, array in arrays.items():
        parts = _parts(array, first, last)
        if name == _INFOS:
            rows: Iterable[Any] = (infos for part in parts for infos in array[part])
            lines = [json.dumps(to_record(list(infos)), allow_nan=False) + "\n" for infos in rows]
            archive.writestr(f"{_INFOS}.jsonl", "".join(lines))
            continue
        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            header = {"descr": array.dtype.str, "fortran_order": False, "shape": (last - first, *array.shape[1:])}
            np.lib.format.write_array_header_1_0(cast(BinaryIO, file), header)
            for part in parts:
                file.write(array[part].tobytes())


def read_columns(archive: CheckedZip, arrays: Arrays, first: int, last: int) -> None:
    """
    Read some rows of columns.

    :param last: the row after the last; the file must have exactly these rows
    """
    for name, array in arrays.items():
        with archive.open(f"{_INFOS}.jsonl" if name == _INFOS else f"{name}.npy") as file:
            if name != _INFOS:
                _check_header(file, array.dtype, (last - first, *array.shape[1:]), f"{name} in {archive.name}")
            for part in _parts(array, first, last):
                if name == _INFOS:
                    for row in part:
                        array[row] = [_check_info(info) for info in from_record(json.loads(file.readline()))]
                else:
                    shape = (len(part), *array.shape[1:])
                    content = file.read(array.itemsize * math.prod(shape))
                    array[part] = np.frombuffer(content, array.dtype).reshape(shape)


def _check_header(file: BinaryIO, expected_dtype: np.dtype, expected_shape: tuple[int, ...], name: str) -> None:
    """Check the header of an array in NumPy's format."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise FileRefused(f"{name} is no array of version 1.0")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if shape != expected_shape or dtype != expected_dtype or fortran_order:
        raise FileRefused(f"{name} is {dtype} of shape {shape}, expected {expected_dtype} of shape {expected_shape}")


def _parts(array: np.ndarray, first: int, last: int) -> Iterator[np.ndarray]:
    """Yield where rows lie in an array, in parts that take little memory."""
    step = max(1, CHUNK_BYTES // max(1, array.itemsize * math.prod(array.shape[1:])))
    for start in range(first, last, step):
        yield np.arange(start, min(start + step, last)) % len(array)


# Checkpoints

# With more files than that, all rows are written again to one
_MAX_FILES = 500


@dataclass(frozen=True)
class RowFiles:
    """
    Files that hold the rows of a replay buffer together, numbered since the beginning.

    :param ranges: first row of each file and the row after its last, oldest first
    """

    prefix: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def n_rows(self) -> int:
        """Number of rows that were written since the beginning"""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def names(self) -> list[str]:
        """Names of the files"""
        return [f"{self.prefix}_{first}_{last}.zip" for first, last in self.ranges]


def write_new_rows(folder: Path, replay_buffer: ReplayBuffer, written: RowFiles | None, n_new: int | None) -> RowFiles:
    """
    Write the rows that are new to a new file.

    :param written: the files that were written before; None: write all rows
    :param n_new: number of rows that were added since; None: unknown, write all rows
    :return: the files that hold the replay buffer now. Others in ``written`` are no longer needed
    :raises OSError: the file cannot be written, or the disk is full; the files written before are untouched
    :raises ValueError: an info holds something that only a pickle can hold
    """
    size = replay_buffer.buffer_size
    if written is None or n_new is None or n_new >= size or len(written.ranges) >= _MAX_FILES:
        written, first = RowFiles(secrets.token_hex(4), ()), replay_buffer.pos if replay_buffer.full else 0
        n_new = replay_buffer.size()
    else:
        first = written.n_rows
    if n_new == 0:
        return written
    last = first + n_new
    new = RowFiles(written.prefix, ((first, last),))
    with write_sealed_zip(folder / new.names[0], "zip") as archive:
        try:
            write_columns(archive, columns(replay_buffer), first, last)
        except NotARecordError as error:
            raise ValueError(
                f"infos with {error} are not allowed in a checkpoint, expected arrays, numbers, text, or lists and "
                "dictionaries of such; with copy_info_dict=False none are saved"
            ) from None
    kept = (rows for rows in written.ranges if rows[1] > last - size)
    return RowFiles(written.prefix, (*kept, *new.ranges))


def read_rows(folder: Path, replay_buffer: ReplayBuffer, written: RowFiles) -> None:
    """Read the rows of a replay buffer."""
    for (first, last), name in zip(written.ranges, written.names, strict=True):
        with open_checked_zip(folder / name, "zip") as archive:
            read_columns(archive, columns(replay_buffer), first, last)
