"""Processor, system and versions, on which measured times depend."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    *("sb3-td3x", "stable-baselines3", "sb3-contrib", "rl-zoo3"),
    *("gymnasium", "Box2D", "mujoco", "torch", "numpy"),
)


def machine(packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """Return ``cpu``, ``cores``, ``system`` and ``versions``, None for packages that are not installed."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in packages}},
    }


def _cpu_name() -> str:
    try:
        line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()
    return line.split(":")[1].strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
