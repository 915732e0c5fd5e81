"""Processor, system and versions, on which measured times depend."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """
    Describe this machine.

    :param packages: names of packages whose versions matter
    :return: ``cpu``, ``cores``, ``system`` and ``versions``, None for packages that are not installed
    """
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
