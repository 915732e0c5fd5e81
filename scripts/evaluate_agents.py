"""
Play all published agents on the 100 episodes of their test, and write the figures beside those that RL Zoo published.

    python scripts/evaluate_agents.py                   # plays, prints the table, writes docs/results/agents.json
    python scripts/evaluate_agents.py --write-readme    # the table into README.md too, between its markers
    python scripts/evaluate_agents.py --check           # exit status 1 if an agent got worse than it was

The figures of the other seeds, whose agents are not kept, are those in ``training.json``, of the same episodes.
"""

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from agent_folders import (
    AGENTS_FOLDER,
    N_TEST_EPISODES,
    PACKAGES,
    TEST_SEED,
    Training,
    evaluate,
    find_agents,
    half_width,
)
from options import at_least
from results import interquartile_mean, iqm_interval

from sb3_td3x.studies.machine import machine

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results" / "agents.json"
ZOO_BENCHMARK = ROOT / "docs" / "results" / "zoo_benchmark.csv"
MARKERS = ("<!-- agents -->", "<!-- end of agents -->")
# Rounding, where all returns are alike
MARGIN = 0.01


def allowed_loss(recorded: Sequence[float], returns: Sequence[float]) -> float:
    """
    With the versions of its training an agent returns what it returned. Others play other episodes, the longer the more
    so: what chance can explain is no loss.

    :param recorded: an agent's returns when it was published
    :param returns: its returns now, of the same episodes
    :return: half of the 95% interval of the mean difference, and one percent of the recorded mean
    """
    return half_width(np.subtract(recorded, returns)) + MARGIN * abs(float(np.mean(recorded)))


def read_zoo_benchmark() -> dict[str, dict[str, tuple[float, float, int]]]:
    """
    :return: mean, standard deviation and timesteps of the zoo's agents, by env without its version, and algorithm
    """
    figures: dict[str, dict[str, tuple[float, float, int]]] = {}
    with ZOO_BENCHMARK.open(newline="") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            entry = (float(row["mean"]), float(row["std"]), int(row["timesteps"]))
            figures.setdefault(_base(row["env"]), {})[row["algo"]] = entry
    return figures


def _base(env: str) -> str:
    """
    :param env: id of an environment
    :return: its name without the version
    """
    return env.rpartition("-v")[0]


def summarize(training: Training, returns: list[float]) -> dict[str, Any]:
    """
    :param training: what is known of an agent
    :param returns: what it returns now
    :return: its figures, and those of all seeds
    """
    seeds = np.array([seed.test_returns for seed in training.seeds])
    published = training.published
    return {
        "env": training.env,
        "published": {
            "seed": published.seed,
            "agent": published.selected,
            "timesteps": published.selected_timesteps,
            "mean": float(np.mean(returns)),
            "std": float(np.std(returns)),
            "iqm": interquartile_mean(np.array([returns])),
            "iqm_95": iqm_interval(np.array([returns])),
            "recorded_mean": float(np.mean(published.test_returns)),
            "returns": returns,
        },
        "all_seeds": {
            "seeds": [seed.seed for seed in training.seeds],
            "timesteps": published.timesteps,
            "means": [float(mean) for mean in seeds.mean(axis=1)],
            "mean": float(seeds.mean()),
            "std": float(seeds.std()),
            "iqm": interquartile_mean(seeds),
            "iqm_95": iqm_interval(seeds),
            "training_seconds": [seed.training_seconds for seed in training.seeds],
            "cpus": sorted({seed.machine["cpu"] for seed in training.seeds}),
            "commands": [seed.command for seed in training.seeds],
        },
    }


def duration(seconds: float) -> str:
    """
    :param seconds: a time
    :return: the same for people
    """
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def steps(number: int) -> str:
    """
    :param number: number of timesteps
    :return: the same for people
    """
    return f"{number / 1e6:g}M" if number >= 1e6 else f"{number / 1e3:g}k"


def format_zoo(figures: dict[str, tuple[float, float, int]]) -> str:
    """
    :param figures: the zoo's for one env, by algorithm
    :return: its TD3, and the best of its algorithms
    """
    best = max(figures, key=lambda algo: figures[algo][0])
    shown = {algo: figures[algo] for algo in ("td3", best) if algo in figures}
    return ", ".join(f"{algo} {mean:.1f} ± {std:.1f} at {steps(n)}" for algo, (mean, std, n) in shown.items())


def format_table(summaries: Sequence[dict[str, Any]]) -> str:
    """
    :param summaries: from ``summarize``
    :return: a Markdown table, and a line on how it came about
    """
    zoo = read_zoo_benchmark()
    lines = [
        "| environment | published agent: mean ± std | IQM [95% interval] | all seeds: IQM [95% interval] "
        "| mean of each seed | steps | training | the zoo's td3, and its best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for summary in summaries:
        agent, seeds = summary["published"], summary["all_seeds"]
        zoo_figures = format_zoo(zoo[_base(summary["env"])]) if _base(summary["env"]) in zoo else ""
        low, high = agent["iqm_95"]
        all_low, all_high = seeds["iqm_95"]
        means = ", ".join(f"{mean:.1f}" for mean in seeds["means"])
        lines.append(
            f"| {summary['env']} | {agent['mean']:.1f} ± {agent['std']:.1f} (seed {agent['seed']}) "
            f"| {agent['iqm']:.1f} [{low:.1f}, {high:.1f}] | {seeds['iqm']:.1f} [{all_low:.1f}, {all_high:.1f}] "
            f"| {means} | {steps(seeds['timesteps'])} | {duration(float(np.mean(seeds['training_seconds'])))} "
            f"| {zoo_figures} |"
        )
    cpus = sorted({cpu for summary in summaries for cpu in summary["all_seeds"]["cpus"]})
    lines += [
        "",
        f"Returns of {N_TEST_EPISODES} episodes from start seeds {TEST_SEED:,} on, which served for nothing else; of "
        "each seed the agent that was best on other episodes. The zoo's figures are of one seed each, with versions of "
        f"their time. Training: wall-clock time of one seed; {'; '.join(cpus)}. Steps are env steps: where the entry "
        "repeats each action (`FrameSkip`), the zoo's `-n`, `--eval-freq` and `--save-freq` count decisions, which are "
        "fewer.",
    ]
    return "\n".join(lines)


def write_readme(table: str, readme: Path = README) -> None:
    """
    :param table: what goes between the markers
    :param readme: the file
    :raises ValueError: it lacks the markers
    """
    text = readme.read_text()
    start, end = (text.find(marker) for marker in MARKERS)
    if not 0 <= start < end:
        raise ValueError(f"{readme} has not the two lines {MARKERS[0]} and {MARKERS[1]}")
    readme.write_text(f"{text[: start + len(MARKERS[0])]}\n{table}\n{text[end:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: the command line, by default that of the process
    :return: exit status: 1 if an agent got worse, which only --check asks
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-f", "--folder", type=Path, default=AGENTS_FOLDER, help="the zoo's log folder of the agents")
    parser.add_argument("--episodes", type=at_least(1), default=N_TEST_EPISODES, help="of --check: fewer are faster")
    parser.add_argument("--check", action="store_true", help="compare with what was recorded, and write nothing")
    parser.add_argument("--write-readme", action="store_true", help="write the table into README.md")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="the JSON file")
    args = parser.parse_args(arguments)
    if args.episodes != N_TEST_EPISODES and not args.check:
        parser.error("argument --episodes: only with --check")

    summaries, worse = [], []
    folders = find_agents(args.folder)
    if not folders:
        raise SystemExit(f"evaluate_agents: there are no agents in {args.folder}")
    for folder in folders:
        training = Training.read(folder)
        recorded = training.published.test_returns[: args.episodes if args.check else None]
        returns = evaluate(folder, f"{folder.name.rpartition('_')[0]}.zip", len(recorded), TEST_SEED)
        lost, allowed = float(np.mean(recorded) - np.mean(returns)), allowed_loss(recorded, returns)
        is_worse = not lost <= allowed  # NaN is no return to be content with
        if is_worse:
            worse.append(training.env)
        print(
            f"{training.env}: {np.mean(returns):.2f} ± {np.std(returns):.2f}, recorded {np.mean(recorded):.2f}, "
            f"{'WORSE by more than' if is_worse else 'not worse by more than'} {allowed:.2f}",
            flush=True,
        )
        if args.check:
            continue
        summaries.append(summarize(training, returns))
    if args.check:
        return 1 if worse else 0
    table = format_table(summaries)
    print(f"\n{table}")
    report = {
        "machine": machine(PACKAGES),
        "evaluation": {"first_seed": TEST_SEED, "episodes": N_TEST_EPISODES},
        "agents": summaries,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nAll figures: {args.output}")
    if args.write_readme:
        write_readme(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
