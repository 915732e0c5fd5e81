"""Learning curves of published agents, all seeds, next to those that RL Zoo published."""

from pathlib import Path

import numpy as np
import seaborn as sns  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from sb3_td3x.agents.training import Training, find_agents
from sb3_td3x.studies import plots
from sb3_td3x.studies.reference import references
from sb3_td3x.studies.statistics import interval
from sb3_td3x.zoo.register import ALGO

# The zoo trained up to a hundred times as long; more of its curves would hide ours
_MAX_TIMES_AS_LONG = 2.0


def plot(folder: Path, output: Path) -> list[Path]:
    """
    Draw the learning curves of all published agents.

    :return: the pictures, ``ENV.png``; agents without evaluations have none
    """
    output.mkdir(parents=True, exist_ok=True)
    paths = []
    for training in map(Training.read, find_agents(folder)):
        if not all(seed.evaluations["timesteps"] for seed in training.seeds):
            print(f"{training.env}: not all seeds have evaluations, no picture")
            continue
        path = output / f"{training.env}.png"
        with plots.picture(path) as axes:
            draw(training.env, *learning_curve(training), axes)
        paths.append(path)
    return paths


def learning_curve(training: Training) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the evaluations of all seeds.

    :return: timesteps of the first seed's evaluations, of shape (n,), and mean returns, of shape (n, n_seeds); those of
        seeds that were evaluated at other timesteps are interpolated
    """
    curves = [
        (np.array(seed.evaluations["timesteps"]), np.mean(seed.evaluations["returns"], axis=1))
        for seed in training.seeds
    ]
    timesteps = curves[0][0]
    return timesteps, np.stack([np.interp(timesteps, *curve) for curve in curves], axis=1)


def draw(env: str, timesteps: np.ndarray, returns: np.ndarray, axes: Axes) -> None:
    """
    Draw the learning curves of an env's seeds.

    :param timesteps: of the evaluations, of shape (n,)
    :param returns: their mean returns, of shape (n, n_seeds); NaN after the end of a seed, which is not in the mean
    """
    color = sns.color_palette("colorblind")[0]
    axes.plot(timesteps, returns, color=color, linewidth=0.5, alpha=0.5)
    complete = returns[:, np.isfinite(returns[-1])]
    n_seeds = complete.shape[1]
    label = f"{ALGO}, mean of {n_seeds} seeds" if n_seeds > 1 else f"{ALGO}, one seed"
    axes.plot(timesteps, complete.mean(axis=1), color=color, linewidth=2, label=label)
    low, high = interval(np.mean, complete)
    if np.isfinite(low).all():
        axes.fill_between(timesteps, low, high, color=color, alpha=0.2, linewidth=0, label="95% interval")
    plots.draw_references(axes, env, _MAX_TIMES_AS_LONG * timesteps[-1])
    published_as = references().get(env, {}).get("published_as", env)
    older = f" (RL Zoo: {published_as})" if published_as != env else ""
    axes.set(title=f"{env}{older}", xlabel="Env steps", ylabel="Return of an episode")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(fontsize="small")
