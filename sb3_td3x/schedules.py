"""Learning rate schedules from what a user writes: numbers, functions, and strings in YAML."""

from collections.abc import Callable

from stable_baselines3.common.utils import FloatSchedule, LinearSchedule

from sb3_td3x.validation import check_number


def make_schedule(name: str, value: float | str | Callable[[float], float]) -> FloatSchedule:
    """
    :param name: name of the argument, for the error
    :param value: a number >= 0, a function of the progress remaining (from 1 to 0),
        or the zoo's string for a linear schedule: ``lin_7e-4`` falls from 7e-4 to 0
    :return: the schedule
    :raises ValueError: the value, or that of the function at the start, is no learning rate
    """
    if isinstance(value, str):
        kind, _, start = value.partition("_")
        try:
            initial_value = float(start)
        except ValueError:
            kind = ""
        if kind != "lin":
            raise ValueError(
                f"{name}={value!r} is not allowed, expected a number, a function or a string such as 'lin_7e-4'"
            )
        return FloatSchedule(LinearSchedule(check_number(name, initial_value, 0), 0.0, 1.0))
    if not callable(value):
        return FloatSchedule(check_number(name, value, 0))
    schedule = FloatSchedule(value)
    check_number(f"{name}(1.0)", schedule(1.0), 0)
    return schedule
