"""Files are replaced as a whole or not at all."""

import errno
import multiprocessing
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from filelock import FileLock
from processes import HOLD_LOCK

from sb3_td3x.files.atomic import TEMPORARY_PATTERN, atomic_write, lock_folder

ENDLESS_WRITER = """
import sys
from sb3_td3x.files.atomic import atomic_write
print("ready", flush=True)
while True:
    for byte in (b"a", b"b"):
        with atomic_write(sys.argv[1]) as file:
            for _ in range(64):
                file.write(byte * 65536)
"""


def test_replaces_and_keeps_permissions(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(b"old")
    path.chmod(0o640)
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["agent.zip"]


def test_new_file_has_the_usual_permissions(tmp_path: pathlib.Path) -> None:
    (tmp_path / "usual").touch()
    with atomic_write(tmp_path / "new") as file:
        file.write(b"new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_an_error_leaves_the_old_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(b"old")

    def write_and_stop() -> None:
        with atomic_write(path) as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["agent.zip"]


def test_follows_links(tmp_path: pathlib.Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "data" / "agent.zip")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "data" / "agent.zip").read_bytes() == b"new"


def test_writes_to_a_device() -> None:
    with atomic_write(os.devnull) as file:
        file.write(b"gone")
    assert not pathlib.Path(os.devnull).is_file()


def test_a_file_that_may_not_grow_leaves_the_old_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="too large"), atomic_write(path) as file:
            file.write(bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["agent.zip"]


def test_a_kill_leaves_a_whole_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    path.write_bytes(b"a" * 64 * 65536)
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", ENDLESS_WRITER, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
            process.kill()
        content = path.read_bytes()
        assert len(content) == 64 * 65536
        assert len(set(content)) == 1
    for partial in tmp_path.glob(TEMPORARY_PATTERN):
        partial.unlink()
    assert os.listdir(tmp_path) == ["agent.zip"]


def test_lock_is_held_until_its_last_holder_releases_it(tmp_path: pathlib.Path) -> None:
    """Processes that were forked meanwhile do not hold it: they may outlive a killed training."""
    outer, inner = lock_folder(tmp_path), lock_folder(tmp_path)
    fork = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    fork.start()
    inner.release()
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    process = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert "is in use by another process" in process.stderr
    outer.release()
    try:
        assert subprocess.run(command, input="", text=True, check=False).returncode == 0
    finally:
        fork.kill()
        fork.join()


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "Disk quota exceeded"), NotImplementedError("no flock")])
def test_folder_that_cannot_be_locked_is_used_without_a_lock(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    lock_folder(tmp_path / "not there").release()
    assert not (tmp_path / "not there").exists()
    monkeypatch.setattr(FileLock, "acquire", fail)
    with pytest.warns(UserWarning, match="cannot be locked against other processes: .*(quota|flock)"):
        lock_folder(tmp_path).release()
