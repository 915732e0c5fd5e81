"""Checks of arguments and of data. Errors name the argument, its value and what is allowed."""

import difflib
import inspect
import math
import operator
import os
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.noise import (
    ActionNoise,
    NormalActionNoise,
    OrnsteinUhlenbeckActionNoise,
    VectorizedActionNoise,
)

# Of the matrix products of the updates
PRECISIONS = ("float32", "bfloat16")
Instance = TypeVar("Instance")

# Arguments of an agent that are integers, with the lowest value
_INTEGERS = {
    "buffer_size": 1,
    "learning_starts": 0,
    "batch_size": 1,
    "gradient_steps": -1,
    "n_steps": 1,
    "policy_delay": 1,
    "policy_checkpoint_episodes": 0,
    "top_quantiles_to_drop_per_net": 0,
    "_stats_window_size": 1,
}
# Arguments of an agent that are numbers, with their bounds
_NUMBERS = {
    "tau": (0.0, 1.0),
    "actor_average_tau": (0.0, 1.0),
    "gamma": (0.0, 1.0),
    "target_policy_noise": (0.0, math.inf),
    "target_noise_clip": (0.0, math.inf),
    "action_noise_min_scale": (0.0, 1.0),
    "prioritized_replay_alpha": (0.0, 1.0),
}


def check_integer(name: str, value: Any, low: int | None) -> int:
    """
    Check an integer argument.

    :param value: its value; integral floats, such as YAML's ``1e4``, count as integers
    :param low: the smallest allowed value; None: any
    :return: the value as an ``int``
    :raises ValueError: it is not allowed
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
    Check a finite number.

    :param high: upper bound, included
    :param low_open: whether the lower bound is excluded
    :return: the value as a ``float``
    :raises ValueError: it is not allowed
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    above = operator.gt if low_open else operator.ge
    # An integer may exceed the largest float
    is_finite = is_number and (abs(value) < 1e308 if isinstance(value, int) else math.isfinite(value))
    if not (is_finite and above(value, low) and value <= high):
        bracket = "(" if low_open else "["
        upper = "inf)" if math.isinf(high) else f"{high:g}]"
        raise ValueError(f"{name}={value!r} is not allowed, expected a number in {bracket}{low:g}, {upper}")
    return float(value)


def check_bool(name: str, value: Any) -> bool:
    """
    Check a boolean argument.

    :return: the value as a ``bool``
    :raises ValueError: it is not allowed
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name}={value!r} is not allowed, expected True or False")
    return bool(value)


def check_action_space(action_space: spaces.Space) -> None:
    """
    Check that an action space is a Box of floats with finite bounds, low < high.

    :raises ValueError: it is not allowed
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


class KnownArguments:
    """Refuse unknown keyword arguments of the constructor by a ``ValueError`` that names the closest one."""

    def __new__(cls: type[Instance], *args: Any, **kwargs: Any) -> Instance:
        _check_keywords(cls, kwargs)
        return object.__new__(cls)


def _check_keywords(cls: Any, arguments: Iterable[str]) -> None:
    """Check the names of keyword arguments against the constructor of a class."""
    parameters = inspect.signature(cls.__init__).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_known(cls.__name__, arguments, set(parameters) - {"self"})


def check_device(device: Any) -> None:
    """
    Check the name of a PyTorch device.

    :param device: value of the argument ``device``
    :raises ValueError: there is no such device
    """
    names = ("auto", "cpu", "cuda", "mps", "xpu")
    if device == "auto":
        return
    try:
        th.device(device)
    except (RuntimeError, TypeError) as error:
        closest = difflib.get_close_matches(str(device), names, n=1, cutoff=0.7)
        suggestion = f", did you mean {closest[0]!r}?" if closest else ""
        raise ValueError(
            f"device={device!r} is not allowed, expected one of {', '.join(names)}, or 'cuda:1'{suggestion}"
        ) from error


def check_known(function: str, arguments: Iterable[str], known: set[str]) -> None:
    """
    Check the names of a function's arguments.

    :raises ValueError: an argument does not exist; names the closest one
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
    Check that values are finite in float32. In the replay buffer, NaN or infinity would turn the networks into NaN.

    :param values: one entry for each env, (n_envs, ...), or a dictionary of such arrays
    :param timestep: number of env timesteps so far
    :param envs: indices of the envs to check; None: all
    :raises ValueError: a value is not finite; names its env, index and timestep
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


def check_arguments(model: Any) -> None:
    """
    Check all arguments of an agent, and convert numbers such as YAML's ``1e4``.

    :param model: the ``TD3X``, with its arguments as attributes
    :raises ValueError: an argument is not allowed
    """
    check_action_space(model.action_space)
    if model.seed is not None:
        model.seed = check_integer("seed", model.seed, low=0)
    if not isinstance(model.policy_kwargs, dict):
        raise ValueError(f"policy_kwargs={model.policy_kwargs!r} is not allowed, expected a dictionary or None")
    _check_keywords(model.policy_class, model.policy_kwargs)
    _check_net_arch(model.policy_kwargs.get("net_arch"))
    if not isinstance(model.tensorboard_log, str | os.PathLike | None):
        raise ValueError(f"tensorboard_log={model.tensorboard_log!r} is not allowed, expected a path or None")
    for name, low in _INTEGERS.items():
        setattr(model, name, check_integer(name.removeprefix("_"), getattr(model, name), low))
    for name, bounds in _NUMBERS.items():
        setattr(model, name, check_number(name, getattr(model, name), *bounds))
    model.action_noise_decay = check_number("action_noise_decay", model.action_noise_decay, 0, 1, low_open=True)
    for name in ("clipped_double_q", "overlap_updates"):
        setattr(model, name, check_bool(name, getattr(model, name)))
    if model.precision not in PRECISIONS:
        raise ValueError(f"precision={model.precision!r} is not allowed, expected one of {', '.join(PRECISIONS)}")
    model.train_freq = _check_train_freq(model.train_freq, model.n_envs)
    if model.overlap_updates and isinstance(model.train_freq, tuple) and model.train_freq[1] == "episode":
        raise ValueError(
            f"overlap_updates=True is not allowed with train_freq={model.train_freq!r}, expected a number of steps: "
            "the last step of an episode is not known before it is taken"
        )
    if model.overlap_updates and model.policy_checkpoint_episodes > 0:
        raise ValueError(
            f"overlap_updates=True is not allowed with policy_checkpoint_episodes={model.policy_checkpoint_episodes}, "
            "expected False: the updates wait for the end of an episode"
        )
    if model.actor_average_tau > 0 and model.policy_checkpoint_episodes > 0:
        raise ValueError(
            f"actor_average_tau={model.actor_average_tau} is not allowed with "
            f"policy_checkpoint_episodes={model.policy_checkpoint_episodes}, expected 0: only one of them can play"
        )
    n_quantiles = check_integer("n_quantiles", model.policy_kwargs.get("n_quantiles", 1), low=1)
    if 1 < n_quantiles <= model.top_quantiles_to_drop_per_net:
        raise ValueError(
            f"top_quantiles_to_drop_per_net={model.top_quantiles_to_drop_per_net} is not allowed with "
            f"n_quantiles={n_quantiles}, expected an integer in [0, {n_quantiles - 1}]"
        )
    if model.action_noise is not None:
        _check_action_noise(model.action_noise, model.action_space)


def _check_train_freq(value: Any, n_envs: int) -> int | tuple[int, str]:
    """Return an update frequency, an integer >= 1 or (integer, "step" or "episode"), in a form that SB3 accepts."""
    if not isinstance(value, (tuple, list)):
        return check_integer("train_freq", value, low=1)
    unit = getattr(value[-1], "value", value[-1]) if len(value) == 2 else None
    if unit not in ("step", "episode"):
        raise ValueError(f"train_freq={value!r} is not allowed, expected an integer or (integer, 'step' or 'episode')")
    if unit == "episode" and n_envs > 1:
        raise ValueError(f"train_freq={value!r} is not allowed with {n_envs} envs, expected a number of steps")
    return check_integer("train_freq", value[0], low=1), unit


def _check_action_noise(noise: Any, action_space: spaces.Box) -> None:
    """Check that a noise has finite numbers, a standard deviation >= 0 and the shape of an action."""
    if not isinstance(noise, ActionNoise):
        raise ValueError(f"action_noise={noise!r} is not allowed, expected an ActionNoise or None")
    base_noise = noise.base_noise if isinstance(noise, VectorizedActionNoise) else noise
    if not isinstance(base_noise, (NormalActionNoise, OrnsteinUhlenbeckActionNoise)):
        return
    values: list[Any] = [base_noise._mu, base_noise._sigma]
    if isinstance(base_noise, OrnsteinUhlenbeckActionNoise):
        values += [base_noise._theta, base_noise._dt, base_noise.noise_prev]
        values += [] if base_noise.initial_noise is None else [base_noise.initial_noise]
    shape = action_space.shape
    try:
        arrays = [np.asarray(value, dtype=np.float64) for value in values]
        # SB3's noises need arrays, not single numbers
        noise_shape = np.broadcast_shapes(*(array.shape for array in arrays))
        fits = noise_shape != () and np.broadcast_shapes(noise_shape, shape) == shape
        is_valid = fits and all(np.isfinite(array).all() for array in arrays) and (arrays[1] >= 0).all()
    except (TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"action_noise={base_noise!r} is not allowed, expected arrays of finite numbers of an action's shape, "
            f"{shape}, and a sigma >= 0"
        )


def _check_net_arch(value: Any) -> None:
    """Check the sizes of the hidden layers: a list of integers >= 1, "pi" and "qf" with such a list each, or None."""
    lists = [value.get(key) for key in ("pi", "qf")] if isinstance(value, dict) else [value]
    for units in [] if value is None else lists:
        if not isinstance(units, (list, tuple)) or not all(
            isinstance(number, (int, np.integer)) and not isinstance(number, bool) and number >= 1 for number in units
        ):
            raise ValueError(
                f"net_arch={value!r} is not allowed, expected a list of integers >= 1, or dict(pi=..., qf=...) of such"
            )
