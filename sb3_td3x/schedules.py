"""Learning rate schedules from numbers, functions, and the strings that YAML files use."""

import re
from collections.abc import Callable
from typing import Any

from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_td3x.files.records import check_type, register_object
from sb3_td3x.validation import check_number


@register_object("initial_value", aliases=("rl_zoo3.utils.SimpleLinearSchedule",))
class SimpleLinearSchedule:
    """
    A learning rate that falls linearly to 0, as the zoo's class of the same name.

    Agents trained with the zoo contain its class. This one loads them without the zoo.
    """

    def __init__(self, initial_value: float) -> None:
        self.initial_value = initial_value

    def __call__(self, progress_remaining: float) -> float:
        """
        Return the learning rate.

        :param progress_remaining: Remaining fraction of the training, from 1 to 0
        """
        return progress_remaining * self.initial_value

    def __repr__(self) -> str:
        return f"SimpleLinearSchedule(initial_value={self.initial_value})"


# SB3's wrapper of every schedule. One of a user's own functions is pickled
register_object(
    "value_schedule",
    build=lambda state: FloatSchedule(
        check_type(state["value_schedule"], ConstantSchedule | LinearSchedule | SimpleLinearSchedule)
    ),
)(FloatSchedule)


def make_schedule(name: str, value: float | str | Callable[[float], float]) -> FloatSchedule:
    """
    Build a learning rate schedule from an argument.

    :param value: A number >= 0, a function of the remaining progress (from 1 to 0), or the zoo's string for a linear
        schedule: ``lin_7e-4`` falls from 7e-4 to 0
    :raises ValueError: If the value is none of these, or the function does not start with a number >= 0
    """
    if isinstance(value, str):
        match = re.fullmatch(r"lin_((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)", value)
        if match is None:
            raise ValueError(
                f"{name}={value!r} is not allowed, expected a number (in YAML 1.0e-3, since 1e-3 is a string there), "
                "a function or a string such as 'lin_7e-4'"
            )
        return FloatSchedule(LinearSchedule(check_number(name, float(match[1]), 0), 0.0, 1.0))
    if not callable(value):
        return FloatSchedule(check_number(name, value, 0))
    schedule = FloatSchedule(value)
    learning_rate_at(name, schedule, 1.0)
    return schedule


def learning_rate_at(name: str, schedule: Callable[[float], float], progress_remaining: float) -> float:
    """
    Return the value of a schedule, after checking that it is a learning rate.

    :param name: Name of the argument, for the error message
    :param progress_remaining: Remaining fraction of the training, from 1 to 0
    :raises ValueError: If the schedule fails, or its value is not a finite number >= 0
    """
    value: Any
    try:
        value = schedule(progress_remaining)
    except (TypeError, ValueError) as error:
        value = error
    return check_number(f"{name} at progress {progress_remaining:g}", value, 0)
