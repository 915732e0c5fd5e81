"""Zip files with a seal: every flipped bit is found, and small files stay small."""

import io
import json
import pathlib
import zipfile

import hostile
import numpy as np
import pytest

from sb3_td3x.files.errors import FileRefused
from sb3_td3x.files.sealed_zip import CheckedZip, open_checked_zip, write_sealed_zip


@pytest.fixture
def sealed() -> bytes:
    return hostile.sealed_zip({"data": json.dumps({"gamma": 0.99}).encode(), "rows": bytes(range(100))})


def opened(content: bytes) -> CheckedZip:
    return CheckedZip(io.BytesIO(content), "agent.zip")


def test_members_come_back(sealed: bytes) -> None:
    archive = opened(sealed)
    assert archive.is_sealed
    assert archive.read("rows") == bytes(range(100))
    with archive.open("rows") as file:
        assert file.read(3) == b"\0\1\2"


def test_every_flipped_bit_is_found(sealed: bytes) -> None:
    for position in range(len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[position] ^= 1 << bit
            with pytest.raises(FileRefused, match=r"agent\.zip is .*(damaged|zip file)") as error:
                opened(bytes(damaged))
            assert "\n" not in str(error.value)


def test_file_cut_anywhere_is_refused(sealed: bytes) -> None:
    for length in range(len(sealed)):
        with pytest.raises(FileRefused, match=r"agent\.zip is"):
            opened(sealed[:length])


def test_bytes_behind_the_seal_are_damage(sealed: bytes) -> None:
    for behind in (b"x", b"behind", bytes(1000)):
        with pytest.raises(FileRefused, match=r"agent\.zip is damaged"):
            opened(sealed + behind)


def test_missing_seal_is_damage(sealed: bytes) -> None:
    with pytest.raises(FileRefused, match="its checksum is missing"):
        opened(hostile.plain_zip(hostile.members_of(sealed)))


def test_file_in_a_larger_file_is_read(sealed: bytes) -> None:
    assert opened(b"something before it" + sealed).is_sealed


def test_file_of_sb3_has_no_seal(sealed: bytes) -> None:
    archive = opened(hostile.plain_zip({"data": b"{}"}, zipfile.ZIP_DEFLATED))
    assert not archive.is_sealed
    assert archive.read("data") == b"{}"


def test_bomb_is_refused_by_its_total_size(sealed: bytes) -> None:
    with hostile.MemoryCheck():
        for name, content in hostile.zip_bombs(sealed):
            print(name)
            assert "would grow" in str(hostile.refusal(lambda content=content: opened(content)))  # type: ignore[misc]
        halves = hostile.plain_zip({"a": bytes(2**25 + 2**20), "b": bytes(2**25 + 2**20)}, zipfile.ZIP_DEFLATED)
        with pytest.raises(FileRefused, match="would grow"):
            opened(halves)


def test_tricks_are_refused_or_harmless(sealed: bytes) -> None:
    def read_all(content: bytes) -> None:
        archive = opened(content)
        for member in archive.members:
            archive.read(member)

    with hostile.MemoryCheck():
        for name, content in hostile.zip_tricks(sealed):
            print(name)
            hostile.refusal(lambda content=content: read_all(content))  # type: ignore[misc]


def test_numpy_and_zipfile_read_it(tmp_path: pathlib.Path) -> None:
    with write_sealed_zip(tmp_path / "arrays", "npz") as archive, archive.open("x.npy", "w") as file:
        np.save(file, np.arange(3))  # type: ignore[arg-type]
    assert np.load(tmp_path / "arrays.npz")["x"].tolist() == [0, 1, 2]
    assert zipfile.ZipFile(tmp_path / "arrays.npz").testzip() is None
    with open_checked_zip(tmp_path / "arrays", "npz") as checked:
        assert checked.is_sealed


def test_error_while_writing_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(b"old")

    def write_and_stop() -> None:
        with write_sealed_zip(path, "zip") as archive:
            archive.writestr("data", b"new")
            raise LookupError

    with pytest.raises(LookupError):
        write_and_stop()
    assert path.read_bytes() == b"old"
    assert [it.name for it in tmp_path.iterdir()] == ["agent.zip"]
