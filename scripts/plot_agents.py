"""
Learning curves of the published agents, all seeds, beside those that RL Zoo published.

    python scripts/plot_agents.py           # docs/results/ENV.png for each agent
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from agent_folders import AGENTS_FOLDER, ALGO, PICTURES, Training, find_agents
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.bootstrap import column_means, estimate
from sb3_td3x.studies.reference import references

# The zoo trained up to a hundred times as long; more of its curves than this would hide ours
_MAX_TIMES_AS_LONG = 2.0
# Okabe and Ito's colours for all kinds of colour vision
_COLOR = "#D55E00"
_ZOO_COLORS = {"td3": "#000000", "sac": "#0072B2", "tqc": "#009E73", "ddpg": "#CC79A7"}


def learning_curve(training: Training) -> tuple[np.ndarray, np.ndarray]:
    """
    :param training: the figures of an agent
    :return: timesteps of the first seed's evaluations, of shape (n,), and mean returns of all seeds, of shape
        (n_seeds, n). Those of a seed that was evaluated at other timesteps are interpolated.
    """
    curves = [
        (np.array(seed.evaluations["timesteps"]), np.mean(seed.evaluations["returns"], axis=1))
        for seed in training.seeds
    ]
    timesteps = curves[0][0]
    return timesteps, np.array([np.interp(timesteps, *curve) for curve in curves])


def draw(training: Training) -> Figure:
    """
    :param training: the figures of an agent
    :return: its learning curves, with those of the zoo where it published some
    """
    timesteps, returns = learning_curve(training)
    mean = estimate({ALGO: returns}, column_means)[ALGO]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(timesteps, returns.T, color=_COLOR, linewidth=0.5, alpha=0.5)
    label = f"{ALGO}, mean of {len(returns)} seeds" if len(returns) > 1 else f"{ALGO}, one seed"
    axes.plot(timesteps, mean.value, color=_COLOR, linewidth=2, label=label)
    if len(returns) > 1:
        axes.fill_between(timesteps, mean.low, mean.high, color=_COLOR, alpha=0.2, linewidth=0, label="95% interval")
    end = _MAX_TIMES_AS_LONG * timesteps[-1]
    reference = references().get(training.env)
    for algo, (steps, values) in (reference.curves if reference else {}).items():
        shown = [(step, value) for step, value in zip(steps, values, strict=True) if step <= end]
        if shown:
            label = f"zoo's {algo}, one seed"
            axes.plot(*zip(*shown, strict=True), color=_ZOO_COLORS.get(algo), linestyle="--", linewidth=1, label=label)
    version = f" (the zoo: {reference.published_as})" if reference and reference.published_as != training.env else ""
    axes.set(title=f"{training.env}{version}", xlabel="Env steps", ylabel="Return of an episode")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    """
    :param arguments: the command line, by default that of the process
    :return: exit status
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-f", "--folder", type=Path, default=AGENTS_FOLDER, help="the zoo's log folder of the agents")
    parser.add_argument("-o", "--output", type=Path, default=PICTURES, help="where the pictures go")
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    trainings = [Training.read(folder) for folder in find_agents(args.folder)]
    for training in trainings:
        if not all(seed.evaluations["timesteps"] for seed in training.seeds):
            print(f"{training.env}: not all seeds have evaluations, no picture")
            continue
        path = args.output / f"{training.env}.png"
        with atomic_write(path) as file:
            figure = draw(training)
            FigureCanvasAgg(figure)
            # Without the version of matplotlib the same figures give the same file
            figure.savefig(file, format="png", dpi=120, metadata={"Software": None})
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
