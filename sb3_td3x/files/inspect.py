"""Showing what an agent's file contains, without running any of it."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch as th

from sb3_td3x.files.agent import UNSAVED, AgentFile, open_agent
from sb3_td3x.files.atomic import SavePath
from sb3_td3x.files.errors import refusing
from sb3_td3x.files.pickles import allowed_in_pickles, names_in_pickle
from sb3_td3x.files.records import path_of

_MAX_LENGTH = 200
_FIRST = ("policy_class", "policy_kwargs", "observation_space", "action_space", "num_timesteps", "_n_updates")


def describe_agent(path: SavePath) -> str:
    """
    Describe an agent's file.

    :raises ValueError: the file is damaged, or holds another algorithm's agent
    """
    agent = open_agent(path)
    with refusing(agent.name):
        return "\n".join(_lines(agent))


def _lines(agent: AgentFile) -> Iterator[str]:
    """Return the lines."""
    values = {name: _described(agent, name) for name in agent.data}
    by = "TD3X" if "clipped_double_q" in agent.data else "SB3's TD3 or DDPG"
    yield f"{agent.name}: an agent of {by}"
    yield f"checksum: {'right' if agent.is_sealed else 'none'}"
    for name, text in agent.texts.items():
        yield f"{name.removeprefix('_').removesuffix('.txt')}: {one_line(text)}"
    for name in _FIRST:
        yield f"{name.removeprefix('_')}: {values.pop(name, 'missing')}"
    for name, state in agent.states.items():
        yield f"{one_line(name)}.pth: {_count_numbers(state)} numbers"
        if name == "policy":
            for network in sorted({key.partition(".")[0] for key in state}):
                part = {key: tensor for key, tensor in state.items() if key.partition(".")[0] == network}
                yield f"  {one_line(network)}: {_count_numbers(part)} numbers"
    yield "attributes:"
    for name, value in sorted(values.items()):
        yield f"  {one_line(name)}: {value}"
    yield f"pickles: {len(agent.pickles) or 'none'}"
    for name, content in sorted(agent.pickles.items()):
        unknown = sorted({*names_in_pickle(io.BytesIO(content))} - allowed_in_pickles())
        verdict = f"needs trusted=True: names {', '.join(unknown)}" if unknown else "names only what is allowed"
        yield f"  {one_line(name)}: {'not needed, never read' if name in UNSAVED else one_line(verdict)}"


def _described(agent: AgentFile, name: str) -> str:
    """Return the value of an attribute in one line, as far as it can be read without running code."""
    try:
        value = agent.attribute(name)
    except Exception:  # a pickle may hold anything
        return "pickled"
    if isinstance(value, type):
        return path_of(value)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return one_line(repr(value))


def _count_numbers(state: Any) -> int:
    """Return how many numbers the tensors of a state dictionary have."""
    if isinstance(state, th.Tensor):
        return state.numel()
    entries = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(map(_count_numbers, entries))


def one_line(text: str) -> str:
    """Return a text in one line of limited length, without control characters that a terminal would obey."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]}..."
