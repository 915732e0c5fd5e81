"""The figures of a study: what its report shows in pictures and tables."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from sb3_td3x.studies.bootstrap import (
    Estimate,
    column_means,
    estimate,
    estimate_improvement,
    exceedance,
    interquartile_mean,
    probability_of_improvement,
)
from sb3_td3x.studies.records import RunRecord, ValueEstimate
from sb3_td3x.studies.reference import Reference
from sb3_td3x.studies.results import Results

_T = TypeVar("_T")

# Points of a performance profile
N_THRESHOLDS = 200


@dataclass(frozen=True, eq=False)
class Curve:
    """
    A quantity over the training.

    :param timesteps: env steps, those that all seeds of the arm have, of shape (n_points,)
    :param runs: of each seed, of shape (n_seeds, n_points)
    :param estimate: over the seeds, of n_points quantities
    """

    timesteps: np.ndarray
    runs: np.ndarray
    estimate: Estimate


@dataclass(frozen=True, eq=False)
class ValueCurves:
    """
    What the critics say of the start states and what the policies get from there.

    :param estimated: mean of Q1 over the start states
    :param monte_carlo: mean discounted return from them
    :param difference: the one minus the other: how much the critics over-estimate
    :param n_states: fewest start states of a point
    """

    estimated: Curve
    monte_carlo: Curve
    difference: Curve
    n_states: int


@dataclass(frozen=True, eq=False)
class Profile:
    """
    Performance profiles.

    :param thresholds: scores, of shape (n_thresholds,)
    :param estimates: for each arm the fraction of runs above each of them
    """

    thresholds: np.ndarray
    estimates: dict[str, Estimate]

    def of(self, arms: Collection[str]) -> "Profile":
        """
        :param arms: names of arms
        :return: their profiles
        """
        return replace(self, estimates=_of(self.estimates, arms))


@dataclass(frozen=True, eq=False)
class EnvStatistics:
    """
    The figures of an env. Dictionaries have the arms that have finished runs, in the study's order.

    :param env: id of the env
    :param base: the arm that others are compared with; None: it has no finished run here
    :param runs: the finished runs of each arm
    :param scores: of each run the mean of its last agent's returns, of shape (n_seeds,)
    :param best_scores: the same of its best agent; runs without one are left out
    :param iqm: interquartile mean of the scores over the seeds
    :param mean: their mean
    :param profile: performance profiles of the scores
    :param improvement: probability that an arm improves on the base; empty without one
    :param pairs: the same for the arm of a row over that of a column, of shape (n_arms, n_arms)
    :param learning: evaluations while training, interquartile mean over the seeds
    :param values: over-estimation, means over the seeds, of arms with a Q critic
    """

    env: str
    base: str | None
    runs: dict[str, list[RunRecord]]
    scores: dict[str, np.ndarray]
    best_scores: dict[str, np.ndarray]
    iqm: dict[str, Estimate]
    mean: dict[str, Estimate]
    profile: Profile
    improvement: dict[str, Estimate]
    pairs: np.ndarray
    learning: dict[str, Curve]
    values: dict[str, ValueCurves]

    @property
    def arms(self) -> list[str]:
        """Arms with finished runs"""
        return list(self.runs)

    def of(self, arms: Collection[str]) -> "EnvStatistics":
        """
        :param arms: names of arms
        :return: the figures of those of them that have finished runs
        """
        names = ("runs", "scores", "best_scores", "iqm", "mean", "improvement", "learning", "values")
        parts: dict[str, Any] = {name: _of(getattr(self, name), arms) for name in names}
        kept = [idx for idx, arm in enumerate(self.arms) if arm in arms]
        return replace(
            self,
            base=self.base if self.base in arms else None,
            profile=self.profile.of(arms),
            pairs=self.pairs[np.ix_(kept, kept)],
            **parts,
        )

    def n_episodes(self, arm: str) -> int:
        """
        :param arm: name of an arm
        :return: how many final episodes all its runs have
        """
        return sum(len(run.final_returns) for run in self.runs[arm])


@dataclass(frozen=True, eq=False)
class OverallStatistics:
    """
    The figures of all envs together, over the seeds that an arm has finished in all of them.

    :param envs: the envs
    :param base: the arm that others are compared with; None: it has no such seed
    :param n_seeds: for each arm the number of such seeds, not 0
    :param n_episodes: for each arm the final episodes of those runs
    :param left_out: arms that have none
    :param improvement: probability that an arm improves on the base, mean over the envs
    :param unknown: envs without published scores; if there are any, no scores are normalized
    :param iqm: interquartile mean of the normalized scores over seeds and envs
    :param profile: performance profiles of the normalized scores; None: there are none
    """

    envs: list[str]
    base: str | None
    n_seeds: dict[str, int]
    n_episodes: dict[str, int]
    left_out: list[str]
    improvement: dict[str, Estimate]
    unknown: list[str]
    iqm: dict[str, Estimate]
    profile: Profile | None


def env_statistics(results: Results, env: str) -> EnvStatistics:
    """
    :param results: a study
    :param env: one of its envs with finished runs
    :return: its figures
    """
    runs = results.records[env]
    scores = {arm: np.array([np.mean(run.final_returns) for run in records]) for arm, records in runs.items()}
    best_scores = {
        arm: np.array([np.mean(run.best_returns) for run in records if run.best_returns])
        for arm, records in runs.items()
    }
    columns = {arm: values[:, None] for arm, values in scores.items()}
    base = results.base if results.base in runs else None
    evaluations = {arm: _evaluations(records) for arm, records in runs.items()}
    return EnvStatistics(
        env=env,
        base=base,
        runs=runs,
        scores=scores,
        best_scores=best_scores,
        iqm=estimate(columns, interquartile_mean),
        mean=estimate(columns, column_means),
        profile=_profile(columns),
        improvement={} if base is None else estimate_improvement(columns, base),
        pairs=np.array([[probability_of_improvement(x, y) for y in columns.values()] for x in columns.values()]),
        learning=_curves(evaluations, interquartile_mean),
        values=_value_curves(runs),
    )


def overall_statistics(results: Results, references: Mapping[str, Reference]) -> OverallStatistics:
    """
    :param results: a study
    :param references: what is published of envs
    :return: the figures of all its envs together
    """
    envs = results.envs
    scores, n_episodes = {}, {}
    for arm in results.arms:
        by_env = [{run.seed: run for run in results.records[env].get(arm, [])} for env in envs]
        seeds = sorted(set.intersection(*(set(runs) for runs in by_env)))
        if seeds:
            matrix = [[np.mean(runs[seed].final_returns) for runs in by_env] for seed in seeds]
            scores[arm] = np.array(matrix)
            n_episodes[arm] = sum(len(runs[seed].final_returns) for seed in seeds for runs in by_env)
    base = results.base if results.base in scores else None
    unknown = [env for env in envs if env not in references]
    iqm: dict[str, Estimate] = {}
    profile = None
    if scores and not unknown:
        random = np.array([references[env].random_score for env in envs])
        zoo = np.array([references[env].zoo_score for env in envs])
        normalized = {arm: (matrix - random) / (zoo - random) for arm, matrix in scores.items()}
        iqm = estimate(normalized, lambda matrix: interquartile_mean(matrix.reshape(-1, 1)))
        profile = _profile(normalized)
    return OverallStatistics(
        envs=envs,
        base=base,
        n_seeds={arm: len(matrix) for arm, matrix in scores.items()},
        n_episodes=n_episodes,
        left_out=[arm for arm in results.arms if arm not in scores],
        improvement={} if base is None else estimate_improvement(scores, base),
        unknown=unknown,
        iqm=iqm,
        profile=profile,
    )


def most_successful(by_env: Sequence[EnvStatistics], base: str, number: int) -> list[str]:
    """
    :param by_env: the figures of a study's envs
    :param base: the arm that others are compared with
    :param number: how many arms
    :return: the base, and those of the others with the best mean rank over the envs where they have runs
    """
    ranks: dict[str, list[int]] = {}
    for statistics in by_env:
        ordered = sorted(statistics.arms, key=lambda arm: -float(statistics.iqm[arm].value[0]))
        for rank, arm in enumerate(ordered):
            ranks.setdefault(arm, []).append(rank)
    others = sorted((arm for arm in ranks if arm != base), key=lambda arm: float(np.mean(ranks[arm])))
    return [base, *others[: number - 1]]


def _of(by_arm: Mapping[str, _T], arms: Collection[str]) -> dict[str, _T]:
    """
    :param by_arm: something of each arm
    :param arms: names of arms
    :return: that of these alone
    """
    return {arm: value for arm, value in by_arm.items() if arm in arms}


def _profile(scores: Mapping[str, np.ndarray]) -> Profile:
    """
    :param scores: for each arm scores of shape (n_seeds, n_envs)
    :return: their performance profiles
    """
    everything = np.concatenate([values.ravel() for values in scores.values()])
    # A margin, so that all profiles are seen to begin at 1 and end at 0
    margin = 0.03 * (np.ptp(everything) or 1.0)
    thresholds = np.linspace(everything.min() - margin, everything.max() + margin, N_THRESHOLDS)
    return Profile(thresholds, estimate(scores, exceedance(thresholds)))


_Points = dict[int, float]


def _evaluations(records: Sequence[RunRecord]) -> list[_Points]:
    """
    :param records: runs
    :return: for each of them the mean return of each evaluation, by timesteps
    """
    return [
        {
            steps: float(np.mean(returns))
            for steps, returns in zip(run.evaluations.timesteps, run.evaluations.returns, strict=True)
        }
        for run in records
    ]


def _curves(points: Mapping[str, list[_Points]], statistic: Callable[[np.ndarray], np.ndarray]) -> dict[str, Curve]:
    """
    :param points: for each arm and seed, values by timesteps
    :param statistic: over the seeds
    :return: their curves; arms whose seeds have no timesteps in common are left out
    """
    timesteps = {arm: sorted(set.intersection(*map(set, runs))) for arm, runs in points.items() if runs}
    runs = {
        arm: np.array([[run[step] for step in steps] for run in points[arm]])
        for arm, steps in timesteps.items()
        if steps
    }
    estimates = estimate(runs, statistic)
    return {arm: Curve(np.array(timesteps[arm]), runs[arm], estimates[arm]) for arm in runs}


def is_finite(point: ValueEstimate) -> bool:
    """
    :param point: values at one point of a training
    :return: whether they are numbers; a critic that diverges may come to infinity while its policy still acts
    """
    return bool(np.isfinite([point.estimated, point.monte_carlo]).all())


def _value_curves(runs: Mapping[str, Sequence[RunRecord]]) -> dict[str, ValueCurves]:
    """
    :param runs: the finished runs of each arm
    :return: the over-estimation of those that have a critic in all runs, at the points with finite values in all runs
    """
    estimates = {
        arm: [[point for point in run.value_estimates if is_finite(point)] for run in records if run.value_estimates]
        for arm, records in runs.items()
    }
    kinds: dict[str, dict[str, list[_Points]]] = {"estimated": {}, "monte_carlo": {}, "difference": {}}
    for arm, records in estimates.items():
        if not records:
            continue
        kinds["estimated"][arm] = [{point.timesteps: point.estimated for point in run} for run in records]
        kinds["monte_carlo"][arm] = [{point.timesteps: point.monte_carlo for point in run} for run in records]
        kinds["difference"][arm] = [
            {point.timesteps: point.estimated - point.monte_carlo for point in run} for run in records
        ]
    curves = {kind: _curves(points, column_means) for kind, points in kinds.items()}
    return {
        arm: ValueCurves(
            **{kind: curves[kind][arm] for kind in kinds},
            n_states=min(point.n_states for run in estimates[arm] for point in run),
        )
        for arm in curves["difference"]
    }
