"""What is in an agent's file, told without running any of it."""

import io
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from sb3_td3x.files.agent import REBUILT, AgentFile, open_agent, pickles_of
from sb3_td3x.files.atomic import SavePath, refusing
from sb3_td3x.files.pickles import read_pickle
from sb3_td3x.files.records import PICKLE_PATHS, PickleReader, from_pickle, from_plain, path_of
from sb3_td3x.files.tensors import TensorInfo

_MAX_LENGTH = 200


def describe_agent(path: SavePath) -> str:
    """
    :param path: path to the file, with or without ``.zip``, or a file-like object
    :return: what is in it, in lines for reading
    :raises ValueError: the file is damaged, or holds another algorithm's agent
    :raises OSError: it is not there or cannot be read
    """
    agent = open_agent(path)
    with refusing(agent.name):
        return "\n".join(_lines(agent))


def _lines(agent: AgentFile) -> Iterator[str]:
    """
    :param agent: the file
    :return: the lines
    """
    reader, numbers = PickleReader(), itertools.count()
    values = {name: _described(agent, name, reader, numbers) for name in agent.data}
    pickles = pickles_of(agent)
    by = "TD3X" if "clipped_double_q" in agent.data else "SB3's TD3 or DDPG"
    yield f"{agent.name}: an agent of {by}, {sum(agent.sizes.values())} bytes"
    yield f"checksum: {'right' if agent.is_sealed else 'none'}"
    for name, text in agent.texts.items():
        yield f"{name.removeprefix('_').removesuffix('.txt')}: {one_line(text)}"
    first = ("policy_class", "policy_kwargs", "observation_space", "action_space", "num_timesteps", "_n_updates")
    for name in first:
        yield f"{name.removeprefix('_')}: {values.pop(name, 'missing')}"
    for name, state in agent.describe().items():
        yield f"{one_line(name)}.pth: {agent.sizes[f'{name}.pth']} bytes, {_numbers_in(state)} numbers"
        if name == "policy":
            for network in sorted({key.partition(".")[0] for key in state}):
                part = {key: info for key, info in state.items() if key.partition(".")[0] == network}
                yield f"  {one_line(network)}: {_numbers_in(part)} numbers"
    yield "attributes:"
    for name, value in sorted(values.items()):
        yield f"  {one_line(name)}: {value}"
    yield f"pickles: {len(pickles) or 'none'}"
    for name, named in sorted(pickles.items()):
        unknown = sorted(set(named) - PICKLE_PATHS)
        verdict = f"needs trusted=True: names {', '.join(unknown)}" if unknown else "names only what is allowed"
        yield f"  {one_line(name)}: {'not needed, never read' if name in REBUILT else one_line(verdict)}"


def _described(agent: AgentFile, name: str, reader: PickleReader, numbers: Iterator[int]) -> str:
    """
    :param agent: the file
    :param name: name of an attribute
    :param reader: of what its pickles say
    :param numbers: of the operations in its pickles
    :return: its value in one line, as far as it can be known
    """
    try:
        if name in agent.pickles:
            pickled = read_pickle(io.BytesIO(agent.pickles[name]), name, PICKLE_PATHS, numbers=numbers)
            value = from_pickle(pickled, reader)
        else:
            value = from_plain(agent.data[name])
    except Exception:  # a pickle may hold anything
        return "pickled"
    if isinstance(value, type):
        return path_of(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return one_line(repr(value))


def _numbers_in(state: Any) -> int:
    """
    :param state: part of a state dictionary
    :return: how many numbers its tensors have
    """
    if isinstance(state, TensorInfo):
        return math.prod(state.shape)
    entries = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(_numbers_in(entry) for entry in entries)


def one_line(text: str) -> str:
    """
    :param text: a stranger's text
    :return: the same without what a terminal would obey, and not too long
    """
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]}..."
