"""Writing files so that a kill, a full disk or another process leaves the old file or the new one, whole."""

import contextlib
import errno
import hashlib
import io
import os
import pathlib
import secrets
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from filelock import BaseFileLock, FileLock, Timeout
from stable_baselines3.common.save_util import open_path

# What a killed process may leave behind; safe to delete once no process writes there
TEMPORARY_PATTERN = ".*.*.partial"

SavePath = str | pathlib.Path | io.BufferedIOBase


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """
    Open a file for writing that takes its place at the end of the ``with`` block, flushed to the disk, and not at all
    if the block raises.

    :param path: where the file shall be; a link is followed, and the file keeps its permissions
    :return: the file, open for writing and seeking
    :raises OSError: it cannot be written, or the disk is full; what was there before is untouched
    """
    target = pathlib.Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        # A device or a pipe cannot be replaced
        with target.open("wb") as file:
            yield file
        return
    # In the same folder, since a rename across file systems is a copy
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
    """
    Flush the names of a folder to the disk, so that a rename outlives a power cut.

    :param folder: the folder
    """
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
    Keep other processes from writing to a folder, by a file ``.lock`` in it, until the lock is released as often as it
    was taken, or the process ends, however it ends.

    :param folder: the folder; one that is not there, or that cannot be written or locked, gets no lock
    :return: the lock
    :raises ValueError: another process holds it
    """
    lock = FileLock(folder.resolve() / ".lock", is_singleton=True)
    if folder.is_dir():
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"'{folder}' is in use by another process, which goes on there") from None
        except (OSError, NotImplementedError) as error:
            # Read-only, a full quota, or a file system without locks (older versions of filelock raise the second):
            # no reason to end a training
            warnings.warn(f"{folder} cannot be locked against other processes: {error}", stacklevel=2)
    return lock


@dataclass(frozen=True)
class FileRecord:
    """
    What a file must be to be whole.

    :param name: its name
    :param size: in bytes
    :param sha256: checksum of its contents, in hexadecimal digits
    """

    name: str
    size: int
    sha256: str


def file_record(path: pathlib.Path) -> FileRecord:
    """
    :param path: a file
    :return: its size and checksum now
    :raises OSError: it cannot be read
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return FileRecord(path.name, size, digest.hexdigest())


@contextlib.contextmanager
def open_for_saving(path: SavePath, suffix: str) -> Iterator[BinaryIO]:
    """
    Open a file as SB3's ``save`` methods do, but with ``atomic_write``.

    :param path: where the file shall be, or a file-like object, which is written in place. A folder that is missing is
        made; where a folder has the name, ``_2`` is added to it.
    :param suffix: ending of the name where it has none, without the dot
    :return: the file, open for writing
    :raises OSError: it cannot be written, or the disk is full; what was there before is untouched
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
    """
    Open a file as SB3's ``load`` methods do.

    :param path: path to the file, with or without its ending, or a file-like object, which is rewound in the end
    :param suffix: the ending, without the dot
    :return: the file, open for reading
    :raises OSError: it is not there or cannot be read
    """
    try:
        file = open_path(path, "r", suffix=suffix)
    except FileNotFoundError:
        # SB3 names the last path that it tried, which has the ending twice where the user gave it
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
    """
    :param path: path to a file, or a file-like object
    :return: how to name it in an error
    """
    return str(path) if isinstance(path, (str, pathlib.Path)) else "The file"


class FileRefused(ValueError):  # noqa: N818 - what is wrong is said by its sentence
    """A file that is damaged, too large, of another kind or not safe to read, in one sentence."""


@contextlib.contextmanager
def refusing(name: str) -> Iterator[None]:
    """
    Turn whatever a reader stumbles over into one sentence. Everything, since a stranger's file decides what it is.

    :param name: how to name the file
    :raises FileRefused: the block raised an exception
    """
    try:
        yield
    except FileRefused:
        raise
    except Exception as error:
        # PyTorch's errors have many sentences
        reason = str(error).partition("\n")[0].partition(". ")[0][:200] or type(error).__name__
        raise FileRefused(f"{name} is damaged: {reason}") from None
