"""The error of all readers: one sentence that names the file."""

import contextlib
from collections.abc import Iterator


class FileRefused(ValueError):  # noqa: N818 - reads better than FileRefusedError
    """A file is damaged, too large, of another kind or not safe to read."""


@contextlib.contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn every exception of a reader into one sentence. A file from a stranger can cause any type of exception."""
    try:
        yield
    except FileRefused:
        raise
    except Exception as error:
        raise FileRefused(f"{name} is damaged: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Return the first sentence of an error, at most 200 characters. PyTorch's messages have many lines."""
    return str(error).partition("\n")[0].partition(". ")[0][:200] or type(error).__name__
