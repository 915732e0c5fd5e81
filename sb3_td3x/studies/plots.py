"""The pictures of a report. An arm has the same color in all of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import seaborn as sns  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rliable import plot_utils  # type: ignore[import-untyped]

from sb3_td3x.studies.reference import references
from sb3_td3x.studies.statistics import Scores, performance_profiles

Colors = Mapping[str, Any]

# More bands hide each other
_MAX_BANDS = 4
_REFERENCE_LINES = (":", "--", "-.", (0, (1, 3)), (0, (5, 5)))


def arm_colors(arms: Sequence[str]) -> Colors:
    """Return a color for each arm, which people with any color vision can tell apart for up to ten arms."""
    return dict(zip(arms, sns.color_palette("colorblind" if len(arms) <= 10 else "husl", len(arms)), strict=True))


@contextmanager
def picture(path: Path, height: float = 4.0) -> Iterator[Axes]:
    """Draw a picture without a display, and write it when the block ends."""
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"):
        figure = Figure(figsize=(8.0, height), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots()
        # Without the version of matplotlib, the same statistics give the same file
        figure.savefig(path, format="png", metadata={"Software": None})


def draw_scores(
    runs: pd.DataFrame | None, statistics: pd.DataFrame, statistic: str, colors: Colors, path: Path, label: str
) -> None:
    """Draw a statistic of each arm with its interval, and the scores of runs, if any."""
    rows = statistics[statistics["statistic"] == statistic]
    arms = list(rows["arm"])
    with picture(path, 0.8 + 0.3 * len(arms)) as axes:
        if runs is not None:
            style = {"palette": dict(colors), "size": 4, "alpha": 0.6, "jitter": False}
            sns.stripplot(runs, x="score", y="arm", order=arms, hue="arm", ax=axes, **style)
        for position, row in enumerate(rows.itertuples()):
            errors = None if math.isnan(row.low) else [[row.value - row.low], [row.high - row.value]]
            axes.errorbar(row.value, position, xerr=errors, fmt="d", color=colors[row.arm], capsize=4, zorder=3)
        axes.axvline(float(rows["value"].iloc[0]), color="0.5", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(arms)), arms)
        axes.set(xlabel=label, ylabel="", ylim=(len(arms) - 0.5, -0.5))


def draw_learning_curves(statistics: pd.DataFrame, colors: Colors, path: Path, env: str) -> None:
    """Draw the mean learning curve of each arm, and those that the zoo has published."""
    with picture(path) as axes:
        _draw_curves(axes, statistics[statistics["statistic"] == "learning_curve"], colors)
        last = axes.get_xlim()[1]
        draw_references(axes, env, last)
        axes.set(ylabel="Return of an episode", xlim=(0, last))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_references(axes: Axes, env: str, last: float) -> None:
    """Draw the learning curves that the zoo has published of an env, up to a timestep."""
    curves = references()[env]["curves"] if env in references() else {}
    for style, (algo, curve) in zip(_REFERENCE_LINES, sorted(curves.items()), strict=False):
        points = pd.DataFrame(curve).query("timesteps <= @last")
        if len(points):
            label = f"RL Zoo's {algo}, one seed"
            axes.plot(*points.to_numpy().T, label=label, linestyle=style, color="0.5", linewidth=1)


def draw_profiles(scores: Scores, colors: Colors, path: Path, label: str) -> None:
    """Draw performance profiles from each arm's scores of shape (n_envs, n_seeds)."""
    thresholds, shares, intervals = performance_profiles(scores)
    with picture(path) as axes:
        plot_utils.plot_performance_profiles(
            shares,
            thresholds,
            intervals if len(shares) <= _MAX_BANDS else None,
            ax=axes,
            colors=dict(colors),
            xlabel=label,
            ylabel="Share of runs with score > τ",
            labelsize="medium",
            ticklabelsize="medium",
        )
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_over_estimation(statistics: pd.DataFrame, colors: Colors, path: Path) -> None:
    """Draw how much the critics over-estimate during training."""
    curves = statistics[statistics["statistic"] == "over_estimation"]
    with picture(path) as axes:
        _draw_curves(axes, curves, colors)
        axes.axhline(0, color="0.3", linewidth=1)
        # A diverging critic would flatten all other curves
        low, high = np.percentile([*curves["value"], 0.0], [3, 97])
        margin = max(0.5 * (high - low), 1e-3)
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, low - margin), min(top, high + margin))
        axes.set(ylabel="Over-estimation (discounted return)")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_curves(axes: Axes, curves: pd.DataFrame, colors: Colors) -> None:
    arms = curves.groupby("arm", sort=False)
    for arm, curve in arms:
        # A line of one or two points would hardly be seen
        marker = "." if len(curve) < 3 else None
        axes.plot(curve["timesteps"], curve["value"], color=colors[arm], marker=marker, label=arm)
        if len(arms) <= _MAX_BANDS:
            timesteps = curve["timesteps"].astype(float)
            axes.fill_between(timesteps, curve["low"], curve["high"], color=colors[arm], alpha=0.15, linewidth=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("Env steps")
