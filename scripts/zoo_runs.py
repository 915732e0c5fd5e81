"""
Collect runs of RL Zoo in a JSON file: the command, the evaluations and the test of each.

The test is the output of the zoo's ``enjoy``, in a file of the run's folder with the timesteps in its name::

    RUN=logs/td3x/Hopper-v5_1
    python -m rl_zoo3.enjoy --algo td3x --env Hopper-v5 -f logs -n 100000 --no-render > $RUN/test-1000000.log
    python scripts/zoo_runs.py $RUN -o docs/results/mujoco-runs.json
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.agents.publish import portable_command
from sb3_td3x.zoo.run_files import read_zoo_yaml


def read(run: Path) -> dict[str, Any]:
    """
    Read the figures of a run.

    :param run: the run's folder, such as ``logs/td3x/Hopper-v5_1``
    """
    (settings,) = run.glob("*/args.yml")
    args = read_zoo_yaml(settings)
    command = portable_command(settings.with_name("command.txt").read_text(), args)
    figures: dict[str, Any] = {"env": args["env"], "seed": args["seed"], "command": command}
    with np.load(run / "evaluations.npz") as evaluations:
        figures["evaluations"] = {
            "timesteps": evaluations["timesteps"].tolist(),
            "mean_returns": evaluations["results"].mean(axis=1).round(1).tolist(),
        }
    tests = [(int(path.stem.removeprefix("test-")), path) for path in run.glob("test-*.log")]
    if tests:
        timesteps, path = max(tests)
        returns = re.findall(r"^Episode Reward: (\S+)", path.read_text(), re.M)
        figures["test"] = {"timesteps": timesteps, "returns": [round(float(value), 1) for value in returns]}
    return figures


def main() -> None:
    """Add the runs to the file. A run with the command of one in the file takes its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON file")
    args = parser.parse_args()

    results: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"note": "", "runs": []}
    new = {figures["command"]: figures for figures in map(read, args.runs)}
    # Runs with a note of their own are kept: it tells them apart from others with their command
    kept = [run for run in results["runs"] if "note" in run or run["command"] not in new]
    results["runs"] = sorted([*kept, *new.values()], key=lambda run: (run["env"], run["seed"]))
    lines = ",\n".join(json.dumps(run) for run in results["runs"])
    args.output.write_text(f'{{"note": {json.dumps(results["note"])}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
