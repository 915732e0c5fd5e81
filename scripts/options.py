"""A type of command-line options that several scripts have."""

import argparse
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
