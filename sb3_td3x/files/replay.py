"""
Saved replay buffers: arrays and JSON in a zip file that ``numpy.load`` opens too, without pickles.

Only the transitions that there are get written, and pass through memory in small parts.
"""

import io
import json
import math
import pickle
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from sb3_td3x._version import __version__
from sb3_td3x.buffers import PackedReplayBuffer, check_loaded_replay_buffer
from sb3_td3x.files.atomic import FileRefused, SavePath, name_of, open_for_loading, open_for_saving, refusing
from sb3_td3x.files.pickles import Pickled, read_pickle
from sb3_td3x.files.records import (
    MAX_ARRAY_BYTES,
    MAX_PARTS,
    MAX_VALUES,
    PICKLE_PATHS,
    JsonReader,
    NotPlainError,
    PickleReader,
    from_pickle,
    from_plain,
    path_of,
    to_plain,
)
from sb3_td3x.files.sealed_zip import CHUNK_SIZE, CheckedZip, write_sealed_zip

if TYPE_CHECKING:
    from sb3_td3x.td3x import TD3X

# Arguments of each class besides those that all have, which are also its attributes
_ARGUMENTS: dict[type[ReplayBuffer], tuple[str, ...]] = {
    PackedReplayBuffer: ("optimize_memory_usage", "n_steps", "gamma", "dtype"),
    ReplayBuffer: ("optimize_memory_usage",),
    NStepReplayBuffer: ("n_steps", "gamma"),
    DictReplayBuffer: (),
    HerReplayBuffer: ("n_sampled_goal", "goal_selection_strategy", "copy_info_dict"),
}
_CLASSES = {path_of(cls): cls for cls in _ARGUMENTS}
_COMMON = ("buffer_size", "n_envs", "observation_space", "action_space", "handle_timeout_termination", "pos", "full")

_MAX_ATTRIBUTES_SIZE = 64 * 2**20
_MAX_INFOS_LINE = 2**24
# Of SB3's files: HER's hold a dictionary for each transition
_MAX_OPERATIONS = 50_000_000


# Writing


def write_replay_buffer(path: SavePath, replay_buffer: ReplayBuffer) -> None:
    """
    Write a replay buffer, as a whole or not at all. One of another class than SB3's and this package's is pickled.

    :param path: path to the file, with or without ``.pkl``, or a file-like object
    :param replay_buffer: the replay buffer
    :raises OSError: it cannot be written; what was there before is untouched
    """
    try:
        attributes = json.dumps(_attributes(replay_buffer), allow_nan=False, indent=2)
    except NotPlainError:
        with open_for_saving(path, "pkl") as file:
            pickle.dump(replay_buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
        return
    rows = _rows_to_save(replay_buffer)
    with write_sealed_zip(path, "pkl", __version__) as archive:
        archive.writestr("replay_buffer", attributes)
        for name, array in _arrays(replay_buffer).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                _write_array(cast(BinaryIO, file), array, rows)
        if isinstance(replay_buffer, HerReplayBuffer) and replay_buffer.copy_info_dict:
            with archive.open("infos.jsonl", "w", force_zip64=True) as file:
                for infos in replay_buffer.infos[:rows]:
                    file.write(json.dumps(to_plain(list(infos)), allow_nan=False).encode() + b"\n")


def _attributes(replay_buffer: ReplayBuffer) -> dict[str, Any]:
    """
    :param replay_buffer: the replay buffer
    :return: all but its arrays, as plain data
    :raises NotPlainError: only a pickle can hold it
    """
    cls = type(replay_buffer)
    if cls not in _ARGUMENTS:
        raise NotPlainError(path_of(cls))
    if isinstance(replay_buffer, HerReplayBuffer) and replay_buffer.copy_info_dict:
        # Before anything is written
        for infos in replay_buffer.infos[: _rows_to_save(replay_buffer)]:
            to_plain(list(infos))
    names = [*_COMMON, *_ARGUMENTS[cls]]
    if cls is HerReplayBuffer:
        names.append("_current_ep_start")
    return {"class": path_of(cls), **{name: to_plain(getattr(replay_buffer, name)) for name in names}}


def describe_replay_buffer(replay_buffer: ReplayBuffer) -> dict[str, Any]:
    """
    :param replay_buffer: a replay buffer of one of the known classes
    :return: what an empty one like it is made from, as plain data
    """
    names = ["buffer_size", "n_envs", "handle_timeout_termination", *_ARGUMENTS[type(replay_buffer)]]
    described = {name: to_plain(getattr(replay_buffer, name)) for name in names}
    return {"class": type(replay_buffer).__name__, **described}


def make_described_replay_buffer(description: dict[str, Any], model: "TD3X", name: str) -> ReplayBuffer:
    """
    :param description: what ``describe_replay_buffer`` returned
    :param model: the agent that it is for
    :param name: how to name where it comes from in an error
    :return: an empty replay buffer
    """
    attributes = from_plain(description)
    (path,) = (path for path, cls in _CLASSES.items() if cls.__name__ == attributes["class"])
    return _make_empty({**attributes, "class": path}, model, name, attributes["buffer_size"])


def _arrays(replay_buffer: ReplayBuffer, keys: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """
    :param replay_buffer: the replay buffer
    :param keys: those of Dict observations, as they are numbered in the file; None: in the replay buffer's order
    :return: its arrays by their names in the file, (buffer_size, n_envs, ...)
    """
    names = ["observations", "next_observations", "actions", "rewards", "dones", "timeouts"]
    if isinstance(replay_buffer, HerReplayBuffer):
        names += ["ep_start", "ep_length"]
    if replay_buffer.optimize_memory_usage:
        names.remove("next_observations")
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        value: Any = getattr(replay_buffer, name)
        if isinstance(value, dict):
            # Numbered: the keys of Dict observations are any strings
            arrays.update({f"{name}.{number}": value[key] for number, key in enumerate(keys or value)})
        else:
            arrays[name] = value
    return arrays


def _rows_to_save(replay_buffer: Any) -> int:
    """
    :param replay_buffer: the replay buffer, or its attributes
    :return: how many rows of the arrays hold something
    """
    if replay_buffer.full:
        return int(replay_buffer.buffer_size)
    # Without arrays of next observations, the last one is in the row that follows
    is_optimized = getattr(replay_buffer, "optimize_memory_usage", False) and replay_buffer.pos > 0
    return min(int(replay_buffer.pos) + is_optimized, int(replay_buffer.buffer_size))


def _write_array(file: BinaryIO, array: np.ndarray, rows: int) -> None:
    """
    :param file: where to
    :param array: the array
    :param rows: how many of its rows are written
    """
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": (rows, *array.shape[1:])}
    np.lib.format.write_array_header_1_0(file, header)
    for part in _parts(array, rows):
        file.write(np.ascontiguousarray(part).tobytes())


def _parts(array: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """
    :param array: an array
    :param rows: how many of its rows
    :return: views of so many rows that they take little memory
    """
    step = max(1, CHUNK_SIZE // max(1, array.itemsize * math.prod(array.shape[1:])))
    for start in range(0, rows, step):
        yield array[start : min(start + step, rows)]


# Reading


def read_replay_buffer(path: SavePath, model: "TD3X", truncate_last_traj: bool, trusted: bool) -> ReplayBuffer:
    """
    :param path: path to the file, with or without ``.pkl``, or a file-like object
    :param model: the agent that it is for
    :param truncate_last_traj: of ``HerReplayBuffer``, whether the last trajectory is taken as finished
    :param trusted: whether to run the pickle of a class that is not SB3's, which can do anything that the user can
    :return: the replay buffer
    :raises ValueError: the file is damaged, needs to be trusted, or is not for this agent
    :raises OSError: it is not there or cannot be read
    """
    name = name_of(path)
    with open_for_loading(path, "pkl") as file:
        start = file.tell()
        is_zip = file.read(4) == b"PK\x03\x04"
        file.seek(start)
        if is_zip:
            replay_buffer = _read_zip(CheckedZip(file, name), model)
        elif trusted:
            replay_buffer = _run_pickle(file, model, name)
        else:
            replay_buffer = _read_pickle(file, name, model)
    check_loaded_replay_buffer(model, replay_buffer, name)
    if isinstance(replay_buffer, HerReplayBuffer) and truncate_last_traj:
        replay_buffer.truncate_last_trajectory()
    replay_buffer.device = model.device
    return replay_buffer


def _read_zip(archive: CheckedZip, model: "TD3X") -> ReplayBuffer:
    """
    :param archive: the file
    :param model: the agent that it is for
    :return: the replay buffer
    """
    name = archive.name
    with refusing(name):
        if "replay_buffer" not in archive.members:
            raise FileRefused(f"{name} is a zip file but no replay buffer")
        attributes = from_plain(JsonReader(name).read(archive.read("replay_buffer", _MAX_ATTRIBUTES_SIZE)))
        if not isinstance(attributes, dict):
            raise FileRefused(f"{name} is a zip file but no replay buffer")
        _check_attributes(attributes, model, name)
        rows = _rows_to_save(SimpleNamespace(**attributes))
        _check_capacity(attributes, model, name, rows)
        # Spaces are equal in any order of their keys
        order = getattr(attributes["observation_space"], "spaces", None)
        for key, array in _arrays(_make_empty(attributes, model, name, 1), order).items():
            expected = array.nbytes * rows
            actual = archive.members[f"{key}.npy"].file_size if f"{key}.npy" in archive.members else -1
            # A header is shorter than that
            if not expected <= actual <= expected + 1024:
                raise FileRefused(f"{name} has {actual} bytes of {key}, expected {expected} for {rows} rows")
        replay_buffer = _make_empty(attributes, model, name, attributes["buffer_size"])
        for key, array in _arrays(replay_buffer, order).items():
            with archive.open(f"{key}.npy") as file:
                _read_array_header(file, array, rows, f"{key} in {name}")
                for part in _parts(array, rows):
                    content = file.read(array.itemsize * part.size)
                    part[...] = np.frombuffer(content, array.dtype).reshape(part.shape)
        if isinstance(replay_buffer, HerReplayBuffer) and replay_buffer.copy_info_dict:
            _read_infos(replay_buffer, archive, rows)
        _set_position(replay_buffer, attributes, name)
    return replay_buffer


def _check_attributes(attributes: dict[str, Any], model: "TD3X", name: str) -> None:
    """
    :param attributes: attributes of a replay buffer
    :param model: the agent that it is for
    :param name: how to name the file in an error
    :raises FileRefused: they are not in order
    """
    if attributes.get("class") not in _CLASSES:
        raise FileRefused(f"{name} holds a replay buffer of class {attributes.get('class')!s:.80}, which is not SB3's")
    cls = _CLASSES[attributes["class"]]
    absent = [key for key in (*_COMMON, *_ARGUMENTS[cls]) if key not in attributes]
    if absent:
        raise FileRefused(f"{name} is no whole replay buffer, it lacks {', '.join(absent)}")
    # What is not the agent's is told before anything else, as of a replay buffer that is there
    check_loaded_replay_buffer(model, SimpleNamespace(**attributes), name)
    fields = SimpleNamespace(**attributes)
    for key in ("buffer_size", "pos"):
        if type(attributes[key]) is not int or attributes[key] < 0:
            raise FileRefused(f"{name} has a bad {key}: {attributes[key]!s:.40}")
    for key in ("full", "handle_timeout_termination", "optimize_memory_usage", "copy_info_dict"):
        if type(attributes.get(key, False)) is not bool:
            raise FileRefused(f"{name} has a bad {key}: {attributes[key]!s:.40}")
    for key, low in (("n_steps", 1), ("n_sampled_goal", 0)):
        if type(attributes.get(key, 1)) is not int or not low <= attributes.get(key, 1) <= 10**6:
            raise FileRefused(f"{name} has a bad {key}: {attributes[key]!s:.40}")
    gamma = attributes.get("gamma", 0)
    if not isinstance(gamma, int | float | np.floating) or not 0 <= gamma <= 1:
        raise FileRefused(f"{name} has a bad gamma: {gamma!s:.40}")
    if fields.pos >= fields.buffer_size:
        raise FileRefused(f"{name} has pos={fields.pos}, expected less than buffer_size={fields.buffer_size}")


def _check_capacity(attributes: dict[str, Any], model: "TD3X", name: str, rows: int) -> None:
    """
    :param attributes: attributes of a replay buffer, in order
    :param model: the agent that it is for
    :param name: how to name the file in an error
    :param rows: how many rows there are in the file
    :raises FileRefused: its arrays would take more memory than those of the agent and than the file
    """
    buffer_size = attributes["buffer_size"]
    if buffer_size > max(rows, model.buffer_size // model.n_envs, 1):
        raise FileRefused(
            f"{name} has buffer_size={buffer_size * model.n_envs}, more than the agent's buffer_size="
            f"{model.buffer_size} and than the file holds; load the agent with a larger one"
        )


def _make_empty(attributes: dict[str, Any], model: "TD3X", name: str, buffer_size: int) -> ReplayBuffer:
    """
    :param attributes: attributes of a replay buffer, in order
    :param model: the agent that it is for
    :param name: how to name the file in an error
    :param buffer_size: how many rows it shall have
    :return: an empty replay buffer with these attributes
    """
    cls = _CLASSES[attributes["class"]]
    kwargs = {key: attributes[key] for key in ("handle_timeout_termination", *_ARGUMENTS[cls])}
    if cls is HerReplayBuffer:
        _check_env(model, name)
        kwargs["env"] = model.env
    spaces = model.observation_space, model.action_space
    return cls(buffer_size * model.n_envs, *spaces, device=model.device, n_envs=model.n_envs, **kwargs)


def _check_env(model: "TD3X", name: str) -> None:
    """
    :param model: the agent that a ``HerReplayBuffer`` is for
    :param name: how to name the file in an error
    """
    if model.env is None:
        raise FileRefused(f"{name} holds a HerReplayBuffer, which needs an env: load the agent with env=...")


def _set_position(replay_buffer: ReplayBuffer, attributes: dict[str, Any], name: str) -> None:
    """
    :param replay_buffer: a replay buffer whose arrays were read
    :param attributes: its attributes
    :param name: how to name the file in an error
    :raises FileRefused: its episodes lie outside of it
    """
    replay_buffer.pos, replay_buffer.full = attributes["pos"], attributes["full"]
    if not isinstance(replay_buffer, HerReplayBuffer):
        return
    starts = attributes.get("_current_ep_start")
    if not isinstance(starts, np.ndarray) or starts.dtype != np.int64 or starts.shape != (replay_buffer.n_envs,):
        raise FileRefused(f"{name} has a bad _current_ep_start")
    replay_buffer._current_ep_start = starts
    for key in ("ep_start", "ep_length", "_current_ep_start"):
        values = getattr(replay_buffer, key)
        if (values < 0).any() or (values > replay_buffer.buffer_size).any():
            raise FileRefused(f"{name} has a bad {key}: an episode lies outside of the buffer")


def _read_array_header(file: BinaryIO, array: np.ndarray, rows: int, name: str) -> None:
    """
    :param file: an array's member
    :param array: where its rows go
    :param rows: how many rows it should have
    :param name: how to name it in an error
    :raises FileRefused: it is of another shape or type
    """
    if np.lib.format.read_magic(file) != (1, 0):
        raise FileRefused(f"{name} is no array of version 1.0")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if shape != (rows, *array.shape[1:]) or dtype != array.dtype or fortran_order:
        raise FileRefused(f"{name} is {dtype} of shape {shape}, expected {array.dtype} {(rows, *array.shape[1:])}")


def _read_infos(replay_buffer: HerReplayBuffer, archive: CheckedZip, rows: int) -> None:
    """
    :param replay_buffer: where the infos go
    :param archive: the file
    :param rows: how many there are
    """
    # As many values as there are bytes: the infos of a large buffer are many
    size = sum(info.compress_size for info in archive.members.values())
    reader = JsonReader(archive.name, max(size, MAX_VALUES))
    with archive.open("infos.jsonl") as file:
        for row in range(rows):
            infos = from_plain(reader.read(file.readline(_MAX_INFOS_LINE)))
            if not (isinstance(infos, list) and len(infos) == replay_buffer.n_envs):
                raise FileRefused(f"{archive.name} has bad infos in row {row}")
            if not all(isinstance(info, dict) for info in infos):
                raise FileRefused(f"{archive.name} has bad infos in row {row}")
            replay_buffer.infos[row] = infos


# Pickles of SB3


def _run_pickle(file: BinaryIO, model: "TD3X", name: str) -> ReplayBuffer:
    """
    :param file: a pickle that is trusted
    :param model: the agent that it is for
    :param name: how to name it in an error
    :return: the replay buffer in it
    """
    replay_buffer = pickle.load(file)
    if not isinstance(replay_buffer, ReplayBuffer):
        raise FileRefused(f"{name} holds {type(replay_buffer).__name__}, expected a ReplayBuffer")
    if isinstance(replay_buffer, HerReplayBuffer):
        _check_env(model, name)
        replay_buffer.set_env(model.env)  # type: ignore[arg-type]
    return replay_buffer


def _read_pickle(file: BinaryIO, name: str, model: "TD3X") -> ReplayBuffer:
    """
    :param file: a pickle, which is not run
    :param name: how to name it in an error
    :param model: the agent that it is for
    :return: the replay buffer that it describes
    """
    with refusing(name):
        size = _size_of(file)
        try:
            pickled = read_pickle(file, name, PICKLE_PATHS, _MAX_OPERATIONS)
        except FileRefused as error:
            raise FileRefused(f"{error}; load it with trusted=True if you trust its author") from None
        if not (isinstance(pickled, Pickled) and pickled.path in _CLASSES and isinstance(pickled.state, dict)):
            raise FileRefused(f"{name} holds no replay buffer")
        state: dict[str, Any] = pickled.state
        # Of old versions of SB3
        state.setdefault("handle_timeout_termination", False)
        state.setdefault("optimize_memory_usage", False)
        names = {*_COMMON, *_ARGUMENTS[_CLASSES[pickled.path]], "_current_ep_start"}
        reader = PickleReader()
        attributes = {key: from_pickle(value, reader) for key, value in state.items() if key in names}
        attributes = {key: int(it) if isinstance(it, np.integer) else it for key, it in attributes.items()}
        attributes["class"] = pickled.path
        _check_attributes(attributes, model, name)
        rows = attributes["buffer_size"]
        empty = _make_empty(attributes, model, name, 1)
        given = _given_columns(empty, state, size)
        # Old versions of SB3 know no time-outs
        columns = {key: array for key, array in _columns(empty).items() if key in given or key != "timeouts"}
        for key, array in columns.items():
            shape, value = (rows, *array.shape[1:]), given.get(key)
            if not isinstance(value, np.ndarray) or value.shape != shape or value.dtype != array.dtype:
                raise FileRefused(f"{name} has a bad {key}: expected {array.dtype} of shape {shape}")
        replay_buffer = _make_empty(attributes, model, name, rows)
        for key in columns:
            _columns(replay_buffer)[key][...] = given[key]
        if isinstance(replay_buffer, HerReplayBuffer) and replay_buffer.copy_info_dict:
            reader = PickleReader(max(size, MAX_PARTS), max(size, MAX_ARRAY_BYTES))
            infos = [_info(info, reader) for info in state["infos"].state[-1]]
            replay_buffer.infos = np.array(infos, dtype=object).reshape(replay_buffer.infos.shape)
        _set_position(replay_buffer, attributes, name)
    return replay_buffer


def _size_of(file: BinaryIO) -> int:
    """
    :param file: a file
    :return: how many bytes there are from here on
    """
    start = file.tell()
    end = file.seek(0, io.SEEK_END)
    file.seek(start)
    return end - start


def _columns(replay_buffer: ReplayBuffer) -> dict[str, np.ndarray]:
    """
    :param replay_buffer: a replay buffer
    :return: its arrays by their names in a pickle
    """
    if isinstance(replay_buffer, PackedReplayBuffer):
        return replay_buffer.blocks
    return _arrays(replay_buffer)


def _given_columns(replay_buffer: ReplayBuffer, state: dict[str, Any], size: int) -> dict[str, Any]:
    """
    :param replay_buffer: a replay buffer
    :param state: what a pickle of another one says
    :param size: size of the pickle in bytes; arrays that share none of them take no more
    :return: what should be the arrays of the other one, by their names
    """
    reader = PickleReader(max_array_bytes=size)
    given: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key in _columns(replay_buffer)} & state.keys():
        value = from_pickle(state[name], reader)
        if isinstance(value, dict):
            own = getattr(replay_buffer, name)
            given.update({f"{name}.{number}": value.get(key) for number, key in enumerate(own)})
        else:
            given[name] = value
    return given


def _info(value: Any, reader: PickleReader) -> dict[str, Any]:
    """
    :param value: part of a pickle
    :param reader: of all infos
    :return: an info of an env
    """
    info = from_pickle(value, reader)
    if not isinstance(info, dict):
        raise TypeError("its infos are no dictionaries")
    return info
