"""
Zip files that no flipped byte goes unnoticed in, and zip files of strangers, read within limits.

The archive's comment, the last bytes of the file, holds a SHA-256 of all the bytes before it.
"""

import contextlib
import hashlib
import re
import stat
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from sb3_td3x.files.atomic import FileRefused, SavePath, name_of, open_for_loading, open_for_saving, refusing

_COMMENT = b"sb3_td3x sha256 "
_COMMENT_SIZE = len(_COMMENT) + 64

# A sealed file has this member, so that a damaged comment is recognised too
VERSION_MEMBER = "_sb3_td3x_version"

# Of compressed members, uncompressed; what is stored as it is cannot exceed the file
MAX_EXPANSION = 20
MAX_EXPANDED_SIZE = 64 * 2**20
MAX_MEMBERS = 10_000

CHUNK_SIZE = 2**20


class _HashingWriter:
    """
    A stream for ``zipfile`` that hashes what passes, and puts the hash in the place of the last bytes.

    :param file: where to write
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._held_back = b""

    def write(self, data: bytes) -> int:
        """
        :param data: bytes
        :return: their number
        """
        with memoryview(data).cast("B") as view:
            # The last bytes may be the comment
            if len(view) >= _COMMENT_SIZE:
                self._pass_on(self._held_back)
                self._pass_on(view[:-_COMMENT_SIZE])
                self._held_back = bytes(view[-_COMMENT_SIZE:])
            else:
                joined = self._held_back + bytes(view)
                self._pass_on(joined[:-_COMMENT_SIZE])
                self._held_back = joined[-_COMMENT_SIZE:]
            return len(view)

    def _pass_on(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        self._file.write(data)

    def flush(self) -> None:
        """Nothing to do: the file is flushed by who opened it."""

    def seal(self) -> None:
        """Write the hash, after all else."""
        assert self._held_back.startswith(_COMMENT)
        self._file.write(_COMMENT + self._sha256.hexdigest().encode())


@contextlib.contextmanager
def write_sealed_zip(path: SavePath, suffix: str, version: str) -> Iterator[zipfile.ZipFile]:
    """
    Open a zip file for writing that is there as a whole or not at all, with a checksum.

    :param path: where the file shall be, or a file-like object
    :param suffix: ending of the name where it has none
    :param version: version of what writes it
    :return: the archive; members are stored uncompressed
    :raises OSError: it cannot be written, or the disk is full; what was there before is untouched
    """
    with open_for_saving(path, suffix) as file:
        writer = _HashingWriter(file)
        with zipfile.ZipFile(writer, "w") as archive:  # type: ignore[call-overload]
            archive.writestr(VERSION_MEMBER, version)
            yield archive
            archive.comment = _COMMENT + b"0" * 64
        writer.seal()


class CheckedZip:
    """
    A zip file whose structure is in order: what its members claim to be is within limits.

    :param file: the file
    :param name: how to name it in an error
    :param folders: whether members may lie in folders
    :raises FileRefused: something is out of order
    """

    def __init__(self, file: BinaryIO, name: str, folders: bool = False) -> None:
        self.name = name
        file.seek(0, 2)
        size = file.tell()
        with refusing(f"{name} is no agent's or replay buffer's zip file, or is cut short; it"):
            self._archive = zipfile.ZipFile(file)
            self.members = {info.filename: info for info in self._archive.infolist()}
        with refusing(name):
            self._check_end(file, size)
            self._check_structure(size, folders)
        self.is_sealed = VERSION_MEMBER in self.members or self._archive.comment.startswith(_COMMENT)
        if self.is_sealed:
            self._check_seal(file, size)

    def _check_end(self, file: BinaryIO, size: int) -> None:
        # Cut short, it may still end in a whole archive: PyTorch's, inside of it
        length = len(self._archive.comment)
        file.seek(max(size - length - 22, 0))
        end = file.read(22)
        if end[:4] != b"PK\5\6" or int.from_bytes(end[20:], "little") != length:
            raise FileRefused(f"{self.name} is no whole zip file, it is cut short or has something behind it")

    def _check_structure(self, size: int, folders: bool) -> None:
        infos = sorted(self._archive.infolist(), key=lambda info: info.header_offset)
        if len(infos) > MAX_MEMBERS:
            raise FileRefused(f"{self.name} is a zip file of {len(infos)} members, expected at most {MAX_MEMBERS}")
        if len(self.members) != len(infos):
            raise FileRefused(f"{self.name} is a zip file with two members of the same name")
        end = 0
        for info in infos:
            wrong = _whats_wrong(info, folders)
            if wrong:
                raise FileRefused(f"{self.name} is a zip file with a member {info.filename[:80]!r} that {wrong}")
            if info.header_offset < end or info.header_offset + 30 + info.compress_size > size:
                raise FileRefused(f"{self.name} is a zip file whose members overlap")
            end = info.header_offset + 30 + info.compress_size
        expanded = sum(info.file_size for info in infos)
        if expanded > max(MAX_EXPANDED_SIZE, size) and expanded > MAX_EXPANSION * size:
            raise FileRefused(
                f"{self.name} is a zip file that would grow from {size} to {expanded} bytes, "
                f"more than {MAX_EXPANSION} times its size"
            )

    def _check_seal(self, file: BinaryIO, size: int) -> None:
        expected = self._archive.comment
        if not re.fullmatch(re.escape(_COMMENT) + b"[0-9a-f]{64}", expected):
            raise FileRefused(f"{self.name} is damaged: it lacks its checksum")
        # A file-like object may hold something else before the archive
        start = min((info.header_offset for info in self.members.values()), default=0)
        file.seek(start)
        left = size - start - _COMMENT_SIZE
        sha256 = hashlib.sha256()
        while left > 0:
            chunk = file.read(min(left, CHUNK_SIZE))
            if not chunk:
                break
            sha256.update(chunk)
            left -= len(chunk)
        if sha256.hexdigest().encode() != expected[len(_COMMENT) :]:
            raise FileRefused(f"{self.name} is damaged: it does not match its checksum")

    def read(self, member: str, max_size: int | None = None) -> bytes:
        """
        :param member: name of a member
        :param max_size: the most that it may have, in bytes; None: any
        :return: its content
        :raises FileRefused: it is larger or damaged
        """
        info = self.members[member]
        if max_size is not None and info.file_size > max_size:
            raise FileRefused(f"{self.name} is too large: {member} has {info.file_size} bytes, at most {max_size}")
        with self.open(member) as file:
            content = file.read(info.file_size + 1)
        if len(content) != info.file_size:
            raise FileRefused(f"{self.name} is damaged: {member} has not the size that it should have")
        return content

    @contextlib.contextmanager
    def open(self, member: str) -> Iterator[BinaryIO]:
        """
        :param member: name of a member
        :return: the member, open for reading
        :raises FileRefused: it is damaged
        """
        with refusing(self.name), self._archive.open(self.members[member]) as file:
            yield file  # type: ignore[misc]


@contextlib.contextmanager
def open_checked_zip(path: SavePath, suffix: str) -> Iterator[CheckedZip]:
    """
    :param path: path to the file, with or without its ending, or a file-like object
    :param suffix: the ending
    :return: the archive, open for reading
    :raises FileRefused: it is damaged, or has what no file of this package or of SB3 has
    :raises OSError: it is not there or cannot be read
    """
    with open_for_loading(path, suffix) as file:
        yield CheckedZip(file, name_of(path))


def _whats_wrong(info: zipfile.ZipInfo, folders: bool) -> str | None:
    """
    :param info: a member
    :param folders: whether it may lie in a folder
    :return: what no honest member would be, None if there is nothing
    """
    mode = info.external_attr >> 16
    parts = info.orig_filename.split("/")
    if "\\" in info.orig_filename or ":" in info.orig_filename or "\0" in info.orig_filename or not all(parts):
        return "has a path for a name"
    if ".." in parts or (len(parts) > 1 and not folders):
        return "has a path for a name"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if mode and not (stat.S_ISREG(mode) or stat.S_IFMT(mode) == 0):
        return "is a link or another special file"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return "is compressed in an unusual way"
    if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
        return "has two sizes"
    return None
