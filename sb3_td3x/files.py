"""Writing files so that a kill or a full disk leaves the old file or the new one, whole."""

import contextlib
import hashlib
import os
import pathlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

# What a killed process may leave behind; safe to delete once no process writes there
TEMPORARY_PATTERN = ".*.*.partial"


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
