"""Estimates over seeds, with intervals from rliable's stratified bootstrap (Agarwal et al. 2021)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rliable import library as rly  # type: ignore[import-untyped]

N_BOOTSTRAP = 2000
CONFIDENCE = 0.95

Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Estimate:
    """
    Estimates of one or more quantities; NaN for the bounds where there is one seed, and so no interval.

    :param value: the estimates, of shape (k,)
    :param low: lower bounds of their 95% intervals
    :param high: upper bounds
    :param n_seeds: from how many seeds
    """

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    n_seeds: int

    def __getitem__(self, idx: slice | int) -> "Estimate":
        value, low, high = (np.atleast_1d(values[idx]) for values in (self.value, self.low, self.high))
        return Estimate(value, low, high, self.n_seeds)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """
    ``rliable.metrics.aggregate_iqm`` of each column, without SciPy's function behind it: that takes 50 times as long on
    so few numbers.

    :param scores: scores of shape (n_seeds, k)
    :return: for each column the mean without the lowest and the highest quarter of the seeds, both rounded down to
        whole seeds (so with less than 4 seeds the mean), of shape (k,)
    """
    cut = len(scores) // 4
    middle: np.ndarray = np.sort(scores, axis=0)[cut : len(scores) - cut].mean(axis=0)
    return middle


def column_means(scores: np.ndarray) -> np.ndarray:
    """
    :param scores: scores of shape (n_seeds, k)
    :return: the mean of each column, of shape (k,)
    """
    means: np.ndarray = scores.mean(axis=0)
    return means


def probability_of_improvement(scores: np.ndarray, other: np.ndarray) -> float:
    """
    ``rliable.metrics.probability_of_improvement`` without the p-values that it computes and throws away.

    :param scores: scores of one arm, of shape (n_seeds, n_envs)
    :param other: those of another arm, of shape (any number of seeds, n_envs)
    :return: probability that a random seed of the one beats a random seed of the other, ties half, mean over the envs
    """
    pairs = scores[:, None, :], other[None, :, :]
    return float(np.mean(np.greater(*pairs)) + 0.5 * np.mean(np.equal(*pairs)))


def exceedance(thresholds: np.ndarray) -> Statistic:
    """
    :param thresholds: thresholds of shape (k,)
    :return: what computes the fraction of scores, of shape (n_seeds, n_envs), above each of them: a performance profile
    """
    return lambda scores: np.mean(scores[..., None] > thresholds, axis=(0, 1))


def estimate(samples: Mapping[str, np.ndarray], statistic: Statistic) -> dict[str, Estimate]:
    """
    :param samples: for each arm an array of shape (n_seeds, k); each column is resampled by itself
    :param statistic: what to estimate from such an array, of shape (any,)
    :return: for each arm its estimate
    """
    intervals = _intervals([sample for sample in samples.values() if len(sample) > 1], statistic)
    estimates = {}
    for arm, sample in samples.items():
        value = statistic(sample)
        low, high = next(intervals) if len(sample) > 1 else np.full((2, len(value)), np.nan)
        estimates[arm] = Estimate(value, low, high, len(sample))
    return estimates


def estimate_improvement(samples: Mapping[str, np.ndarray], base: str) -> dict[str, Estimate]:
    """
    :param samples: for each arm scores of shape (n_seeds, n_envs)
    :param base: name of one of them
    :return: for each other arm, the probability that it improves on the base; ``n_seeds`` is that of the smaller sample
    """
    others = {arm: sample for arm, sample in samples.items() if arm != base}
    several = [sample for sample in others.values() if min(len(sample), len(samples[base])) > 1]
    bounds = iter(())
    if several:
        bounds = iter(
            _bounds(
                [samples[base], *several],
                lambda base_scores, *resampled: np.array(
                    [probability_of_improvement(scores, base_scores) for scores in resampled]
                ),
            ).T
        )
    estimates = {}
    for arm, sample in others.items():
        n_seeds = min(len(sample), len(samples[base]))
        low, high = next(bounds) if n_seeds > 1 else (np.nan, np.nan)
        value = probability_of_improvement(sample, samples[base])
        estimates[arm] = Estimate(np.array([value]), np.array([low]), np.array([high]), n_seeds)
    return estimates


def _intervals(samples: Sequence[np.ndarray], statistic: Statistic) -> Iterator[np.ndarray]:
    """
    :param samples: arrays of shape (n_seeds, k)
    :param statistic: as for ``estimate``
    :return: for each of them the bounds, of shape (2, any); from one bootstrap, since one for each takes far longer
    """
    if not samples:
        return iter(())
    sizes = [len(statistic(sample)) for sample in samples]
    bounds = _bounds(samples, lambda *resampled: np.concatenate([statistic(sample) for sample in resampled]))
    return iter(np.split(bounds, np.cumsum(sizes)[:-1], axis=1))


def _bounds(samples: Sequence[np.ndarray], function: Callable[..., np.ndarray]) -> np.ndarray:
    """
    :param samples: arrays of shape (n_seeds, k), resampled independently of each other
    :param function: what to estimate from all of them
    :return: bounds of its interval, of shape (2, any)
    """
    with _fixed_seed():
        _, intervals = rly.get_interval_estimates(
            {"": list(samples)}, function, reps=N_BOOTSTRAP, confidence_interval_size=CONFIDENCE
        )
    bounds: np.ndarray = intervals[""]
    return bounds


@contextlib.contextmanager
def _fixed_seed() -> Iterator[None]:
    """rliable 1.2 draws from NumPy's global generator, whatever its ``random_state`` says: lend it one."""
    state = np.random.get_state()
    np.random.seed(0)
    try:
        yield
    finally:
        np.random.set_state(state)
