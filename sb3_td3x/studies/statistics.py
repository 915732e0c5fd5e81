"""
Statistics of a study. The sample is always the seeds: the score of a run is the mean return of its last agent, and each
estimate is taken over the scores of the seeds, never over seeds and episodes together.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from scipy.stats import bootstrap, trim_mean  # type: ignore[import-untyped]

from sb3_td3x.studies.reference import Reference
from sb3_td3x.studies.results import Results

CONFIDENCE = 0.95
N_BOOTSTRAP = 2000
# Resampling two seeds gives three values only, which is no interval
MIN_SEEDS = 3
# With fewer seeds nothing is cut off, and the interquartile mean is the mean
MIN_SEEDS_IQM = 4
WORST_SHARE = 0.05
# Name of the env in statistics over all envs
ALL_ENVS = "all"

COLUMNS = ("env", "arm", "against", "statistic", "timesteps", "value", "low", "high", "n_seeds")

# From samples to an estimate, along an axis
Statistic = Callable[..., np.ndarray]
mean: Statistic = np.mean
interquartile_mean: Statistic = partial(trim_mean, proportiontocut=0.25)


def difference_of_means(scores: np.ndarray, others: np.ndarray, axis: int = 0) -> np.ndarray:
    """
    Return how much higher the mean of the first sample is.

    :param others: scores of another arm
    """
    return mean(scores, axis=axis) - mean(others, axis=axis)


def probability_of_improvement(scores: np.ndarray, others: np.ndarray, axis: int = 0) -> np.ndarray:
    """
    Return the probability that a random seed of one arm scores more than one of another (Mann-Whitney), ties half.
    """
    x, y = np.moveaxis(scores, axis, -1)[..., :, None], np.moveaxis(others, axis, -1)[..., None, :]
    probability: np.ndarray = (np.greater(x, y) + 0.5 * np.equal(x, y)).mean(axis=(-2, -1))
    return probability


def over_envs(statistic: Statistic) -> Statistic:
    """
    Extend a statistic to scores of several envs.

    :param statistic: statistic of samples along an axis
    :return: the statistic of scores of shape (n_seeds, n_envs): of all seeds and envs together for one sample, mean
        over the envs for two
    """

    def over_all(*samples: np.ndarray, axis: int = 0) -> np.ndarray:
        samples = tuple(np.moveaxis(sample, axis, -1) for sample in samples)
        if len(samples) > 1:
            return mean(statistic(*samples, axis=-1), axis=0)
        return statistic(np.concatenate(list(samples[0]), axis=-1), axis=-1)

    return over_all


def worst_episodes(returns: np.ndarray) -> float:
    """
    Return the mean of the worst 5% of episodes.

    :param returns: returns of episodes, of shape (n,)
    :return: mean return of the worst ``max(1, 0.05 n)`` of them
    """
    n_worst = max(round(WORST_SHARE * len(returns)), 1)
    return float(np.sort(returns)[:n_worst].mean())


def interval(statistic: Statistic, *samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the 95% percentile bootstrap interval of a statistic.

    :param statistic: what to estimate, along ``axis``
    :param samples: samples along the first axis, resampled independently of each other
    :return: lower and upper bound; NaN where a sample has fewer than ``MIN_SEEDS``
    """
    if min(map(len, samples)) < MIN_SEEDS:
        nothing = np.full(np.shape(statistic(*samples, axis=0)), np.nan)
        return nothing, nothing
    result = bootstrap(
        samples,
        statistic,
        axis=0,
        vectorized=True,
        n_resamples=N_BOOTSTRAP,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=0,
    )
    return result.confidence_interval.low, result.confidence_interval.high


def study_statistics(results: Results, references: Mapping[str, Reference]) -> pd.DataFrame:
    """
    Return all statistics of a study, one per row.

    :param references: published scores by env, to normalize scores of several envs
    :return: table with ``COLUMNS``; ``low`` and ``high`` are NaN where there is no interval
    """
    rows: list[dict[str, Any]] = []
    for env, runs in results.runs.groupby("env", sort=False):
        scores = {arm: group["score"].to_numpy() for arm, group in runs.groupby("arm", sort=False)}
        rows += [{"env": env, **row} for row in _score_rows(scores, results.base)]
        rows += [{"env": env, **row} for row in _episode_rows(results, str(env))]
        rows += [{"env": env, **row} for row in _curve_rows(results, str(env))]
    if results.runs["env"].nunique() > 1:
        rows += [{"env": ALL_ENVS, **row} for row in _overall_rows(results, references)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(name: str, arm: str, statistic: Statistic, *samples: np.ndarray, against: str | None = None) -> dict[str, Any]:
    low, high = interval(statistic, *samples)
    value = statistic(*samples, axis=0)
    return {
        **{"arm": arm, "against": against, "statistic": name},
        **{"value": float(value), "low": float(low), "high": float(high), "n_seeds": min(map(len, samples))},
    }


def _comparison_rows(
    scores: Mapping[str, np.ndarray], base: str, wrap: Callable[[Statistic], Statistic]
) -> Iterator[dict[str, Any]]:
    """Yield how the arms differ from the base, where there are enough seeds."""
    for arm, sample in scores.items():
        if arm != base and base in scores and min(len(sample), len(scores[base])) >= MIN_SEEDS:
            for name, statistic in (
                ("difference", difference_of_means),
                ("probability_of_improvement", probability_of_improvement),
            ):
                yield _row(name, arm, wrap(statistic), sample, scores[base], against=base)


def _score_rows(scores: Mapping[str, np.ndarray], base: str) -> Iterator[dict[str, Any]]:
    for arm, sample in scores.items():
        yield _row("mean", arm, mean, sample)
        if len(sample) >= MIN_SEEDS_IQM:
            yield _row("iqm", arm, interquartile_mean, sample)
    yield from _comparison_rows(scores, base, lambda statistic: statistic)


def _episode_rows(results: Results, env: str) -> Iterator[dict[str, Any]]:
    """Yield statistics of the episodes of the final test, and of the best agents."""
    runs = results.runs[results.runs["env"] == env]
    returns = results.returns[(results.returns["env"] == env) & (results.returns["agent"] == "last")]
    for arm, episodes in returns.groupby("arm", sort=False):
        own = runs[runs["arm"] == arm]
        row = {"arm": arm, "n_seeds": len(own)}
        yield {**row, "statistic": "worst_5_percent", "value": worst_episodes(episodes["return"].to_numpy())}
        # Bars of the env, recorded by its runs
        if (bars := own["reward_threshold"].dropna()).size:
            solved = (episodes["return"] >= float(bars.iloc[0])).mean()
            yield {**row, "statistic": "solved", "value": float(solved)}
        best = own["best_agent_score"].dropna().to_numpy(float)
        if len(best):
            yield _row("best_agents", str(arm), mean, best)


def _curve_rows(results: Results, env: str) -> Iterator[dict[str, Any]]:
    evaluations = results.evaluations[results.evaluations["env"] == env]
    yield from _curves("learning_curve", evaluations, "return")
    values = results.value_estimates[results.value_estimates["env"] == env]
    # A critic may diverge to infinity while its policy still acts
    values = values[np.isfinite(values[["estimated", "monte_carlo"]].astype(float)).all(axis=1)]
    values = values.assign(over_estimation=values["estimated"] - values["monte_carlo"])
    for name, column in (
        ("estimated_value", "estimated"),
        ("monte_carlo_value", "monte_carlo"),
        ("over_estimation", "over_estimation"),
    ):
        yield from _curves(name, values, column)


def _curves(name: str, points: pd.DataFrame, column: str) -> Iterator[dict[str, Any]]:
    """Yield the means over the seeds at the timesteps that all seeds of an arm have."""
    for arm, group in points.groupby("arm", sort=False):
        by_seed = group.pivot_table(index="seed", columns="timesteps", values=column).dropna(axis="columns")
        sample = by_seed.to_numpy(float)
        if not sample.size:
            continue
        for timesteps, value, low, high in zip(
            by_seed.columns, mean(sample, axis=0), *interval(mean, sample), strict=True
        ):
            yield {
                **{"arm": arm, "statistic": name, "timesteps": int(timesteps)},
                **{"value": value, "low": low, "high": high, "n_seeds": len(sample)},
            }


def common_scores(results: Results) -> dict[str, np.ndarray]:
    """
    Return the scores of the seeds that an arm has finished in all envs.

    :return: for each arm scores of shape (n_seeds, n_envs), envs in the study's order; arms without such a seed are
        left out
    """
    envs = list(results.runs["env"].unique())
    table = results.runs.pivot(index=["arm", "seed"], columns="env", values="score").reindex(columns=envs).dropna()
    arms = set(table.index.get_level_values("arm"))
    return {arm: table.loc[arm].to_numpy() for arm in results.arms if arm in arms}


def normalized_scores(results: Results, references: Mapping[str, Reference]) -> dict[str, np.ndarray]:
    """
    Return the scores of all envs on one scale: 0 is random actions, 1 the best agent of RL Zoo's benchmark.

    :return: as ``common_scores``, normalized; empty where an env has no published scores
    """
    envs = results.runs["env"].unique()
    if any(env not in references for env in envs):
        return {}
    random = np.array([references[env].random_score for env in envs])
    best = np.array([references[env].zoo_score for env in envs])
    return {arm: (scores - random) / (best - random) for arm, scores in common_scores(results).items()}


def _overall_rows(results: Results, references: Mapping[str, Reference]) -> Iterator[dict[str, Any]]:
    for arm, scores in normalized_scores(results, references).items():
        yield _row("normalized_mean", arm, over_envs(mean), scores)
        yield _row("normalized_iqm", arm, over_envs(interquartile_mean), scores)
    for row in _comparison_rows(common_scores(results), results.base, over_envs):
        # Returns of different envs have no common unit
        if row["statistic"] == "probability_of_improvement":
            yield row


def performance_profiles(
    scores: Mapping[str, np.ndarray], n_thresholds: int = 200
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """
    Return the share of runs that score more than a threshold, for many thresholds.

    :param scores: for each arm scores of shape (n_seeds, n_envs)
    :param n_thresholds: number of thresholds, a little beyond the lowest and the highest score
    :return: thresholds; for each arm the shares, of shape (n_thresholds,); for each arm with enough seeds their
        intervals, of shape (2, n_thresholds)
    """
    everything = np.concatenate([sample.ravel() for sample in scores.values()])
    margin = 0.03 * (np.ptp(everything) or 1.0)
    thresholds = np.linspace(everything.min() - margin, everything.max() + margin, n_thresholds)
    above = {arm: (sample[..., None] > thresholds).mean(axis=1) for arm, sample in scores.items()}
    shares = {arm: mean(sample, axis=0) for arm, sample in above.items()}
    intervals = {arm: np.stack(interval(mean, sample)) for arm, sample in above.items() if len(sample) >= MIN_SEEDS}
    return thresholds, shares, intervals


def most_successful(statistics: pd.DataFrame, base: str, number: int) -> list[str]:
    """
    Return the base and the arms with the best mean rank over the envs.

    :param statistics: from ``study_statistics``
    """
    scores = statistics[(statistics["statistic"] == "mean") & (statistics["env"] != ALL_ENVS)]
    ranks = scores.assign(rank=scores.groupby("env")["value"].rank(ascending=False)).groupby("arm")["rank"].mean()
    return [base, *ranks.drop(base, errors="ignore").sort_values(kind="stable").index[: number - 1]]


def describe_episodes(returns: Sequence[float], bar: float | None) -> dict[str, Any]:
    """
    Return the statistics of one agent's episodes, where the sample is the episodes.

    :param bar: return at which an episode counts as solved; None: the env declares none
    :return: ``mean`` with its 95% interval, ``std``, ``iqm`` over the episodes, share ``solved``, and
        ``worst_5_percent``
    """
    sample = np.array(returns)
    low, high = interval(mean, sample)
    return {
        "mean": float(sample.mean()),
        "mean_95": [float(low), float(high)],
        "std": float(sample.std()),
        "iqm": float(interquartile_mean(sample, axis=0)),
        "solved": None if bar is None else float((sample >= bar).mean()),
        "worst_5_percent": worst_episodes(sample),
    }
