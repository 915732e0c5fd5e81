"""The pictures of a report. Each arm keeps its colour and line through all of them."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.bootstrap import Estimate
from sb3_td3x.studies.reference import Reference
from sb3_td3x.studies.statistics import Curve, EnvStatistics, OverallStatistics, Profile, ValueCurves

# Inches: the text of an A4 page is 6.3 to 7 wide, so letters are about as large on paper as said here
_WIDTH = 7.2
_DPI = 150
_STYLE: Any = {
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#666666",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.5,
    "figure.constrained_layout.use": True,
}
# Okabe and Ito's colours for all kinds of colour vision; without yellow, which is not seen on white, the base black
_BASE_COLOR = "#000000"
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# When the colours are used up; dotted lines are the zoo's
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)))
_REFERENCE_MARKERS = {"td3": "x", "ddpg": "+", "sac": "o", "tqc": "^"}
_REFERENCE_COLOR = "#777777"
# With more arms, bands over each other hide more than they show
_MAX_BANDS = 3
_MAX_PAIRS = 12
_BAND_ALPHA = 0.18
# How much of the height one row of an arm takes, in inches
_ROW = 0.24
# How many letters of an arm's name fit: beside a row or in a legend, and where there is less room
_LABEL = 28
_NARROW_LABEL = 20

STEPS = "Env steps"
RETURN = "Return of an episode"


@dataclass(frozen=True)
class _ArmStyle:
    """
    How an arm is drawn.

    :param color: its colour
    :param line: its line style
    """

    color: str
    line: Any


class Figures:
    """
    Draws the pictures of a study.

    :param folder: where they go
    :param arms: all arms of the study, the base first
    """

    def __init__(self, folder: Path, arms: Sequence[str]):
        self.folder = folder
        self._labels = {length: shorten(arms, length) for length in (_LABEL, _NARROW_LABEL)}
        self._styles = {arms[0]: _ArmStyle(_BASE_COLOR, _LINES[0])}
        for idx, arm in enumerate(arms[1:]):
            line = _LINES[idx // len(_COLORS) % len(_LINES)]
            self._styles[arm] = _ArmStyle(_COLORS[idx % len(_COLORS)], line)

    def learning_curves(self, statistics: EnvStatistics, reference: Reference | None, name: str) -> Path:
        """
        :param statistics: the figures of an env
        :param reference: what the zoo has published of it
        :param name: of the file
        :return: all arms in one picture
        """

        def draw(figure: Figure) -> None:
            axes = figure.subplots()
            curves = statistics.learning
            for arm, curve in curves.items():
                self._line(axes, arm, curve.timesteps, curve.estimate, band=len(curves) <= _MAX_BANDS)
            last = max(int(curve.timesteps[-1]) for curve in curves.values())
            drawn = _draw_reference(axes, reference, last)
            _steps_axis(axes, last)
            axes.set_ylabel(RETURN)
            _legend(figure, [self._handle(arm) for arm in curves] + drawn)

        return self._save(name, 3.7, draw)

    def learning_panels(self, statistics: EnvStatistics, name: str) -> Path:
        """
        :param statistics: the figures of an env
        :param name: of the file
        :return: a panel for each arm, with its seeds, its interval and the base
        """
        curves = statistics.learning
        base = curves.get(statistics.base or "")
        last = max(int(curve.timesteps[-1]) for curve in curves.values())

        def panel(axes: Axes, arm: str) -> None:
            curve = curves[arm]
            color = self._styles[arm].color
            axes.plot(curve.timesteps, curve.runs.T, color=color, linewidth=0.6, alpha=0.5)
            if base is not None and curve is not base:
                axes.plot(base.timesteps, base.estimate.value, color=_BASE_COLOR, linewidth=1, linestyle=_LINES[1])
            _band(axes, curve.timesteps, curve.estimate, color)
            axes.plot(curve.timesteps, curve.estimate.value, color=color)
            _steps_axis(axes, last)

        handles: list[Any] = [
            Line2D([], [], color="#555555", label="interquartile mean"),
            Patch(color="#555555", alpha=_BAND_ALPHA, linewidth=0, label="95% interval"),
            Line2D([], [], color="#555555", linewidth=0.6, alpha=0.7, label="a seed"),
        ]
        if base is not None:
            handles.append(Line2D([], [], color=_BASE_COLOR, linewidth=1, linestyle=_LINES[1], label=statistics.base))
        return self._panels(name, curves, panel, handles, RETURN)

    def scores(self, statistics: EnvStatistics, name: str) -> Path:
        """
        :param statistics: the figures of an env
        :param name: of the file
        :return: interquartile means with intervals, and the score of each seed
        """

        def draw(figure: Figure) -> None:
            axes = figure.subplots()
            self._intervals(axes, statistics.iqm, statistics.base)
            for row, (arm, scores) in enumerate(statistics.scores.items()):
                # Seeds above each other, so that equal scores are seen
                offsets = np.linspace(-0.25, 0.25, len(scores)) if len(scores) > 1 else [0.0]
                axes.scatter(scores, row + np.array(offsets), 9, "white", edgecolors=self._styles[arm].color, zorder=4)
            axes.set_xlabel("Score of a run: mean return of its last agent's episodes")
            _legend(figure, [*_interval_handles("interquartile mean"), _seed_handle()])

        return self._save(name, 0.9 + _ROW * len(statistics.arms), draw)

    def distributions(self, statistics: EnvStatistics, name: str) -> Path:
        """
        :param statistics: the figures of an env
        :param name: of the file
        :return: performance profiles of the runs, and the distribution of the episodes' returns
        """

        def draw(figure: Figure) -> None:
            left, right = figure.subplots(1, 2)
            self._profile(left, statistics.profile)
            left.set_xlabel("Score of a run, τ")
            for arm, runs in statistics.runs.items():
                returns = np.concatenate([run.final_returns for run in runs])
                style = self._styles[arm]
                right.ecdf(returns, color=style.color, linestyle=style.line, linewidth=1.3)
            right.set_xlabel(RETURN)
            right.xaxis.set_major_locator(MaxNLocator(5))
            right.set_ylabel("Fraction of episodes with return ≤ x")
            right.set_ylim(-0.02, 1.02)
            _legend(figure, [self._handle(arm) for arm in statistics.arms])

        return self._save(name, 3.5, draw)

    def improvement(
        self, improvement: Mapping[str, Estimate], base: str, name: str, pairs: tuple[list[str], np.ndarray] | None
    ) -> Path:
        """
        :param improvement: for each arm the probability that it improves on the base
        :param base: the base
        :param name: of the file
        :param pairs: arms, and the probability that the arm of a row improves on that of a column; None: left out
        :return: intervals, and beside them the matrix of all pairs unless they are too many
        """
        arms, matrix = pairs or ([], np.empty((0, 0)))
        with_pairs = draws_pairs(arms)

        def draw(figure: Figure) -> None:
            left, *others = np.atleast_1d(figure.subplots(1, 1 + with_pairs, width_ratios=[1, 1.15][: 1 + with_pairs]))
            self._intervals(left, improvement, None)
            left.axvline(0.5, color="#555555", linewidth=0.9, linestyle=_LINES[1])
            left.set_xlim(-0.03, 1.03)
            left.set_xlabel(f"Probability that an arm beats {base}")
            for axes in others:
                _draw_pairs(axes, [self._labels[_NARROW_LABEL][arm] for arm in arms], matrix)
            _legend(figure, _interval_handles("probability"))

        rows = max(len(improvement), len(arms) if with_pairs else 0)
        return self._save(name, 1.1 + (0.62 if with_pairs else 0) + _ROW * rows * (1.15 if with_pairs else 1), draw)

    def over_estimation(self, values: Mapping[str, ValueCurves], name: str) -> Path:
        """
        :param values: over-estimation of each arm
        :param name: of the file
        :return: all arms in one picture
        """

        def draw(figure: Figure) -> None:
            axes = figure.subplots()
            for arm, curves in values.items():
                curve = curves.difference
                self._line(axes, arm, curve.timesteps, curve.estimate, band=len(values) <= _MAX_BANDS)
            axes.axhline(0, color="#555555", linewidth=0.8)
            axes.set_ylim(_limits([curves.difference for curves in values.values()], 0.0))
            _steps_axis(axes, max(int(curves.difference.timesteps[-1]) for curves in values.values()))
            axes.set_ylabel("Over-estimation\n(discounted return)")
            _legend(figure, [self._handle(arm) for arm in values])

        return self._save(name, 3.3, draw)

    def value_panels(self, values: Mapping[str, ValueCurves], name: str) -> Path:
        """
        :param values: over-estimation of each arm
        :param name: of the file
        :return: a panel for each arm, with the critic's values and the returns
        """
        differences = {arm: curves.difference for arm, curves in values.items()}
        last = max(int(curve.timesteps[-1]) for curve in differences.values())
        limits = _limits([curve for arm in values for curve in (values[arm].estimated, values[arm].monte_carlo)])

        def panel(axes: Axes, arm: str) -> None:
            curves, color = values[arm], self._styles[arm].color
            for curve, line in ((curves.estimated, "-"), (curves.monte_carlo, _LINES[1])):
                _band(axes, curve.timesteps, curve.estimate, color)
                axes.plot(curve.timesteps, curve.estimate.value, color=color, linestyle=line)
            axes.set_ylim(limits)
            _steps_axis(axes, last)

        handles = [
            Line2D([], [], color="#555555", label="the critic's estimate"),
            Line2D([], [], color="#555555", linestyle=_LINES[1], label="Monte-Carlo return"),
            Patch(color="#555555", alpha=_BAND_ALPHA, linewidth=0, label="95% interval"),
        ]
        return self._panels(name, differences, panel, handles, "Discounted return")

    def speed(self, statistics: EnvStatistics, name: str) -> Path:
        """
        :param statistics: the figures of an env
        :param name: of the file
        :return: steps a second and duration of each training
        """
        unit, seconds = time_unit(max(run.training_seconds for runs in statistics.runs.values() for run in runs))
        quantities = (
            ("Env steps a second", [[run.steps_per_second for run in runs] for runs in statistics.runs.values()]),
            (
                f"Duration of a training ({unit})",
                [[run.training_seconds / seconds for run in runs] for runs in statistics.runs.values()],
            ),
        )

        def draw(figure: Figure) -> None:
            pair = figure.subplots(1, 2, sharey=True)
            for axes, (label, values) in zip(pair, quantities, strict=True):
                for row, (arm, runs) in enumerate(zip(statistics.arms, values, strict=True)):
                    color = self._styles[arm].color
                    axes.barh(row, float(np.median(runs)), 0.55, color=color, alpha=0.3)
                    offsets = np.linspace(-0.2, 0.2, len(runs)) if len(runs) > 1 else np.zeros(1)
                    axes.scatter(runs, row + offsets, 9, "white", edgecolors=color, zorder=4)
                axes.set_xlabel(label)
                axes.set_xlim(left=0)
                axes.xaxis.set_major_locator(MaxNLocator(5))
                self._arm_axis(axes, statistics.arms)
            _legend(figure, [Patch(color="#555555", alpha=0.3, linewidth=0, label="median"), _seed_handle()])

        return self._save(name, 0.9 + _ROW * len(statistics.arms), draw)

    def overall_scores(self, overall: OverallStatistics, drawn: Collection[str], name: str) -> Path:
        """
        :param overall: the figures of all envs together, with normalized scores
        :param drawn: the arms whose profiles are drawn
        :param name: of the file
        :return: interquartile means with intervals, and performance profiles
        """

        def draw(figure: Figure) -> None:
            assert overall.profile is not None
            left, right = figure.subplots(1, 2)
            self._intervals(left, overall.iqm, overall.base)
            left.set_xlabel("Interquartile mean of normalized scores")
            profile = overall.profile.of(drawn)
            self._profile(right, profile)
            right.set_xlabel("Normalized score, τ")
            handles = [self._handle(arm) for arm in profile.estimates]
            _legend(figure, handles)

        return self._save(name, max(3.3, 0.9 + _ROW * len(overall.iqm)), draw)

    def _line(self, axes: Axes, arm: str, x: np.ndarray, estimate: Estimate, band: bool) -> None:
        """
        :param axes: where to draw
        :param arm: name of the arm
        :param x: where its estimates are
        :param estimate: its estimates
        :param band: whether to draw their intervals
        """
        style = self._styles[arm]
        if band:
            _band(axes, x, estimate, style.color)
        # A single point would be no line
        axes.plot(x, estimate.value, color=style.color, linestyle=style.line, marker="." if len(x) < 3 else None)

    def _handle(self, arm: str) -> Line2D:
        """
        :param arm: name of an arm
        :return: its line, for the legend
        """
        style = self._styles[arm]
        return Line2D([], [], color=style.color, linestyle=style.line, label=self._labels[_LABEL][arm])

    def _intervals(self, axes: Axes, estimates: Mapping[str, Estimate], base: str | None) -> None:
        """
        :param axes: where to draw
        :param estimates: a quantity of each arm, a row each
        :param base: the arm whose estimate is drawn as a line through all rows; None: no line
        """
        # Else the axis would begin where the leftmost interval does
        axes.use_sticky_edges = False
        for row, (arm, estimate) in enumerate(estimates.items()):
            color = self._styles[arm].color
            if np.isfinite(estimate.low[0]):
                width = float(estimate.high[0] - estimate.low[0])
                axes.barh(row, width, 0.62, float(estimate.low[0]), color=color, alpha=0.3, linewidth=0)
            axes.plot([estimate.value[0]] * 2, [row - 0.36, row + 0.36], color=color, linewidth=2.2, zorder=3)
        if base is not None and base in estimates:
            axes.axvline(float(estimates[base].value[0]), color=_BASE_COLOR, linewidth=0.8, linestyle=_LINES[1])
        self._arm_axis(axes, list(estimates))
        axes.xaxis.set_major_locator(MaxNLocator(6))

    def _profile(self, axes: Axes, profile: Profile) -> None:
        """
        :param axes: where to draw
        :param profile: performance profiles
        """
        for arm, estimate in profile.estimates.items():
            self._line(axes, arm, profile.thresholds, estimate, band=len(profile.estimates) <= _MAX_BANDS)
        axes.set_ylabel("Fraction of runs with score > τ")
        axes.set_ylim(-0.02, 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(6))

    def _arm_axis(self, axes: Axes, arms: list[str]) -> None:
        """
        :param axes: whose rows are arms, the first at the top
        :param arms: their names
        """
        axes.set_yticks(range(len(arms)), [self._labels[_LABEL][arm] for arm in arms])
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)

    def _panels(
        self,
        name: str,
        curves: Mapping[str, Curve],
        panel: Callable[[Axes, str], None],
        handles: Sequence[Any],
        ylabel: str,
    ) -> Path:
        """
        :param name: of the file
        :param curves: a curve of each arm that has a panel
        :param panel: draws it, but for its title
        :param handles: of the legend
        :param ylabel: what the vertical axes show
        :return: the picture
        """
        arms = list(curves)
        columns = min(len(arms), 3 if len(arms) in (3, 5, 6, 9) else 4)
        rows = math.ceil(len(arms) / columns)
        titles = _panel_titles(curves, self._labels[_NARROW_LABEL if columns == 4 else _LABEL])

        def draw(figure: Figure) -> None:
            grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
            for axes, arm in zip(grid, arms, strict=False):
                panel(axes, arm)
                axes.set_title(titles[arm], loc="left")
            for idx, axes in enumerate(grid):
                # Below a panel there may be none
                is_lowest = idx + columns >= len(arms)
                axes.set_xlabel("")
                axes.tick_params(labelbottom=is_lowest)
                axes.set_visible(idx < len(arms))
            figure.supxlabel(STEPS, fontsize=_STYLE["axes.labelsize"])
            figure.supylabel(ylabel, fontsize=_STYLE["axes.labelsize"])
            # Above, since Matplotlib would lay it over the label below
            _legend(figure, handles, "upper")

        return self._save(name, 0.7 + (2.6 if rows == 1 else 1.65 * rows), draw)

    def _save(self, name: str, height: float, draw: Callable[[Figure], None]) -> Path:
        """
        :param name: of the file, without its ending
        :param height: of the picture without its legend, in inches
        :param draw: draws it
        :return: the file
        """
        path = self.folder / f"{name}.png"
        with rc_context(_STYLE):
            figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
            FigureCanvasAgg(figure)
            draw(figure)
            with atomic_write(path) as file:
                figure.savefig(file, format="png", facecolor="white", metadata={"Software": None})
        return path


def draws_pairs(arms: Sequence[str]) -> bool:
    """
    :param arms: names of arms
    :return: whether a matrix of all pairs says more than the comparison with the base, and can be read
    """
    return 2 < len(arms) <= _MAX_PAIRS


def time_unit(longest: float) -> tuple[str, float]:
    """
    :param longest: the longest of some durations, in seconds
    :return: the unit to tell them in, and its seconds
    """
    return next(
        unit
        for unit in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if longest >= 2 * unit[1] or unit[1] == 1
    )


def _seeds(n_seeds: int) -> str:
    """
    :param n_seeds: a number of seeds
    :return: it in words
    """
    return "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"


def _band(axes: Axes, x: np.ndarray, estimate: Estimate, color: str) -> None:
    """
    :param axes: where to draw
    :param x: where the estimates are
    :param estimate: estimates; nothing is drawn without intervals
    :param color: of the band
    """
    axes.fill_between(x, estimate.low, estimate.high, color=color, alpha=_BAND_ALPHA, linewidth=0)


def _draw_reference(axes: Axes, reference: Reference | None, last: int) -> list[Line2D]:
    """
    :param axes: where to draw
    :param reference: what the zoo has published; None: nothing
    :param last: last timestep of the study
    :return: the lines for the legend
    """
    lines = []
    for algo, (timesteps, returns) in sorted(reference.curves.items() if reference else ()):
        n_points = sum(steps <= last for steps in timesteps)
        if n_points == 0:
            continue
        lines += axes.plot(
            timesteps[:n_points],
            returns[:n_points],
            color=_REFERENCE_COLOR,
            linestyle=":",
            linewidth=1,
            marker=_REFERENCE_MARKERS.get(algo, "."),
            markersize=4,
            markerfacecolor="white",
            markevery=max(n_points // 10, 1),
            label=f"zoo's {algo}",
            zorder=1.5,
        )
    return lines


def _draw_pairs(axes: Axes, labels: list[str], matrix: np.ndarray) -> None:
    """
    :param axes: where to draw
    :param labels: of the arms of rows and columns
    :param matrix: probability that the arm of a row improves on that of a column
    """
    shown = np.ma.masked_array(matrix, np.eye(len(labels), dtype=bool))
    # Purple to orange, told apart by all kinds of colour vision
    axes.imshow(shown, cmap="PuOr_r", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(~np.eye(len(labels), dtype=bool)):
        value = matrix[row, column]
        color = "white" if abs(value - 0.5) > 0.32 else "black"
        axes.text(column, row, f"{value:.2f}".replace("0.", "."), ha="center", va="center", fontsize=6.5, color=color)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_title("Probability that the row beats the column", loc="right")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _limits(curves: Sequence[Curve], *shown: float) -> tuple[float, float]:
    """
    A critic that diverges would press all others flat: its values are left out of sight where they are far off.

    :param curves: curves of values
    :param shown: other values that shall be seen
    :return: limits of their axis
    """
    values = np.concatenate([curve.estimate.value for curve in curves])
    everything = np.concatenate([values, *(bound for curve in curves for bound in _bounds(curve))])
    low, high = np.percentile(values, [5, 95])
    reach = 2 * max(high - low, 0.1 * abs(low), 0.1 * abs(high), 1e-3)
    bottom = min(max(everything.min(), low - reach), *shown, high)
    top = max(min(everything.max(), high + reach), *shown, low)
    margin = 0.05 * max(top - bottom, 0.1 * abs(top), 1e-3)
    return float(bottom - margin), float(top + margin)


def _bounds(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """
    :param curve: a curve
    :return: the bounds of its intervals, or itself where there are none
    """
    estimate = curve.estimate
    is_known = np.isfinite(estimate.low)
    return np.where(is_known, estimate.low, estimate.value), np.where(is_known, estimate.high, estimate.value)


def _panel_titles(curves: Mapping[str, Curve], labels: Mapping[str, str]) -> dict[str, str]:
    """
    :param curves: of each arm
    :param labels: of each arm
    :return: its label, and below it the number of seeds where these differ
    """
    counts = {arm: curve.estimate.n_seeds for arm, curve in curves.items()}
    differ = len(set(counts.values())) > 1
    return {arm: labels[arm] + f"\n{_seeds(counts[arm])}" * differ for arm in curves}


def shorten(names: Sequence[str], length: int) -> dict[str, str]:
    """
    :param names: names of arms
    :param length: how many letters fit
    :return: for each name a label that no other has: the name itself, its parts cut short
        ("stoc+no-r+no-t+no-s+no-c"), their initials ("sp+nr+nt+ns+nc"), or its middle left out
    """
    labels = {name: name for name in names if len(name) <= length}
    for rule in (_cut_parts, _initials, _cut_middle):
        shortened = {name: rule(name, length) for name in names if name not in labels}
        counts = Counter([*labels.values(), *shortened.values()])
        labels |= {name: text for name, text in shortened.items() if len(text) <= length and counts[text] == 1}
    for number, name in enumerate(names, 1):
        # No name has this sign
        labels.setdefault(name, f"{_cut_middle(name, length - len(f'#{number}'))}#{number}")
    return labels


def _cut_parts(name: str, length: int) -> str:
    """
    :param name: name of an arm
    :param length: how many letters fit
    :return: the first letters of each of the parts that ``+`` joins, as many as fit; the name where it has one part,
        or they would look the same
    """
    parts = name.split("+")
    fitting = (kept for kept in range(len(name), 0, -1) if len("+".join(part[:kept] for part in parts)) <= length)
    kept = next(fitting, 1)
    cut = [part[:kept] for part in parts]
    return "+".join(cut) if 1 < len(parts) == len(set(cut)) else name


def _initials(name: str, length: int) -> str:
    """
    :param name: name of an arm
    :param length: not used, initials are as short as can be
    :return: the first letter of each word of the parts that ``+`` joins; the name where it has one part
    """
    words = [re.findall(r"[^\W_]+", part) for part in name.split("+")]
    return "+".join("".join(word[0] for word in part) for part in words) if len(words) > 1 else name


def _cut_middle(name: str, length: int) -> str:
    """
    :param name: name of an arm
    :param length: how many letters fit
    :return: the name, with its middle left out where it is longer
    """
    if len(name) <= length:
        return name
    head = (length - 1) // 2
    return f"{name[:head]}…{name[-(length - 1 - head) :]}"


def _steps_axis(axes: Axes, last: int) -> None:
    """
    :param axes: whose horizontal axis shows env steps
    :param last: last timestep
    """
    axes.set_xlabel(STEPS)
    axes.set_xlim(0, last * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _interval_handles(label: str) -> list[Any]:
    """
    :param label: what is estimated
    :return: mark and interval, for the legend
    """
    return [
        Line2D([], [], color="#555555", marker="|", markersize=9, markeredgewidth=2.2, linestyle="", label=label),
        Patch(color="#555555", alpha=0.3, linewidth=0, label="95% interval"),
    ]


def _seed_handle() -> Line2D:
    """
    :return: the mark of a seed, for the legend
    """
    return Line2D(
        [], [], color="#555555", marker="o", markersize=3, markerfacecolor="white", linestyle="", label="a seed"
    )


def _legend(figure: Figure, handles: Sequence[Any], side: Literal["upper", "lower"] = "lower") -> None:
    """
    :param figure: the figure
    :param handles: of its only legend
    :param side: "upper" or "lower"
    """
    longest = max(len(str(handle.get_label())) for handle in handles)
    # A letter takes about 0.06 inches, the line before it 0.45
    columns = max(1, min(len(handles), int(_WIDTH / (0.5 + 0.065 * longest))))
    where: Literal["outside upper center", "outside lower center"]
    where = "outside upper center" if side == "upper" else "outside lower center"
    figure.legend(handles=handles, loc=where, ncols=columns, columnspacing=1.4, handlelength=2.2)
