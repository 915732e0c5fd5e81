"""Signals: the training is saved first, and then the signal takes effect."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from callbacks import At
from checkpoints import counting_agent, fail, saved_timesteps

from sb3_td3x.checkpoint import ResumableCheckpoint

SIGNALLED = """
import signal, sys
from callbacks import At
from checkpoints import counting_agent
from sb3_td3x.checkpoint import ResumableCheckpoint

raise_signal = At(15, lambda: signal.raise_signal(getattr(signal, sys.argv[1])))
counting_agent().learn(30, [raise_signal, ResumableCheckpoint(sys.argv[2], 100)])
"""


@pytest.fixture(autouse=True)
def same_handler_afterwards() -> Iterator[None]:
    """Restore the handler of SIGTERM after a test."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def terminate_at(timestep: int) -> At:
    return At(timestep, lambda: signal.raise_signal(signal.SIGTERM))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_process_ends_by_the_signal(name: str, tmp_path: Path) -> None:
    """A shell shows it as exit code 143 or 130."""
    process = subprocess.run(
        [sys.executable, "-c", SIGNALLED, name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == -getattr(signal, name), process.stderr
    assert saved_timesteps(tmp_path) == 14
    assert f"the training was saved in {tmp_path}" in process.stdout or name == "SIGTERM"


def test_earlier_handler_is_called_and_the_training_continues(tmp_path: Path) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(saved_timesteps(tmp_path)))
    handler = signal.getsignal(signal.SIGTERM)
    model = counting_agent()
    model.learn(30, [ResumableCheckpoint(tmp_path, 100, verbose=0), terminate_at(15), terminate_at(25)])
    assert calls == [15, 25]
    assert model.num_timesteps == 30
    assert signal.getsignal(signal.SIGTERM) is handler


def test_handler_is_restored_after_an_error(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(LookupError):
        counting_agent().learn(10, [At(5, fail), ResumableCheckpoint(tmp_path)])
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_checkpoints_leave_no_handler_behind(tmp_path: Path) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: calls.append(len(calls)))
    callbacks = [ResumableCheckpoint(tmp_path / name, 100, verbose=0) for name in "ab"]
    counting_agent().learn(30, [*callbacks, terminate_at(15)])
    assert calls == [0]
    assert all(saved_timesteps(tmp_path / name) == 30 for name in "ab")
    for number in (1, 2):
        signal.raise_signal(signal.SIGTERM)
        assert calls[-1] == number


def test_handler_of_a_callback_stays(tmp_path: Path) -> None:
    calls: list[int] = []

    def own(signum: int, frame: Any) -> None:
        calls.append(signum)

    install = At(5, lambda: signal.signal(signal.SIGTERM, own))
    checkpoint = ResumableCheckpoint(tmp_path, 100, verbose=0)
    model = counting_agent().learn(10, [install, checkpoint])
    assert signal.getsignal(signal.SIGTERM) is own
    # In the next training the callback's handler is the earlier one
    seen = At(16, lambda: calls.append(saved_timesteps(tmp_path)))
    model.learn(10, [terminate_at(15), seen, checkpoint], reset_num_timesteps=False)
    assert calls == [signal.SIGTERM, 14]


def test_training_in_another_thread(tmp_path: Path) -> None:
    model = counting_agent()
    thread = threading.Thread(target=model.learn, args=(20, ResumableCheckpoint(tmp_path, 10)))
    thread.start()
    thread.join()
    assert saved_timesteps(tmp_path) == 20
