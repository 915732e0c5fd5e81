"""Types of command-line options that scripts have."""

import argparse
import math
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """
    :param low: the lowest number that is allowed
    :return: what makes a whole number of an option's text, for ``argparse``
    """

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed, expected a whole number of at least {low}")
        return int(text)

    return whole_number


def positive(text: str) -> float:
    """
    :param text: an option's text
    :return: it as a number above 0, for ``argparse``
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, expected a number above 0")
    return number
