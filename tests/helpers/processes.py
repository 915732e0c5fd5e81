"""Start other processes, as a user does."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Seconds for one command. Most take about five, but many times that on a busy machine
TIMEOUT = 400

HOLD_LOCK = """
import pathlib, sys
from sb3_td3x.files.atomic import lock_folder

lock = lock_folder(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def environment(**variables: str) -> dict[str, str]:
    """Return a user's environment variables without a display, and without those that only the tests set."""
    inherited = {key: os.environ[key] for key in os.environ if key not in ("PYTHONPATH", "SB3_TD3X_AUTOLOAD")}
    return {**inherited, "SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", **variables}


def run_python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, and return the finished process, whether it failed or not."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@contextlib.contextmanager
def held_by_another_process(folder: Path) -> Iterator[None]:
    """Let another process hold the lock of a folder, and kill the process at the end."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        yield
    finally:
        other.kill()
        other.communicate()
