"""Estimates over seeds, beside rliable's own functions and numbers known by hand."""

import numpy as np
import pytest
from rliable import metrics

from sb3_td3x.studies import bootstrap
from sb3_td3x.studies.bootstrap import (
    column_means,
    estimate,
    estimate_improvement,
    exceedance,
    interquartile_mean,
    probability_of_improvement,
)


@pytest.mark.parametrize("n_seeds", range(1, 10))
def test_interquartile_mean_is_rliables(n_seeds: int):
    scores = np.random.default_rng(n_seeds).normal(size=(n_seeds, 3))
    expected = [metrics.aggregate_iqm(scores[:, idx]) for idx in range(3)]
    np.testing.assert_allclose(interquartile_mean(scores), expected)


def test_probability_of_improvement_is_rliables():
    rng = np.random.default_rng(0)
    scores, other = rng.integers(0, 4, (5, 2)).astype(float), rng.integers(0, 4, (3, 2)).astype(float)
    expected = metrics.probability_of_improvement(scores, other)
    assert probability_of_improvement(scores, other) == pytest.approx(expected)
    assert probability_of_improvement(scores, scores) == 0.5


def test_exceedance():
    scores = np.array([[0.0, 10.0], [5.0, 20.0]])
    np.testing.assert_array_equal(exceedance(np.array([-1.0, 0.0, 7.0, 20.0]))(scores), [1.0, 0.75, 0.5, 0.0])


def test_interval():
    # The means of two drawn from {0, 1} are 0, 0.5 and 1 with probabilities 1/4, 1/2 and 1/4
    spread = np.array([[0.0, 7.0], [1.0, 7.0]])
    result = estimate({"spread": spread, "same": np.full((5, 1), 3.0)}, column_means)
    np.testing.assert_array_equal(result["spread"].value, [0.5, 7.0])
    np.testing.assert_array_equal(result["spread"].low, [0.0, 7.0])
    np.testing.assert_array_equal(result["spread"].high, [1.0, 7.0])
    assert (result["same"].low[0], result["same"].value[0], result["same"].high[0]) == (3.0, 3.0, 3.0)
    assert (result["spread"].n_seeds, result["same"].n_seeds) == (2, 5)


def test_interval_of_a_normal_mean():
    scores = np.random.default_rng(0).normal(size=(400, 1))
    result = estimate({"arm": scores}, column_means)["arm"]
    half_width = 1.96 * scores.std() / 20
    assert result.high[0] - scores.mean() == pytest.approx(half_width, rel=0.15)
    assert scores.mean() - result.low[0] == pytest.approx(half_width, rel=0.15)


def test_one_seed_has_no_interval():
    result = estimate({"one": np.array([[2.0]]), "two": np.array([[1.0], [3.0]])}, interquartile_mean)
    assert result["one"].value[0] == 2.0
    assert np.isnan(result["one"].low[0])
    assert np.isnan(result["one"].high[0])
    assert (result["two"].low[0], result["two"].high[0]) == (1.0, 3.0)
    assert np.isnan(estimate({"one": np.array([[2.0]])}, interquartile_mean)["one"].low[0])


def test_improvement():
    samples = {
        "base": np.array([[0.0], [1.0]]),
        "lone": np.array([[0.5]]),
        "better": np.array([[2.0], [3.0], [4.0]]),
        "mixed": np.array([[-1.0], [3.0]]),
    }
    result = estimate_improvement(samples, "base")
    assert list(result) == ["lone", "better", "mixed"]
    assert (result["better"].low[0], result["better"].value[0], result["better"].high[0]) == (1.0, 1.0, 1.0)
    assert (result["mixed"].low[0], result["mixed"].value[0], result["mixed"].high[0]) == (0.0, 0.5, 1.0)
    assert result["lone"].value[0] == 0.5
    assert np.isnan(result["lone"].low[0])


def test_numbers_are_the_same_each_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bootstrap, "N_BOOTSTRAP", 100)
    np.random.seed(5)  # noqa: NPY002
    scores = {"arm": np.random.default_rng(1).normal(size=(6, 2))}
    first, second = estimate(scores, column_means)["arm"], estimate(scores, column_means)["arm"]
    np.testing.assert_array_equal(first.low, second.low)
    # The caller's generator is where it was
    drawn = np.random.random()  # noqa: NPY002
    np.random.seed(5)  # noqa: NPY002
    assert drawn == np.random.random()  # noqa: NPY002
