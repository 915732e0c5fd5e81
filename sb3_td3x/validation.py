"""Checks of arguments and of data, with errors that name what is wrong, its value and what is allowed."""

import math
import operator
from typing import Any

import numpy as np
from gymnasium import spaces


def check_integer(name: str, value: Any, low: int) -> int:
    """
    :param name: name of the argument
    :param value: its value; integral floats, such as YAML's ``1e4``, count as integers
    :param low: the smallest value that is allowed
    :return: the value as an ``int``
    """
    integral = not isinstance(value, (bool, np.bool_)) and (
        isinstance(value, (int, np.integer)) or (isinstance(value, (float, np.floating)) and float(value).is_integer())
    )
    if not integral or value < low:
        raise ValueError(f"{name}={value!r} is not allowed, expected an integer >= {low}")
    return int(value)


def check_number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
) -> float:
    """
    :param name: name of the argument
    :param value: its value
    :param low: lower bound
    :param high: upper bound, included; infinity itself is never allowed
    :param low_open: whether the lower bound is excluded
    :return: the value as a ``float``
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    above = operator.gt if low_open else operator.ge
    if not (is_number and math.isfinite(value) and above(value, low) and value <= high):
        bracket = "(" if low_open else "["
        upper = "inf)" if math.isinf(high) else f"{high:g}]"
        raise ValueError(f"{name}={value!r} is not allowed, expected a number in {bracket}{low:g}, {upper}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """
    :param name: name of the argument
    :param value: its value
    :return: the value as a ``bool``
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} is not allowed, expected True or False")
    return bool(value)


def check_action_space(action_space: spaces.Space) -> None:
    """
    :param action_space: the action space of an env: a Box with finite bounds, the lower below the upper
    """
    if not isinstance(action_space, spaces.Box):
        raise ValueError(f"action_space={action_space} is not allowed, expected a Box: TD3X needs continuous actions")
    low, high = action_space.low, action_space.high
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ValueError(
            f"action_space={action_space} is not allowed, expected finite bounds with low < high in every dimension, "
            f"got low={low} and high={high}"
        )


def check_finite(quantity: str, values: np.ndarray | dict[str, np.ndarray], timestep: int) -> None:
    """
    Stop at NaN and infinity before they enter the replay buffer, where they would turn the networks into NaN.

    :param quantity: what the values are, for the error
    :param values: one entry for each env, (n_envs, ...), or a dictionary of such
    :param timestep: number of env timesteps so far, for the error
    """
    if isinstance(values, dict):
        for key, entry in values.items():
            check_finite(f"{quantity}[{key!r}]", entry, timestep)
    elif values.dtype.kind == "f" and not np.isfinite(values).all():
        env_idx, *index = (int(idx) for idx in np.argwhere(~np.isfinite(values))[0])
        where = f" at index {index}" if index else ""
        raise ValueError(
            f"The {quantity} of env {env_idx} is {values[(env_idx, *index)]}{where} at timestep {timestep}: "
            "training stops before it enters the replay buffer"
        )
