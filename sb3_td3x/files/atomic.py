"""Writing files so that a kill, a full disk or another process leaves the old file or the new one, never a part."""

import contextlib
import errno
import io
import os
import pathlib
import secrets
import warnings
from collections.abc import Iterator
from typing import BinaryIO, cast

from filelock import BaseFileLock, FileLock, Timeout
from stable_baselines3.common.save_util import open_path

# Files that a killed process may leave behind; they can be deleted while no process writes to the folder
TEMPORARY_PATTERN = ".*.*.partial"

# Path to a file, with or without its suffix, or a file-like object
SavePath = str | pathlib.Path | io.BufferedIOBase


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """
    Open a temporary file for writing. At the end of the ``with`` block it is flushed to the disk and replaces the file
    at ``path``, unless the block raised an exception.

    :param path: path of the file; a symbolic link is followed, and an old file's permissions are kept
    :raises OSError: the file cannot be written, or the disk is full; the old file is untouched
    """
    target = pathlib.Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # A device or a pipe cannot be replaced
        with target.open("wb") as file:
            yield file
        return
    # In the same folder, because a rename across file systems is a copy
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            partial.chmod(target.stat().st_mode)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flush the names in a folder to the disk, so that a rename survives a power cut."""
    if os.name != "posix":
        # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_folder(folder: pathlib.Path) -> BaseFileLock:
    """
    Lock a folder against other processes by a file ``.lock`` in it. Within a process the lock can be taken several
    times; it is free after as many releases, or when the process ends in any way.

    :param folder: the folder; if it does not exist or cannot be locked, the lock is not taken
    :raises ValueError: another process holds the lock
    """
    lock = FileLock(folder.resolve() / ".lock", is_singleton=True)
    if folder.is_dir():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"'{folder}' is in use by another process") from None
        except (OSError, NotImplementedError) as error:
            # A read-only folder, a full quota, or a file system without locks (older versions of filelock raise the
            # second) are no reason to end a training
            warnings.warn(f"{folder} cannot be locked against other processes: {error}", stacklevel=2)
    return lock


@contextlib.contextmanager
def open_for_saving(path: SavePath, suffix: str) -> Iterator[BinaryIO]:
    """
    Open a file by the rules of SB3's ``save`` methods, but write it with ``atomic_write``.

    :param path: path of the file, or a file-like object, which is written directly. Missing folders are made. If a
        folder has this name, ``_2`` is added to it
    """
    if not isinstance(path, (str, pathlib.Path)):
        yield cast(BinaryIO, open_path(path, "w"))
        return
    target = pathlib.Path(path)
    while True:
        if target.suffix == "":
            target = pathlib.Path(f"{target}.{suffix}")
        if not target.is_dir():
            break
        warnings.warn(f"{target} is a folder, saving to {target}_2", stacklevel=5)
        target = pathlib.Path(f"{target}_2")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as file:
        yield file


@contextlib.contextmanager
def open_for_loading(path: SavePath, suffix: str) -> Iterator[BinaryIO]:
    """Open a file by the rules of SB3's ``load`` methods."""
    try:
        file = open_path(path, "r", suffix=suffix)
    except FileNotFoundError:
        # SB3 names the last path that it tried, which repeats the suffix if the user gave it
        tried = f"{str(path).removesuffix(f'.{suffix}')}.{suffix}"
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), tried) from None
    try:
        yield cast(BinaryIO, file)
    finally:
        if isinstance(path, (str, pathlib.Path)):
            file.close()
        else:
            file.seek(0)


def name_of(path: SavePath) -> str:
    """Return how to name a file in an error."""
    return str(path) if isinstance(path, (str, pathlib.Path)) else "The file"
