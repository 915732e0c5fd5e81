"""
Statistics of a study. The sample is always the seeds: the score of a run is the mean return of its last agent, and each
estimate is taken over the scores of the seeds, never over seeds and episodes together.

Scores have the shape (n_envs, ..., n_seeds), with one env or all of them, and resamples of the bootstrap between.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from scipy.stats import bootstrap, trim_mean  # type: ignore[import-untyped]

from sb3_td3x.studies.results import Results

CONFIDENCE = 0.95
N_BOOTSTRAP = 2000
# Resampling two seeds gives three values only, which is no interval
MIN_SEEDS = 3
# With fewer seeds nothing is cut off, and the interquartile mean is the mean
MIN_SEEDS_IQM = 4
WORST_SHARE = 0.05
N_THRESHOLDS = 200
# Name of the env in statistics over all envs
ALL_ENVS = "all"

COLUMNS = ("env", "arm", "against", "statistic", "timesteps", "value", "low", "high", "n_seeds")

# From samples to an estimate, along the axis of the seeds
Statistic = Callable[..., Any]
Scores = Mapping[str, np.ndarray]


def mean(scores: np.ndarray, axis: int = -1) -> Any:
    """Return the mean over all envs and seeds."""
    return np.mean(scores, axis=(0, axis))


def interquartile_mean(scores: np.ndarray, axis: int = -1) -> Any:
    """Return the mean over all envs and seeds without the lowest and the highest quarter."""
    return trim_mean(np.concatenate(list(scores), axis=axis), 0.25, axis=axis)


def difference(scores: np.ndarray, others: np.ndarray, axis: int = -1) -> Any:
    """Return how much higher the mean of the first sample is."""
    return mean(scores, axis) - mean(others, axis)


def probability_of_improvement(scores: np.ndarray, others: np.ndarray, axis: int = -1) -> Any:
    """
    Return the probability that a random seed of one arm scores more than one of another, mean over the envs.

    This is the statistic of Mann-Whitney; ties count half.
    """
    x, y = scores[..., :, None], others[..., None, :]
    return (np.greater(x, y) + 0.5 * np.equal(x, y)).mean(axis=(0, -2, -1))


def worst_episodes(returns: np.ndarray) -> float:
    """Return the mean return of the worst 5% of episodes, at least of one."""
    n_worst = max(round(WORST_SHARE * len(returns)), 1)
    return float(np.sort(returns)[:n_worst].mean())


def interval(statistic: Statistic, *samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the 95% percentile bootstrap interval of a statistic.

    :param samples: samples along the last axis, resampled independently of each other
    :return: lower and upper bound; NaN where a sample has fewer than ``MIN_SEEDS``
    """
    if min(sample.shape[-1] for sample in samples) < MIN_SEEDS:
        nothing = np.full(np.shape(statistic(*samples, axis=-1)), np.nan)
        return nothing, nothing
    result = bootstrap(
        samples,
        statistic,
        axis=-1,
        vectorized=True,
        n_resamples=N_BOOTSTRAP,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=0,
    )
    return result.confidence_interval.low, result.confidence_interval.high


def study_statistics(results: Results, references: Mapping[str, Any]) -> pd.DataFrame:
    """
    Return all statistics of a study, one per row.

    :param references: published scores by env, to normalize scores of several envs
    :return: table with ``COLUMNS``; ``low`` and ``high`` are NaN where there is no interval
    """
    rows: list[dict[str, Any]] = []
    base = results.base
    for env, runs in results.runs.groupby("env", sort=False):
        scores = {arm: group["score"].to_numpy()[None] for arm, group in runs.groupby("arm", sort=False)}
        of_env = [*_score_rows(scores), *_comparison_rows(scores, base, difference)]
        of_env += [*_comparison_rows(scores, base, probability_of_improvement), *_episode_rows(results, str(env))]
        rows += [{"env": env, **row} for row in (*of_env, *_curve_rows(results, str(env)))]
    if results.runs["env"].nunique() > 1:
        # Returns of different envs have no common unit, so their differences are left out
        overall = [*_score_rows(normalized_scores(results, references), "normalized_")]
        overall += _comparison_rows(common_scores(results), base, probability_of_improvement)
        rows += [{"env": ALL_ENVS, **row} for row in overall]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(name: str, arm: str, statistic: Statistic, *samples: np.ndarray) -> dict[str, Any]:
    low, high = interval(statistic, *samples)
    value = float(statistic(*samples, axis=-1))
    n_seeds = min(sample.shape[-1] for sample in samples)
    return {"arm": arm, "statistic": name, "value": value, "low": float(low), "high": float(high), "n_seeds": n_seeds}


def _score_rows(scores: Scores, prefix: str = "") -> Iterator[dict[str, Any]]:
    for arm, sample in scores.items():
        yield _row(f"{prefix}mean", arm, mean, sample)
        if sample.shape[-1] >= MIN_SEEDS_IQM or prefix:
            yield _row(f"{prefix}iqm", arm, interquartile_mean, sample)


def _comparison_rows(scores: Scores, base: str, statistic: Statistic) -> Iterator[dict[str, Any]]:
    """Yield how the arms differ from the base, where there are enough seeds."""
    for arm, sample in scores.items():
        if arm != base and base in scores and min(sample.shape[-1], scores[base].shape[-1]) >= MIN_SEEDS:
            yield {**_row(statistic.__name__, arm, statistic, sample, scores[base]), "against": base}


def _episode_rows(results: Results, env: str) -> Iterator[dict[str, Any]]:
    """Yield statistics of the episodes of the final test, and of the best agents."""
    for arm, runs in results.runs[results.runs["env"] == env].groupby("arm", sort=False):
        returns = np.concatenate([it.final_returns for it in results.records if (it.env, it.arm) == (env, arm)])
        row = {"arm": arm, "n_seeds": len(runs)}
        yield {**row, "statistic": "worst_5_percent", "value": worst_episodes(returns)}
        if (bars := runs["reward_threshold"].dropna()).size:
            yield {**row, "statistic": "solved", "value": float((returns >= float(bars.iloc[0])).mean())}
        if (best := runs["best_agent_score"].dropna()).size:
            yield _row("best_agents", str(arm), mean, best.to_numpy(float)[None])


def _curve_rows(results: Results, env: str) -> Iterator[dict[str, Any]]:
    evaluations = results.evaluations[results.evaluations["env"] == env]
    yield from _curves("learning_curve", evaluations, "return")
    values = results.value_estimates[results.value_estimates["env"] == env]
    # A critic may diverge to infinity while its policy still acts
    values = values[np.isfinite(values[["estimated", "monte_carlo"]].astype(float)).all(axis=1)]
    yield from _curves("estimated_value", values, "estimated")
    yield from _curves("monte_carlo_value", values, "monte_carlo")
    over_estimation = values.assign(over_estimation=values["estimated"] - values["monte_carlo"])
    yield from _curves("over_estimation", over_estimation, "over_estimation")


def _curves(name: str, points: pd.DataFrame, column: str) -> Iterator[dict[str, Any]]:
    """Yield the means over the seeds at the timesteps that all seeds of an arm have."""
    for arm, group in points.groupby("arm", sort=False):
        by_seed = group.pivot_table(index="timesteps", columns="seed", values=column).dropna()
        sample = by_seed.to_numpy(float)
        if sample.size:
            bounds = interval(np.mean, sample)
            for timesteps, value, low, high in zip(by_seed.index, sample.mean(axis=1), *bounds, strict=True):
                row = {"arm": arm, "statistic": name, "timesteps": int(timesteps), "n_seeds": sample.shape[1]}
                yield {**row, "value": value, "low": low, "high": high}


def common_scores(results: Results) -> dict[str, np.ndarray]:
    """
    Return for each arm the scores of the seeds that it has finished in all envs, if there are any.

    :return: of shape (n_envs, n_seeds), with the envs in the study's order
    """
    envs = list(results.runs["env"].unique())
    table = results.runs.pivot(index=["arm", "seed"], columns="env", values="score").reindex(columns=envs).dropna()
    arms = set(table.index.get_level_values("arm"))
    return {arm: table.loc[arm].to_numpy().T for arm in results.plan.arms if arm in arms}


def normalized_scores(results: Results, references: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """
    Return the scores of all envs on one scale: 0 is random actions, 1 the best agent of RL Zoo's benchmark.

    :return: as ``common_scores``, normalized; empty where an env has no published scores
    """
    envs = results.runs["env"].unique()
    if any(env not in references for env in envs):
        return {}
    random = np.array([[references[env]["scores"]["random"]] for env in envs])
    best = np.array([[references[env]["scores"]["zoo"]] for env in envs])
    return {arm: (scores - random) / (best - random) for arm, scores in common_scores(results).items()}


def performance_profiles(scores: Scores) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """
    Return the share of runs that score more than a threshold, for many thresholds.

    :param scores: for each arm scores of shape (n_envs, n_seeds)
    :return: thresholds, a little beyond the lowest and the highest score; for each arm the shares, of shape
        (n_thresholds,); for each arm with enough seeds their intervals, of shape (2, n_thresholds)
    """
    everything = np.concatenate([sample.ravel() for sample in scores.values()])
    margin = 0.03 * (np.ptp(everything) or 1.0)
    thresholds = np.linspace(everything.min() - margin, everything.max() + margin, N_THRESHOLDS)
    # Of shape (n_thresholds, n_seeds)
    above = {arm: (sample > thresholds[:, None, None]).mean(axis=1) for arm, sample in scores.items()}
    shares = {arm: sample.mean(axis=1) for arm, sample in above.items()}
    bounds = {arm: np.stack(interval(np.mean, it)) for arm, it in above.items() if it.shape[1] >= MIN_SEEDS}
    return thresholds, shares, bounds
