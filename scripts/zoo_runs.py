"""
Collect runs of RL Zoo in a JSON file, and print tables of its tests and of their means over seeds.

The file has the command, the evaluations and the test of each run.

The test is the output of the zoo's ``enjoy``, in a file of the run's folder with the timesteps in its name::

    RUN=logs/td3x/Hopper-v5_1
    python -m rl_zoo3.enjoy --algo td3x --env Hopper-v5 -f logs -n 100000 --no-render > $RUN/test-1000000.log
    python scripts/zoo_runs.py $RUN -o docs/results/mujoco-runs.json

Without a run it prints the tables of the file. ``--pictures FOLDER`` draws learning curves of the runs whose
hyperparameters are those of td3x.yml.
"""

import argparse
import json
import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rl_zoo3.utils import StoreDict
from scipy.stats import t as student_t  # type: ignore[import-untyped]

from sb3_td3x.agents.plot import draw
from sb3_td3x.agents.publish import portable_command
from sb3_td3x.studies import plots
from sb3_td3x.studies.measure import read_evaluations
from sb3_td3x.zoo.register import hyperparams_path
from sb3_td3x.zoo.runs import ZooRun

TESTS_HEADER = """\
| env | changes | timesteps | seed | mean return | episodes | last five evaluations | lowest of the second half |
|---|---|---|---|---|---|---|---|"""
SEEDS_HEADER = """\
| env | changes | timesteps | seeds | mean of their means |
|---|---|---|---|---|"""


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


def changes(figures: dict[str, Any]) -> str:
    """Return the hyperparameters of a run that differ from those in td3x.yml."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-params", nargs="+", action=StoreDict, default={})
    given = parser.parse_known_args(shlex.split(figures["command"]))[0].params
    entry = yaml.safe_load(hyperparams_path().read_text())[figures["env"]]

    def value(hyperparameters: dict[str, Any], name: str) -> Any:
        written: Any = hyperparameters.get(name)
        # An option that is off may be missing
        return eval(written) if str(written).startswith("dict(") else written or None

    return " ".join(f"{name}:{given[name]}" for name in given if value(given, name) != value(entry, name))


def test_row(figures: dict[str, Any]) -> str:
    """Return the row of a run with a test. ± is 1.96 standard errors over the episodes."""
    returns = np.array(figures["test"]["returns"])
    error = 1.96 * returns.std(ddof=1) / np.sqrt(len(returns))
    evaluations = figures["evaluations"]
    means, timesteps = np.array(evaluations["mean_returns"]), np.array(evaluations["timesteps"])
    return (
        f"| {figures['env']} | {changes(figures)} | {figures['test']['timesteps']:,} | {figures['seed']} "
        f"| {returns.mean():,.1f} ± {error:,.1f} | {len(returns)} | {means[-5:].min():,.1f} to {means[-5:].max():,.1f} "
        f"| {means[timesteps >= timesteps[-1] / 2].min():,.1f} |"
    )


def seeds_rows(runs: list[dict[str, Any]]) -> list[str]:
    """Return a row for each group of tests that differ in the seed only. ± is the 95% t interval over the seeds."""
    groups: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for run in runs:
        group = run["env"], changes(run), run["test"]["timesteps"]
        groups[group][run["seed"]] = float(np.mean(run["test"]["returns"]))
    rows = []
    for (env, change, timesteps), means in groups.items():
        n_seeds = len(means)
        if n_seeds > 1:
            values = np.array(list(means.values()))
            error = student_t.ppf(0.975, n_seeds - 1) * values.std(ddof=1) / np.sqrt(n_seeds)
            seeds = ", ".join(map(str, means))
            rows.append(f"| {env} | {change} | {timesteps:,} | {seeds} | {values.mean():,.1f} ± {error:,.1f} |")
    return rows


def draw_entries(runs: list[dict[str, Any]], folder: Path) -> None:
    """Draw the learning curves of all runs whose hyperparameters are those of td3x.yml, also of stopped ones."""
    curves: dict[str, list[dict[str, list[float]]]] = defaultdict(list)
    for run in runs:
        if not changes(run):
            curves[run["env"]].append(run["evaluations"])
    folder.mkdir(parents=True, exist_ok=True)
    for env, of_env in curves.items():
        timesteps = np.array(max((curve["timesteps"] for curve in of_env), key=max))
        returns = [np.interp(timesteps, curve["timesteps"], curve["mean_returns"], right=np.nan) for curve in of_env]
        with plots.picture(folder / f"{env}.png") as axes:
            draw(env, timesteps, np.stack(returns, axis=1), axes)


def main() -> None:
    """Add the runs to the file, and print its tables. A run with the command of one in the file takes its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw runs with td3x.yml's values, ENV.png")
    args = parser.parse_args()
    if not (args.runs or args.output.exists()):
        parser.error(f"{args.output} does not exist, and no run is given")

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
    tests = [run for run in results["runs"] if "test" in run]
    if args.pictures:
        draw_entries(results["runs"], args.pictures)
    print("\n".join([TESTS_HEADER, *map(test_row, tests), "", SEEDS_HEADER, *seeds_rows(tests)]))


if __name__ == "__main__":
    main()
