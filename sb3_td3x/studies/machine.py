"""What measured figures depend on, apart from the code."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """
    :param packages: names of the packages whose versions matter
    :return: processor, system and versions; that of a package which is not installed is None
    """
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in packages}},
    }


def _cpu_name() -> str:
    """
    :return: name of the processor
    """
    try:
        line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()
    return line.split(":")[1].strip()


def _version(package: str) -> str | None:
    """
    :param package: name of a package
    :return: its version, if it is installed
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
