"""Checks of arguments and of data, with errors that name what is wrong, its value and what is allowed."""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.noise import (
    ActionNoise,
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
    VectorizedActionNoise,
)
from stable_baselines3.common.type_aliases import TrainFreq


def check_integer(name: str, value: Any, low: int | None) -> int:
    """
    :param name: name of the argument
    :param value: its value; integral floats, such as YAML's ``1e4``, count as integers
    :param low: the smallest value that is allowed; None: any
    :return: the value as an ``int``
    """
    integral = not isinstance(value, (bool, np.bool_)) and (
        isinstance(value, (int, np.integer)) or (isinstance(value, (float, np.floating)) and float(value).is_integer())
    )
    if not integral or (low is not None and value < low):
        bound = "" if low is None else f" >= {low}"
        raise ValueError(f"{name}={value!r} is not allowed, expected an integer{bound}")
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
    # Integers may be larger than any float
    is_finite = is_number and (abs(value) < 1e308 if isinstance(value, int) else math.isfinite(value))
    if not (is_finite and above(value, low) and value <= high):
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
    :param action_space: the action space of an env: a Box of floats with finite bounds, the lower below the upper
    """
    if not isinstance(action_space, spaces.Box) or not np.issubdtype(action_space.dtype, np.floating):
        raise ValueError(
            f"action_space={action_space} is not allowed, expected a Box of floats: TD3X needs continuous actions"
        )
    low, high = action_space.low, action_space.high
    with np.errstate(over="ignore"):
        finite = np.isfinite(low) & np.isfinite(high) & np.isfinite(high - low)
    if not (finite & (low < high)).all():
        raise ValueError(
            f"action_space={action_space} is not allowed, expected finite bounds with low < high in every dimension, "
            f"got low={low} and high={high}"
        )


def check_train_freq(name: str, value: Any, n_envs: int) -> int | tuple[int, str] | TrainFreq:
    """
    :param name: name of the argument
    :param value: its value: an integer >= 1, or (integer, "step" or "episode")
    :param n_envs: number of envs; episodes can be counted in one env only
    :return: the value as SB3 takes it
    """
    if not isinstance(value, (tuple, list)):
        return check_integer(name, value, low=1)
    unit = getattr(value[-1], "value", value[-1]) if len(value) == 2 else None
    if unit not in ("step", "episode"):
        raise ValueError(f"{name}={value!r} is not allowed, expected an integer or (integer, 'step' or 'episode')")
    if unit == "episode" and n_envs > 1:
        raise ValueError(f"{name}={value!r} is not allowed with {n_envs} envs, expected a number of steps")
    return check_integer(name, value[0], low=1), unit


def check_action_noise(name: str, noise: Any, action_space: spaces.Box) -> None:
    """
    :param name: name of the argument
    :param noise: its value: an ``ActionNoise`` with finite numbers, a deviation >= 0 and the shape of an action
    :param action_space: the action space
    """
    if not isinstance(noise, ActionNoise):
        raise ValueError(f"{name}={noise!r} is not allowed, expected an ActionNoise or None")
    base_noise = noise.base_noise if isinstance(noise, VectorizedActionNoise) else noise
    if isinstance(base_noise, (NormalActionNoise, OrnsteinUhlenbeckActionNoise)):
        values: list[Any] = [base_noise._mu, base_noise._sigma]
        if isinstance(base_noise, OrnsteinUhlenbeckActionNoise):
            values += [base_noise._theta, base_noise._dt, base_noise.noise_prev]
            values += [] if base_noise.initial_noise is None else [base_noise.initial_noise]
        try:
            arrays = [np.asarray(value, dtype=np.float64) for value in values]
            are_valid = all(np.isfinite(array).all() for array in arrays) and (arrays[1] >= 0).all()
        except (TypeError, ValueError, OverflowError):
            are_valid = False
        if not are_valid:
            raise ValueError(f"{name}={base_noise!r} is not allowed, expected finite numbers and a sigma >= 0")
        try:
            shape = np.broadcast_shapes(*(array.shape for array in arrays))
            # A single number is no array, which SB3's noises need
            fits = shape != () and np.broadcast_shapes(shape, action_space.shape) == action_space.shape
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(
                f"{name}={base_noise!r} is not allowed, expected arrays of an action's shape, {action_space.shape}"
            )


def check_net_arch(name: str, value: Any) -> None:
    """
    :param name: name of the argument
    :param value: its value: a list of integers >= 1, or a dictionary of such for "pi" and "qf"; None: the default
    """
    lists = [value.get(key) for key in ("pi", "qf")] if isinstance(value, dict) else [value]
    for units in [] if value is None else lists:
        if not isinstance(units, (list, tuple)) or not all(
            isinstance(number, (int, np.integer)) and not isinstance(number, bool) and number >= 1 for number in units
        ):
            raise ValueError(
                f"{name}={value!r} is not allowed, expected a list of integers >= 1, or dict(pi=..., qf=...) of such"
            )


def check_unnormalized_shapes(obs: Any, observation_space: spaces.Space) -> None:
    """
    :param obs: observations as ``VecNormalize`` has them, before it normalises: (n_envs, ...), or a dictionary of such
    :param observation_space: that of the agent
    """
    if isinstance(observation_space, spaces.Dict):
        for key, space in observation_space.spaces.items():
            check_unnormalized_shapes(obs[key], space)
    elif obs.shape[1:] != observation_space.shape:
        raise ValueError(
            "no wrapper that changes observations is allowed around VecNormalize, such as frame stacking, or for "
            "images VecTransposeImage, which SB3 puts there unless it is inside: VecNormalize(VecTransposeImage(env)). "
            f"It has observations of shape {obs.shape[1:]}, the agent {observation_space.shape}"
        )


def check_known(function: str, arguments: Iterable[str], known: set[str]) -> None:
    """
    :param function: name of the function, for the error
    :param arguments: names of the arguments that it was given
    :param known: names of those that it has
    """
    for name in arguments:
        if name not in known:
            closest = difflib.get_close_matches(name, known, n=1)
            suggestion = f", did you mean {closest[0]}?" if closest else ""
            raise ValueError(f"{name} is no argument of {function}(){suggestion}")


def check_finite(
    quantity: str, values: np.ndarray | dict[str, np.ndarray], timestep: int, envs: np.ndarray | None = None
) -> None:
    """
    Stop at NaN, infinity and what is infinite in float32 before they enter the replay buffer,
    where they would turn the networks into NaN.

    :param quantity: what the values are, for the error
    :param values: one entry for each env, (n_envs, ...), or a dictionary of such
    :param timestep: number of env timesteps so far, for the error
    :param envs: indices of the envs to look at; None: all
    """
    if isinstance(values, dict):
        for key, entry in values.items():
            check_finite(f"{quantity}[{key!r}]", entry, timestep, envs)
        return
    if values.dtype.kind != "f":
        return
    looked_at = values if envs is None else values[envs]
    with np.errstate(over="ignore"):
        finite = np.isfinite(looked_at.astype(np.float32, copy=False))
    if not finite.all():
        row, *rest = (int(idx) for idx in np.argwhere(~finite)[0])
        env_idx = row if envs is None else int(envs[row])
        index = f" at index {rest}" if rest else ""
        raise ValueError(
            f"The {quantity} of env {env_idx} is {looked_at[row][tuple(rest)]}{index} at timestep {timestep}: "
            "training stops before it enters the replay buffer"
        )
