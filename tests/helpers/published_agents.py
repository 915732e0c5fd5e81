"""Small agents that were trained by the zoo and published, for the tests of published agents."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "rl-trained-agents"
ENV = "Pendulum-v1"
TIMEOUT = 400

# Several trainings in one process, since most of their time is taken by imports
TRAIN = """
import runpy, sys

sys.orig_argv = ["/usr/bin/python", "-m", "rl_zoo3.train", *sys.argv[1:]]
arguments = sys.orig_argv[3:]
for seed in ("7", "8"):
    sys.argv = ["train.py", *arguments, "--seed", seed]
    sys.orig_argv[3:] = sys.argv[1:]
    runpy.run_module("rl_zoo3.train", run_name="__main__", alter_sys=True)
"""


def run_python(folder: Path, *arguments: str) -> str:
    """Run Python in a folder, and return what it prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "SDL_VIDEODRIVER": "dummy", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def train_two_seeds(folder: Path) -> list[Path]:
    """Train two seeds through the zoo, and return the folders of the runs."""
    options = ["--algo", "td3x", "--env", ENV, "-n", "240", "-f", str(folder / "logs"), "--num-threads", "1"]
    options += ["--eval-freq", "120", "--eval-episodes", "1", "--save-freq", "120", "--device", "cpu"]
    params = ["learning_starts:100", "buffer_size:500", "batch_size:16", "policy_kwargs:dict(net_arch=[8, 8])"]
    params.append("reward_shaping:{'sb3_td3x.shaping.RewardScale': {'scale': 0.1}}")
    run_python(folder, "-c", TRAIN, *options, "-params", *params)
    return [folder / "logs" / "td3x" / f"{ENV}_{idx}" for idx in (1, 2)]
