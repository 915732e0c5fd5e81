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
from sb3_td3x.studies.measure import read_evaluations
from sb3_td3x.zoo.runs import ZooRun


def read(folder: Path) -> dict[str, Any]:
    """
    Read the figures of a run.

    :param folder: the run's, such as ``logs/td3x/Hopper-v5_1``
    :raises ValueError: it is not the folder of a run
    """
    run = ZooRun(folder)
    command = portable_command((run.config_folder / "command.txt").read_text(), run.args)
    evaluations = read_evaluations(run)
    figures: dict[str, Any] = {"env": run.env_id, "seed": run.args["seed"], "command": command}
    figures["evaluations"] = {
        "timesteps": evaluations["timesteps"],
        "mean_returns": [round(float(np.mean(returns)), 1) for returns in evaluations["returns"]],
    }
    tests = [(int(path.stem.removeprefix("test-")), path) for path in folder.glob("test-*.log")]
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

    try:
        new = {figures["command"]: figures for figures in map(read, args.runs)}
    except ValueError as error:
        parser.error(str(error))
    results: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"note": "", "runs": []}
    # Runs with a note of their own are kept: it tells them apart from others with their command
    kept = [run for run in results["runs"] if "note" in run or run["command"] not in new]
    results["runs"] = sorted([*kept, *new.values()], key=lambda run: (run["env"], run["seed"]))
    lines = ",\n".join(json.dumps(run) for run in results["runs"])
    args.output.write_text(f'{{"note": {json.dumps(results["note"])}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
