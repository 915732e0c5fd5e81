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
from matplotlib.ticker import EngFormatter, MaxNLocator
from rliable import plot_utils  # type: ignore[import-untyped]

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.reference import Reference

Colors = Mapping[str, Any]

_WIDTH = 8.0
_DPI = 120
# Height of a row with the name of an arm, in inches
_ROW = 0.3
# More bands hide each other
_MAX_BANDS = 4
_REFERENCE_LINES = (":", "--", "-.", (0, (1, 3)), (0, (5, 5)))
_SMALL = {"labelsize": "medium", "ticklabelsize": "medium"}


def arm_colors(arms: Sequence[str]) -> Colors:
    """
    Return a color for each arm.

    :return: colors that people with any color vision can tell apart, for up to ten arms
    """
    palette = sns.color_palette("colorblind", len(arms)) if len(arms) <= 10 else sns.color_palette("husl", len(arms))
    return dict(zip(arms, palette, strict=True))


@contextmanager
def picture(path: Path, height: float, rows: int = 1, columns: int = 1) -> Iterator[np.ndarray]:
    """
    Draw a picture without a display, and write it when the block ends.

    :return: the axes, of shape (rows, columns)
    """
    with sns.axes_style("whitegrid"), sns.plotting_context("paper"):
        figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure.subplots(rows, columns, sharex=rows * columns > 1, sharey=rows * columns > 1, squeeze=False)
        with atomic_write(path) as file:
            # Without the version of matplotlib, the same statistics give the same file
            figure.savefig(file, format="png", metadata={"Software": None})


def draw_scores(
    runs: pd.DataFrame, statistics: pd.DataFrame, statistic: str, colors: Colors, path: Path, label: str
) -> None:
    """
    Draw a statistic of each arm with its interval, and the score of each seed.

    :param runs: runs to draw with ``arm`` and ``score``; may be empty
    """
    rows = statistics[statistics["statistic"] == statistic]
    arms = list(rows["arm"])
    with picture(path, 0.8 + _ROW * len(arms)) as ((axes,),):
        if len(runs):
            style = {"palette": dict(colors), "size": 4, "alpha": 0.6, "jitter": False}
            sns.stripplot(runs, x="score", y="arm", order=arms, hue="arm", ax=axes, **style)
        for position, row in enumerate(rows.itertuples()):
            errors = None if math.isnan(row.low) else [[row.value - row.low], [row.high - row.value]]
            axes.errorbar(row.value, position, xerr=errors, fmt="d", color=colors[row.arm], capsize=4, zorder=3)
        axes.axvline(float(rows["value"].iloc[0]), color="0.5", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(arms)), arms)
        axes.set(xlabel=label, ylabel="", ylim=(len(arms) - 0.5, -0.5))


def draw_learning_curves(
    statistics: pd.DataFrame, colors: Colors, path: Path, learning_starts: float | None, reference: Reference | None
) -> None:
    """
    Draw the mean learning curve of each arm.

    :param learning_starts: env steps until which no arm learns, which are shaded
    :param reference: curves that the zoo has published, or None
    """
    with picture(path, 4.0) as ((axes,),):
        _draw_curves(axes, statistics, "learning_curve", colors)
        last = axes.get_xlim()[1]
        for idx, (algo, (timesteps, returns)) in enumerate(sorted(reference.curves.items() if reference else ())):
            n_points = sum(steps <= last for steps in timesteps)
            if n_points:
                style = {"linestyle": _REFERENCE_LINES[idx % len(_REFERENCE_LINES)], "color": "0.5"}
                axes.plot(timesteps[:n_points], returns[:n_points], label=f"zoo: {algo}", linewidth=1, **style)
        _shade(axes, learning_starts)
        axes.set(xlabel="Env steps", ylabel="Return of an episode", xlim=(0, last))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_learning_panels(
    evaluations: pd.DataFrame,
    statistics: pd.DataFrame,
    base: str,
    colors: Colors,
    path: Path,
    learning_starts: Mapping[str, float],
) -> None:
    """
    Draw the learning curves of each arm in its own panel: every seed, the mean, and its interval.

    :param learning_starts: for each arm, env steps before learning starts, which are shaded
    """
    curves = statistics[statistics["statistic"] == "learning_curve"]
    arms = list(curves["arm"].unique())
    columns = min(len(arms), 4)
    rows = math.ceil(len(arms) / columns)
    with picture(path, 0.6 + 1.8 * rows, rows, columns) as grid:
        for axes, arm in zip(grid.flat, arms, strict=False):
            for _, seed in evaluations[evaluations["arm"] == arm].groupby("seed"):
                means = seed.groupby("timesteps")["return"].mean()
                axes.plot(means.index, means, color=colors[arm], linewidth=0.6, alpha=0.6)
            if arm != base:
                line = curves[curves["arm"] == base]
                axes.plot(line["timesteps"], line["value"], "--", color="0.4", linewidth=1)
            _draw_curves(axes, curves[curves["arm"] == arm], "learning_curve", colors)
            _shade(axes, learning_starts.get(arm))
            axes.set_title(arm, fontsize="small")
            axes.xaxis.set_major_locator(MaxNLocator(3))
        for axes in grid.flat[len(arms) :]:
            axes.set_visible(False)
        grid[0, 0].figure.supxlabel("Env steps", fontsize="medium")
        grid[0, 0].figure.supylabel("Return of an episode", fontsize="medium")


def draw_profiles(
    thresholds: np.ndarray,
    shares: Mapping[str, np.ndarray],
    intervals: Mapping[str, np.ndarray],
    colors: Colors,
    path: Path,
    label: str,
) -> None:
    """
    Draw performance profiles.

    :param thresholds: scores, of shape (n_thresholds,)
    :param shares: for each arm the share of runs above each threshold
    :param intervals: for some arms the intervals of the shares, of shape (2, n_thresholds)
    """
    with picture(path, 3.6) as ((axes,),):
        plot_utils.plot_performance_profiles(
            dict(shares),
            thresholds,
            dict(intervals) if len(shares) <= _MAX_BANDS else None,
            ax=axes,
            colors=dict(colors),
            xlabel=label,
            ylabel="Share of runs with score > τ",
            **_SMALL,
        )
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_improvement(statistics: pd.DataFrame, colors: Colors, path: Path) -> None:
    """Draw the probability that each arm improves on the base."""
    rows = statistics[statistics["statistic"] == "probability_of_improvement"]
    pairs = [f"{row.arm},{row.against}" for row in rows.itertuples()]
    with picture(path, 1.2 + _ROW * len(rows)) as ((axes,),):
        plot_utils.plot_probability_of_improvement(
            dict(zip(pairs, rows["value"], strict=True)),
            dict(zip(pairs, rows[["low", "high"]].to_numpy(), strict=True)),
            ax=axes,
            colors=[colors[arm] for arm in rows["arm"]],
            xlabel="Probability that the left arm scores more than the right one",
            left_ylabel="",
            right_ylabel="",
            **_SMALL,
        )
        for side in axes.figure.axes:
            side.invert_yaxis()
        axes.axvline(0.5, color="0.5", linestyle="--", linewidth=1)
        axes.set_xlim(-0.02, 1.02)


def draw_over_estimation(statistics: pd.DataFrame, colors: Colors, path: Path) -> None:
    """Draw how much the critics over-estimate during training."""
    with picture(path, 3.6) as ((axes,),):
        _draw_curves(axes, statistics, "over_estimation", colors)
        axes.axhline(0, color="0.3", linewidth=1)
        # A diverging critic would flatten all other curves
        values = statistics.loc[statistics["statistic"] == "over_estimation", "value"]
        low, high = np.percentile([*values, 0.0], [3, 97])
        margin = max(0.5 * (high - low), 1e-3)
        bottom, top = axes.get_ylim()
        axes.set_ylim(max(bottom, low - margin), min(top, high + margin))
        axes.set(xlabel="Env steps", ylabel="Over-estimation (discounted return)")
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_curves(axes: Axes, statistics: pd.DataFrame, statistic: str, colors: Colors) -> None:
    curves = statistics[statistics["statistic"] == statistic].groupby("arm", sort=False)
    for arm, curve in curves:
        # A line of one or two points would hardly be seen
        marker = "." if len(curve) < 3 else None
        axes.plot(curve["timesteps"], curve["value"], color=colors[arm], marker=marker, label=arm)
        if len(curves) <= _MAX_BANDS:
            axes.fill_between(
                curve["timesteps"].astype(float),
                curve["low"],
                curve["high"],
                color=colors[arm],
                alpha=0.15,
                linewidth=0,
            )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _shade(axes: Axes, learning_starts: float | None) -> None:
    if learning_starts:
        axes.axvspan(0, learning_starts, color="0.85", linewidth=0, label="before learning starts")
