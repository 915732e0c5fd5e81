"""Types of command-line options."""

import argparse
from collections.abc import Callable


def at_least(low: int) -> Callable[[str], int]:
    """Return a type for ``argparse``: whole numbers with a lower bound."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed, expected a whole number of at least {low}")
        return int(text)

    return whole_number
