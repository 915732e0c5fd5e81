"""
Zip files with a checksum, and limits for zip files from strangers.

The checksum is the SHA-256 of all bytes before it. It is the comment of the zip file, at its end. A file
with such a checksum is called sealed.
"""

import contextlib
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from sb3_td3x._version import __version__
from sb3_td3x.files.atomic import SavePath, name_of, open_for_loading, open_for_saving
from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.limits import MAX_COMPRESSION_RATIO, MAX_UNCOMPRESSED_BYTES

_SEAL = b"sb3_td3x sha256 "
_UNSEALED = _SEAL + b"0" * 64

# Every sealed file has this member, so that a missing checksum is noticed
VERSION_MEMBER = "_sb3_td3x_version"

CHUNK_BYTES = 2**20


class _SealingWriter(io.RawIOBase):
    """Stream that computes the checksum of what is written, and writes it at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Write bytes. The comment, which ``zipfile`` writes last, becomes the checksum."""
        if data == _UNSEALED:
            data = _SEAL + self._sha256.hexdigest().encode()
        self._sha256.update(data)
        return self._file.write(data)


@contextlib.contextmanager
def write_sealed_zip(path: SavePath, suffix: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip file for writing. It gets a checksum, and appears at its path as a whole or not at all."""
    with (
        open_for_saving(path, suffix) as file,
        zipfile.ZipFile(_SealingWriter(file), "w") as archive,
    ):
        archive.writestr(VERSION_MEMBER, __version__)
        yield archive
        archive.comment = _UNSEALED


class CheckedZip:
    """
    A zip file whose checksum and total size are checked.

    Members are read by their exact names and never extracted, so their names, types and permissions do not matter.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        with refusing(f"{name} is no agent's or replay buffer's zip file, or is cut short; it"):
            self._archive = zipfile.ZipFile(file)
        self.members = {info.filename: info for info in self._archive.infolist()}
        with refusing(name):
            self._check(file)

    def _check(self, file: BinaryIO) -> None:
        """Check the total size and the checksum."""
        name, size = self.name, file.seek(0, io.SEEK_END)
        uncompressed = sum(info.file_size for info in self._archive.infolist())
        if uncompressed > max(MAX_UNCOMPRESSED_BYTES, MAX_COMPRESSION_RATIO * size):
            raise FileRefused(
                f"{name} is a zip file that would grow from {size} to {uncompressed} bytes, more than "
                f"{MAX_COMPRESSION_RATIO} times its size"
            )
        comment = self._archive.comment
        self.is_sealed = VERSION_MEMBER in self.members or comment.startswith(_SEAL)
        if self.is_sealed:
            if not re.fullmatch(re.escape(_SEAL) + b"[0-9a-f]{64}", comment):
                raise FileRefused(f"{name} is damaged: its checksum is missing")
            # A file-like object may hold something else before the zip file
            start = min((info.header_offset for info in self.members.values()), default=0)
            if _sha256(file, start, size - len(comment)) != comment[len(_SEAL) :]:
                raise FileRefused(f"{name} is damaged: it does not match its checksum")

    def read(self, member: str) -> bytes:
        """Read a member."""
        with self.open(member) as file:
            return file.read()

    @contextlib.contextmanager
    def open(self, member: str) -> Iterator[BinaryIO]:
        """Open a member for reading."""
        with refusing(self.name), self._archive.open(member) as file:
            yield file  # type: ignore[misc]


@contextlib.contextmanager
def open_checked_zip(path: SavePath, suffix: str) -> Iterator[CheckedZip]:
    """Open a zip file for reading."""
    with open_for_loading(path, suffix) as file:
        yield CheckedZip(file, name_of(path))


def _sha256(file: BinaryIO, start: int, end: int) -> bytes:
    """Return the hash of a part of a file, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    file.seek(start)
    while start < end and (chunk := file.read(min(end - start, CHUNK_BYTES))):
        sha256.update(chunk)
        start += len(chunk)
    return sha256.hexdigest().encode()
