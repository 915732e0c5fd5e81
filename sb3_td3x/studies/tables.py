"""The CSV files of a report: all its numbers in full precision."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.bootstrap import Estimate
from sb3_td3x.studies.records import RunRecord
from sb3_td3x.studies.results import Results
from sb3_td3x.studies.statistics import EnvStatistics, OverallStatistics

Row = Sequence[Any]

# What each file holds, for the report
FILES = {
    "runs.csv": "a line for each finished run",
    "returns.csv": "a line for each final episode of a run's last and of its best agent; episode i has the same start "
    "in all runs of an env; lengths, in env steps, are those of the last agent's",
    "evaluations.csv": "a line for each episode of the evaluations while training",
    "value_estimates.csv": "a line for each run and point at which the critic's values were compared with returns",
    "statistics.csv": "the figures of this report with their intervals, which are empty where there is one seed",
}
_RUN_COLUMNS = (
    *("env", "arm", "algo", "seed", "timesteps", "training_seconds", "steps_per_second", "n_episodes"),
    *("final_mean", "final_std", "final_median", "final_min", "final_max", "final_mean_length"),
    *("n_best_episodes", "best_mean", "best_std", "processor", "cores"),
)
_STATISTIC_COLUMNS = (
    "env",
    "arm",
    "against",
    "statistic",
    "timesteps",
    "value",
    "low",
    "high",
    "n_seeds",
    "n_episodes",
)
ALL_ENVS = "all"


def write_tables(
    folder: Path, results: Results, env_statistics: Sequence[EnvStatistics], overall: OverallStatistics | None
) -> None:
    """
    :param folder: where the files go
    :param results: a study
    :param env_statistics: the figures of its envs
    :param overall: those of all envs together
    """
    runs = results.runs
    rows = {
        "runs.csv": (_RUN_COLUMNS, map(_run_row, runs)),
        "returns.csv": (("env", "arm", "seed", "agent", "episode", "return", "length"), _return_rows(runs)),
        "evaluations.csv": (("env", "arm", "seed", "timesteps", "episode", "return"), _evaluation_rows(runs)),
        "value_estimates.csv": (
            ("env", "arm", "seed", "timesteps", "estimated", "monte_carlo", "n_states"),
            _value_rows(runs),
        ),
        "statistics.csv": (_STATISTIC_COLUMNS, _statistic_rows(env_statistics, overall)),
    }
    for name, (columns, lines) in rows.items():
        _write_csv(folder / name, columns, lines)


def _write_csv(path: Path, columns: Row, rows: Iterator[Row]) -> None:
    """
    :param path: the file
    :param columns: names of the columns
    :param rows: the lines; None and NaN become empty
    """
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow("" if isinstance(cell, float) and np.isnan(cell) else cell for cell in row)
    with atomic_write(path) as file:
        file.write(lines.getvalue().encode())


def _run_row(run: RunRecord) -> Row:
    """
    :param run: a run
    :return: its line in ``runs.csv``
    """
    final, best = np.array(run.final_returns), np.array(run.best_returns or [np.nan])
    return (
        *(run.env, run.arm, run.algo, run.seed, run.timesteps, run.training_seconds, run.steps_per_second, len(final)),
        *(float(value) for value in (final.mean(), final.std(), np.median(final), final.min(), final.max())),
        float(np.mean(run.final_lengths)),
        *(len(run.best_returns or ()), float(best.mean()), float(best.std())),
        *(run.machine.get("processor"), run.machine.get("cores")),
    )


def _return_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """
    :param runs: finished runs
    :return: the lines of ``returns.csv``
    """
    for run in runs:
        where = (run.env, run.arm, run.seed)
        for idx, (value, length) in enumerate(zip(run.final_returns, run.final_lengths, strict=True)):
            yield (*where, "last", idx, value, length)
        for idx, value in enumerate(run.best_returns or ()):
            yield (*where, "best", idx, value, None)


def _evaluation_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """
    :param runs: finished runs
    :return: the lines of ``evaluations.csv``
    """
    for run in runs:
        for steps, returns in zip(run.evaluations.timesteps, run.evaluations.returns, strict=True):
            for idx, value in enumerate(returns):
                yield (run.env, run.arm, run.seed, steps, idx, value)


def _value_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """
    :param runs: finished runs
    :return: the lines of ``value_estimates.csv``
    """
    for run in runs:
        for point in run.value_estimates or ():
            yield (
                *(run.env, run.arm, run.seed),
                *(point.timesteps, point.estimated, point.monte_carlo, point.n_states),
            )


def _statistic_rows(env_statistics: Sequence[EnvStatistics], overall: OverallStatistics | None) -> Iterator[Row]:
    """
    :param env_statistics: the figures of the envs
    :param overall: those of all envs together
    :return: the lines of ``statistics.csv``
    """
    for statistics in env_statistics:
        env = statistics.env
        for arm in statistics.arms:
            n_episodes = statistics.n_episodes(arm)
            yield (env, arm, None, "iqm", None, *_cells(statistics.iqm[arm]), n_episodes)
            yield (env, arm, None, "mean", None, *_cells(statistics.mean[arm]), n_episodes)
            for idx, other in enumerate(statistics.arms):
                if other == arm:
                    continue
                value = float(statistics.pairs[statistics.arms.index(arm), idx])
                estimate = statistics.improvement.get(arm) if other == statistics.base else None
                n_seeds = min(len(statistics.scores[arm]), len(statistics.scores[other]))
                cells = _cells(estimate) if estimate else (value, None, None, n_seeds)
                yield (env, arm, other, "probability_of_improvement", None, *cells, n_episodes)
            curves = {"learning_curve_iqm": statistics.learning.get(arm)}
            if arm in statistics.values:
                values = statistics.values[arm]
                curves |= {
                    "estimated_value": values.estimated,
                    "monte_carlo_value": values.monte_carlo,
                    "over_estimation": values.difference,
                }
            for name, curve in curves.items():
                for idx, steps in enumerate(() if curve is None else curve.timesteps):
                    assert curve is not None
                    yield (env, arm, None, name, int(steps), *_cells(curve.estimate[idx]), None)
    if overall is None:
        return
    for arm, estimate in overall.iqm.items():
        yield (ALL_ENVS, arm, None, "normalized_iqm", None, *_cells(estimate), overall.n_episodes[arm])
    for arm, estimate in overall.improvement.items():
        row = (ALL_ENVS, arm, overall.base, "probability_of_improvement", None)
        yield (*row, *_cells(estimate), overall.n_episodes[arm])


def _cells(estimate: Estimate) -> tuple[float, float, float, int]:
    """
    :param estimate: of one quantity
    :return: its value, bounds and number of seeds
    """
    return float(estimate.value[0]), float(estimate.low[0]), float(estimate.high[0]), estimate.n_seeds
