"""Statistics of a study, compared with rliable's functions and with numbers known by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rliable import metrics
from study_folders import make_record, value_estimates, write, write_study

from sb3_td3x.studies.results import Evaluations, read_results
from sb3_td3x.studies.statistics import (
    interquartile_mean,
    interval,
    mean,
    performance_profiles,
    probability_of_improvement,
    study_statistics,
    worst_episodes,
)

ENV = "Pendulum-v1"


def statistics_of(folder: Path, scores: Any, seeds: list[int], references: Any = None, **changes: Any) -> pd.DataFrame:
    return study_statistics(read_results(write_study(folder, scores, seeds, **changes)), references or {})


def rows(statistics: pd.DataFrame, name: str, env: str = ENV) -> dict[str, tuple[float, float, float]]:
    """Return value and interval of a statistic by arm."""
    chosen = statistics[(statistics["statistic"] == name) & (statistics["env"] == env)]
    return {row.arm: (row.value, row.low, row.high) for row in chosen.itertuples()}


@pytest.mark.parametrize("n_seeds", range(1, 10))
def test_interquartile_mean_is_rliables(n_seeds: int) -> None:
    scores = np.random.default_rng(n_seeds).normal(size=(n_seeds, 3))
    assert interquartile_mean(scores.T) == pytest.approx(metrics.aggregate_iqm(scores))


def test_probability_of_improvement_is_rliables() -> None:
    rng = np.random.default_rng(0)
    scores, others = rng.integers(0, 4, (5, 2)).astype(float), rng.integers(0, 4, (3, 2)).astype(float)
    expected = metrics.probability_of_improvement(scores, others)
    assert probability_of_improvement(scores.T, others.T) == pytest.approx(expected)
    assert probability_of_improvement(scores.T, scores.T) == 0.5


def test_interval_of_a_normal_mean() -> None:
    scores = np.random.default_rng(0).normal(size=400)
    low, high = interval(np.mean, scores)
    half_width = 1.96 * scores.std() / 20
    assert high - scores.mean() == pytest.approx(half_width, rel=0.15)
    assert scores.mean() - low == pytest.approx(half_width, rel=0.15)


def test_intervals_are_reproducible_and_leave_the_global_generator_alone() -> None:
    np.random.seed(5)  # noqa: NPY002
    scores = np.random.default_rng(1).normal(size=(2, 6))
    np.testing.assert_array_equal(interval(mean, scores), interval(mean, scores))
    drawn = np.random.random()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    assert drawn == np.random.random()  # noqa: NPY002


@pytest.mark.parametrize("n_seeds", [1, 2])
def test_fewer_than_three_seeds_have_no_interval(n_seeds: int) -> None:
    low, high = interval(np.mean, np.zeros((4, n_seeds)))
    assert low.shape == high.shape == (4,)
    assert np.isnan(low).all()
    assert np.isnan(high).all()


def test_scores(tmp_path: Path) -> None:
    full = {1: [0.0, 0.0], 2: [5.0, 15.0], 3: [20.0], 4: [900.0, 1100.0]}
    scores = {ENV: {"full": full, "other": {1: [30.0], 2: [0.0], 3: [30.0]}, "two": {1: [1.0], 2: [2.0]}}}
    statistics = statistics_of(tmp_path / "study", scores, [1, 2, 3, 4], reward_threshold=15.0)
    assert rows(statistics, "mean")["full"][0] == 257.5
    # The mean of the middle two, seeds 2 and 3; fewer seeds have no quarters
    value, low, high = rows(statistics, "iqm")["full"]
    assert value == 15.0
    assert 0.0 <= low < 15.0 < high <= 1000.0
    assert list(rows(statistics, "iqm")) == ["full"]
    # 30 beats three of four, 0 none and draws with one; two seeds are too few
    improvement = rows(statistics, "probability_of_improvement")
    assert list(improvement) == list(rows(statistics, "difference")) == ["other"]
    assert improvement["other"][0] == pytest.approx((3 + 3 + 0.5) / 12)
    assert rows(statistics, "difference")["other"][0] == 20.0 - 257.5
    assert np.isnan(rows(statistics, "mean")["two"][1])
    # Of all seven episodes
    assert rows(statistics, "solved")["full"][0] == 4 / 7
    assert rows(statistics, "worst_5_percent")["full"][0] == 0.0
    assert rows(statistics, "best_agents")["full"][0] == 258.5


def test_envs_without_a_bar_and_agents_without_training(tmp_path: Path) -> None:
    statistics = statistics_of(
        tmp_path / "study", {ENV: {"full": {1: [1.0]}}}, [1], reward_threshold=None, best_returns=None
    )
    assert rows(statistics, "solved") == {}
    assert rows(statistics, "best_agents") == {}


def test_curves_have_the_points_of_all_seeds(tmp_path: Path) -> None:
    scores = {ENV: {"full": {1: [0.0], 2: [10.0], 3: [20.0]}, "other": {1: [30.0], 2: [0.0]}}}
    study = write_study(tmp_path / "study", scores, [1, 2, 3])
    shifted = Evaluations(timesteps=[5_000, 20_000], returns=[[1.0], [2.0]])
    diverged = value_estimates((10_000, float("inf"), 2.0), (20_000, 3.0, 2.0))
    write(study, make_record("other", ENV, 2, [0.0], evaluations=shifted, value_estimates=diverged))
    statistics = study_statistics(read_results(study), {})
    learning = statistics[statistics["statistic"] == "learning_curve"]
    assert learning[["arm", "timesteps", "value"]].to_numpy().tolist() == [
        ["full", 10_000, 0.0],
        ["full", 20_000, 10.0],
        ["other", 20_000, 16.0],
    ]
    over = statistics[statistics["statistic"] == "over_estimation"]
    # Estimated -20 + seed against -25
    assert over[["arm", "timesteps", "value"]].to_numpy().tolist() == [
        ["full", 10_000, 10.0],
        ["full", 20_000, 7.0],
        ["other", 20_000, 3.5],
    ]


def test_statistics_without_the_base(tmp_path: Path) -> None:
    scores = {ENV: {"full": {}, "other": {1: [3.0], 2: [4.0], 3: [5.0]}}}
    statistics = statistics_of(tmp_path / "study", scores, [1, 2, 3])
    assert rows(statistics, "difference") == rows(statistics, "probability_of_improvement") == {}
    assert rows(statistics, "mean")["other"][0] == 4.0


def test_statistics_over_all_envs(tmp_path: Path) -> None:
    scores = {
        "A-v0": {"full": {1: [0.0], 2: [10.0], 3: [5.0], 4: [99.0]}, "other": {1: [10.0]}, "half": {1: [1.0]}},
        "B-v0": {"full": {1: [-100.0], 2: [-50.0], 3: [-50.0]}, "other": {1: [0.0], 2: [0.0]}, "half": {2: [1.0]}},
    }
    known = {
        "A-v0": {"scores": {"random": 0.0, "zoo": 10.0}},
        "B-v0": {"scores": {"random": -100.0, "zoo": 0.0}},
    }
    statistics = statistics_of(tmp_path / "study", scores, [1, 2, 3, 4], known)
    # Seeds 1 to 3 have finished in both envs: normalized 0, 1, 0.5 and 0, 0.5, 0.5
    normalized = rows(statistics, "normalized_mean", "all")
    assert normalized["full"][0] == pytest.approx(2.5 / 6)
    assert rows(statistics, "normalized_iqm", "all")["full"][0] == pytest.approx(1.5 / 4)
    assert normalized["other"][0] == 1.0
    assert np.isnan(normalized["other"][1])
    assert "half" not in normalized
    # One seed is too few to compare
    assert rows(statistics, "probability_of_improvement", "all") == {}
    without = statistics_of(tmp_path / "unknown", scores, [1, 2, 3], {"A-v0": known["A-v0"]})
    assert rows(without, "normalized_mean", "all") == {}


def test_improvement_over_all_envs_is_the_mean_over_the_envs(tmp_path: Path) -> None:
    better = {"full": {1: [1.0], 2: [2.0], 3: [3.0]}, "other": {1: [4.0], 2: [5.0], 3: [6.0]}}
    worse = {"full": better["other"], "other": better["full"]}
    statistics = statistics_of(tmp_path / "study", {"A-v0": better, "B-v0": better, "C-v0": worse}, [1, 2, 3])
    assert rows(statistics, "probability_of_improvement", "all")["other"][0] == pytest.approx(2 / 3)


def test_performance_profiles() -> None:
    scores = {"a": np.array([[0.0, 5.0], [10.0, 20.0]]), "b": np.array([[0.0, 1.0, 2.0]])}
    thresholds, shares, intervals = performance_profiles(scores)
    assert thresholds[0] < 0 < 20 < thresholds[-1]
    assert (shares["a"][0], shares["a"][-1]) == (1.0, 0.0)
    assert shares["a"][np.searchsorted(thresholds, 7.0)] == 0.5
    assert {arm: bounds.shape for arm, bounds in intervals.items()} == {"b": (2, len(thresholds))}


def test_worst_episodes() -> None:
    assert worst_episodes(np.arange(100.0)[::-1]) == 2.0
    assert worst_episodes(np.array([3.0, 1.0])) == 1.0
