"""Short runs of the endurance scripts."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "endurance"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kills", ["--kills", "10", "--steps", "500"]),
        ("faults", ["--faults", "14"]),
        ("fuzz", ["--runs", "300"]),
        ("soak", ["--steps", "2000", "--n-envs", "2", "--save-freq", "500"]),
    ],
)
def test_script_finds_nothing(name: str, options: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *options], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stdout + process.stderr
