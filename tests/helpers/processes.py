"""Other processes, as a user starts them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Seconds for one command; most take some five, many times that on a machine at work
TIMEOUT = 400

HOLD_LOCK = """
import pathlib, sys
from sb3_td3x.files.atomic import lock_folder

lock = lock_folder(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def environment(**variables: str) -> dict[str, str]:
    """A user's environment without a display; what comes from the test run itself is taken out."""
    inherited = {key: os.environ[key] for key in os.environ if key not in ("PYTHONPATH", "SB3_TD3X_AUTOLOAD")}
    return {**inherited, "SDL_VIDEODRIVER": "dummy", "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", **variables}


def run_python(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, whatever comes of it."""
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
    """It is killed in the end."""
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
