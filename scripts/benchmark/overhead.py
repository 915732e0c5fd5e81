"""
What two features cost: the check for NaN and infinity in each step, and the finder that each start of Python installs.

    python scripts/benchmark/overhead.py

Each is switched on and off alternately, and medians are printed.
"""

import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from unittest import mock

import torch as th

from sb3_td3x import TD3X
from sb3_td3x.validation import check_finite

REPETITIONS = 7
STEPS = 2_000
STARTS = 40


def seconds_per_step(env_id: str, checked: bool) -> float:
    """
    Measure a training with one update per step.

    :return: seconds for each env step
    """
    model = TD3X(
        "MlpPolicy", env_id, learning_starts=100, buffer_size=10_000, policy_kwargs={"net_arch": [64, 64]}, seed=0
    )
    model.learn(300)
    check = check_finite if checked else lambda *_: None
    with mock.patch("sb3_td3x.td3x.check_finite", check):
        start = time.perf_counter()
        model.learn(STEPS, reset_num_timesteps=False)
        return (time.perf_counter() - start) / STEPS


def seconds_to_start(autoload: bool) -> float:
    """
    Measure the start of Python.

    :return: seconds of an empty program
    """
    environment = {**os.environ, "SB3_TD3X_AUTOLOAD": "1" if autoload else "0"}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    th.set_num_threads(1)
    packages = ("sb3_td3x", "stable-baselines3", "torch", "numpy")
    print(
        platform.processor() or platform.machine(),
        "Python",
        platform.python_version(),
        *map(_name_and_version, packages),
    )
    for env_id in ("Pendulum-v1", "BipedalWalker-v3"):
        pairs = [(seconds_per_step(env_id, True), seconds_per_step(env_id, False)) for _ in range(REPETITIONS)]
        on, off = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(checked / unchecked for checked, unchecked in pairs)
        print(f"{env_id}: {on * 1e6:.0f} us a step with the check, {off * 1e6:.0f} us without, ratio {ratio:.3f}")

    seconds_to_start(True)
    starts = [(seconds_to_start(True), seconds_to_start(False)) for _ in range(STARTS)]
    differences = [with_autoload - without for with_autoload, without in starts]
    print(f"start of Python: {statistics.median(differences) * 1e3:+.2f} ms with the finder installed")


def _name_and_version(package: str) -> str:
    return f"{package} {version(package)}"


if __name__ == "__main__":
    main()
