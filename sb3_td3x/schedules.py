"""Learning rate schedules from what a user writes: numbers, functions, and strings in YAML."""

import re
from collections.abc import Callable
from typing import Any

from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from sb3_td3x.files.records import check_type, register_object
from sb3_td3x.validation import check_number


@register_object("initial_value", aliases=("rl_zoo3.utils.SimpleLinearSchedule",))
class SimpleLinearSchedule:
    """
    The zoo's linear schedule by the same name, for agents that were trained there: the same numbers without the zoo.

    :param initial_value: the learning rate at the start; at the end it is 0
    """

    def __init__(self, initial_value: float) -> None:
        self.initial_value = initial_value

    def __call__(self, progress_remaining: float) -> float:
        """
        :param progress_remaining: from 1 to 0
        :return: the learning rate
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
    :param name: name of the argument, for the error
    :param value: a number >= 0, a function of the progress remaining (from 1 to 0),
        or the zoo's string for a linear schedule: ``lin_7e-4`` falls from 7e-4 to 0
    :return: the schedule
    :raises ValueError: the value, or that of the function at the start, is no learning rate
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
    :param name: name of the argument, for the error
    :param schedule: the schedule
    :param progress_remaining: from 1 to 0
    :return: its value then
    :raises ValueError: that is no learning rate
    """
    value: Any
    try:
        value = schedule(progress_remaining)
    except (TypeError, ValueError) as error:
        value = error
    return check_number(f"{name} at progress {progress_remaining:g}", value, 0)
