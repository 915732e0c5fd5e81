"""The test of published agents, and a table of the results next to those that RL Zoo published."""

import math
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd  # type: ignore[import-untyped]

from sb3_td3x.agents.training import TEST_SEED, Training, find_agents, to_json
from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.measure import play_test
from sb3_td3x.studies.statistics import MIN_SEEDS, MIN_SEEDS_IQM, interquartile_mean, interval, mean, worst_episodes
from sb3_td3x.zoo.runs import ZooRun

# Rounding, where all returns are alike
_MARGIN = 0.01


def evaluate(
    folder: Path, n_episodes: int | None, n_envs: int, envs: Sequence[str] | None, output: Path | None
) -> bool:
    """
    Play published agents, compare with what was recorded when they were published, and print a table.

    The comparison goes to stderr, so that the table can go into a file.

    :param n_episodes: None: as many as the test of the agent has
    :param n_envs: copies of the env that are played side by side
    :return: whether no agent is worse than recorded
    :raises ValueError: there is no such agent
    """
    trainings = {path: Training.read(path) for path in find_agents(folder)}
    known = [training.env for training in trainings.values()]
    if not known:
        raise ValueError(f"there are no agents in {folder}")
    if unknown := set(envs or ()) - set(known):
        raise ValueError(f"{folder} has no agent for {', '.join(sorted(unknown))}, expected one of {', '.join(known)}")
    summaries = []
    all_hold = True
    for path, training in trainings.items():
        if envs and training.env not in envs:
            continue
        run = ZooRun(path)
        returns = play_test(run, run.last_agent, n_episodes or training.test_episodes, TEST_SEED, n_envs)
        n_common = min(len(returns), len(training.published.test_returns))
        recorded, again = training.published.test_returns[:n_common], returns[:n_common]
        lost, allowed = float(np.mean(recorded) - np.mean(again)), allowed_loss(recorded, again)
        # NaN is worse than anything
        holds = lost <= allowed
        all_hold = all_hold and holds
        print(
            f"{training.env}: {np.mean(returns):.2f} in {len(returns)} episodes; in the first {n_common} "
            f"{np.mean(again):.2f}, recorded {np.mean(recorded):.2f}, "
            f"{'not worse' if holds else 'WORSE'} by more than {allowed:.2f}",
            file=sys.stderr,
            flush=True,
        )
        summaries.append(summarize(training, returns))
    print(format_table(summaries, n_envs))
    if output is not None:
        report = {"machine": machine(), "evaluation": {"first_seed": TEST_SEED, "n_envs": n_envs}}
        output.write_text(to_json({**report, "agents": summaries}))
        print(f"\nAll figures: {output}")
    return all_hold


def allowed_loss(recorded: Sequence[float], returns: Sequence[float]) -> float:
    """
    Return the loss that chance can explain.

    With the versions of its training an agent returns what it returned. With others, its episodes differ, the longer
    the more.

    :return: half of the 95% interval of the mean difference, and one percent of the recorded mean
    """
    differences = np.subtract(recorded, returns)
    half_width = 1.96 * float(np.std(differences)) / math.sqrt(len(differences))
    return half_width + _MARGIN * abs(float(np.mean(recorded)))


def summarize(training: Training, returns: list[float]) -> dict[str, Any]:
    """
    Return the figures of an agent and of all its seeds.

    :return: ``published``, over the episodes; ``all_seeds``, over the mean returns of the seeds
    """
    published = training.published
    means = [float(np.mean(seed.test_returns)) for seed in training.seeds]
    bar = gym.spec(training.env).reward_threshold
    return {
        "env": training.env,
        "published": {
            "seed": published.seed,
            "agent": published.selected,
            "timesteps": published.selected_timesteps,
            "episodes": len(returns),
            **_describe(returns),
            "std": float(np.std(returns)),
            "solved_at": bar,
            "solved": None if bar is None else float((np.array(returns) >= bar).mean()),
            "worst_5_percent": worst_episodes(np.array(returns)),
            "returns": returns,
        },
        "all_seeds": {
            "seeds": [seed.seed for seed in training.seeds],
            "timesteps": published.timesteps,
            "episodes": [len(seed.test_returns) for seed in training.seeds],
            "means": means,
            **_describe(means),
            "training_seconds": [seed.training_seconds for seed in training.seeds],
            "cpus": sorted({seed.machine["cpu"] for seed in training.seeds}),
            "commands": [seed.command for seed in training.seeds],
        },
    }


def _describe(sample: Sequence[float]) -> dict[str, Any]:
    """Return mean and IQM of episodes or seeds with their 95% intervals, as far as there are enough of them."""
    scores = np.array([sample])
    figures: dict[str, Any] = {"mean": float(mean(scores))}
    if len(sample) >= MIN_SEEDS:
        figures["mean_95"] = [float(bound) for bound in interval(mean, scores)]
    if len(sample) >= MIN_SEEDS_IQM:
        figures["iqm"] = float(interquartile_mean(scores))
        figures["iqm_95"] = [float(bound) for bound in interval(interquartile_mean, scores)]
    return figures


def format_table(summaries: Sequence[dict[str, Any]], n_envs: int) -> str:
    """Format figures as a Markdown table, with a note on how they were measured."""
    lines = [
        "| env | episodes | mean [95% interval] | IQM | solved | worst 5% | all seeds: mean [95% interval] | IQM "
        "| mean of each seed | env steps | training | RL Zoo: td3, and its best |",
        f"|{'---|' * 12}",
    ]
    for summary in summaries:
        agent, seeds = summary["published"], summary["all_seeds"]
        cells = [
            f"{summary['env']} (seed {agent['seed']})",
            f"{agent['episodes']:,}",
            _mean(agent),
            _iqm(agent),
            "no bar" if agent["solved"] is None else f"{agent['solved']:.1%} reach {agent['solved_at']:g}",
            f"{agent['worst_5_percent']:.1f}",
            _mean(seeds),
            _iqm(seeds),
            _seed_means(seeds),
            _steps(seeds["timesteps"]),
            _duration(float(np.mean(seeds["training_seconds"]))),
            format_zoo(summary["env"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    cpus = sorted({cpu for summary in summaries for cpu in summary["all_seeds"]["cpus"]})
    return "\n".join([*lines, "", _NOTE.format(seed=TEST_SEED, n_envs=n_envs, cpus="; ".join(cpus))])


_NOTE = (
    "Deterministic episodes from start seeds {seed:,} on, which served for nothing else, {n_envs} copies of the env "
    "side by side; the agent of each seed was selected on other episodes. Left: the published agent, its mean, IQM "
    "(mean without the lowest and the highest quarter), share of solved episodes (the env's own bar) and mean of the "
    "worst 5%, over its episodes. All seeds: mean and IQM over the mean returns of the seeds, in the tests before "
    "they were published. Intervals: 95% bootstrap. Training: wall-clock time of one seed; {cpus}. RL Zoo's figures: "
    "mean ± standard deviation over episodes, one seed, older versions."
)


def _mean(figures: dict[str, Any]) -> str:
    bounds = figures.get("mean_95")
    return f"{figures['mean']:.1f} [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else f"{figures['mean']:.1f}"


def _iqm(figures: dict[str, Any]) -> str:
    return f"{figures['iqm']:.1f}" if "iqm" in figures else "the mean"


def _seed_means(seeds: dict[str, Any]) -> str:
    """Return the mean of each seed; only the agent of the published seed is kept, and can play more episodes."""
    counts = " or ".join(f"{count:,}" for count in sorted(set(seeds["episodes"])))
    return f"{', '.join(f'{value:.1f}' for value in seeds['means'])} in {counts} episodes each"


def format_zoo(env: str) -> str:
    """Return what RL Zoo published of td3 and of its best algorithm in an env, of any version."""
    file = resources.files("sb3_td3x.studies").joinpath("data/zoo_benchmark.csv")
    with file.open(encoding="utf-8") as lines:
        table = pd.read_csv(lines, comment="#", index_col="algo")
    table = table[table["env"].str.rpartition("-v")[0] == env.rpartition("-v")[0]]
    best = table[table.index.isin(["td3"]) | (table["mean"] == table["mean"].max())].sort_values("mean")
    return ", ".join(f"{it.Index} {it.mean:.1f} ± {it.std:.1f} at {_steps(it.timesteps)}" for it in best.itertuples())


def _steps(number: int) -> str:
    return f"{number / 1e6:g}M" if number >= 1e6 else f"{number / 1e3:g}k"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
