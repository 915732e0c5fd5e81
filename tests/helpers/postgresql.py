"""Start a temporary PostgreSQL server for a test."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS_TO_START = 60


def find_programs() -> Path:
    """Return the folder of PostgreSQL's programs, or skip the test if PostgreSQL is not installed."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    # On Debian they are not on the PATH. Sort by version
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    if not folders:
        pytest.skip("no PostgreSQL server here: initdb is not installed (on Debian: apt-get install postgresql)")
    return folders[-1].parent


@contextmanager
def postgresql_server() -> Iterator[str]:
    """
    Start a server whose data and Unix socket are in a temporary folder, so that it cannot conflict with another server.

    :return: The URL of its database for SQLAlchemy
    """
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'sb3-td3x[postgresql]'")
    programs = find_programs()
    # Only its owner may enter pytest's tmp_path, and the path of a Unix socket must be short
    folder = Path(tempfile.mkdtemp(prefix="td3x-postgresql-"))
    # PostgreSQL refuses to run as root
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        nobody = pwd.getpwnam("nobody")
        user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)

    def run(program: str, *arguments: str) -> None:
        # Write to a file, because the server would keep a pipe open
        with (folder / f"{program}.txt").open("w+") as output:
            command = [str(programs / program), "-D", str(folder / "data"), *arguments]
            process = subprocess.run(command, cwd=folder, stdout=output, stderr=output, **user)
            output.seek(0)
            assert process.returncode == 0, output.read()

    try:
        run("initdb", "-U", "td3x", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        options = f"-c listen_addresses='' -k {folder} -c fsync=off -c shared_buffers=16MB"
        run("pg_ctl", "-w", "-t", str(SECONDS_TO_START), "-l", str(folder / "log.txt"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://td3x@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
