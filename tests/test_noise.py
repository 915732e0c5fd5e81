"""The scale of the exploration noise, and its form for several environments."""

import numpy as np
import pytest
from noises import normal_noise
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise, VectorizedActionNoise

from sb3_td3x.noise import exploration_scale, vectorize_noise


def make_noise() -> OrnsteinUhlenbeckActionNoise:
    return OrnsteinUhlenbeckActionNoise(mean=np.zeros(3), sigma=0.5 * np.ones(3))


@pytest.mark.parametrize("factor", [0.9, 0.999, 0.9999, 1.0])
def test_scale_equals_the_repeated_multiplication_of_document_000(factor: float) -> None:
    sigma = 1.0
    sigmas = []
    for _ in range(2001):
        sigmas.append(sigma)
        sigma *= factor
    for timesteps in (0, 1, 2, 10, 100, 1000, 2000):
        assert exploration_scale(timesteps, factor, 0.0) == pytest.approx(sigmas[timesteps], rel=1e-9)


def test_scale_has_a_minimum() -> None:
    assert exploration_scale(0, 0.5, 0.2) == 1.0
    assert exploration_scale(2, 0.5, 0.2) == 0.25
    assert exploration_scale(3, 0.5, 0.2) == 0.2
    assert exploration_scale(10**9, 0.5, 0.2) == 0.2
    assert exploration_scale(0, 0.5, 1.0) == 1.0


def test_scale_of_a_very_long_run_underflows_to_zero() -> None:
    assert exploration_scale(10**9, 0.5, 0.0) == 0.0
    assert exploration_scale(10**9, 1.0, 0.0) == 1.0


@pytest.mark.parametrize("n_envs", [1, 4])
def test_no_noise_stays_none(n_envs: int) -> None:
    assert vectorize_noise(None, n_envs) is None


def test_noise_for_one_env_is_not_changed() -> None:
    noise = make_noise()
    assert vectorize_noise(noise, 1) is noise


@pytest.mark.parametrize("n_envs", [1, 4])
def test_vectorized_noise_that_fits_keeps_its_state(n_envs: int) -> None:
    noise = VectorizedActionNoise(make_noise(), n_envs)
    noise()
    state = noise.noises[0].noise_prev.copy()
    assert vectorize_noise(noise, n_envs) is noise
    np.testing.assert_array_equal(noise.noises[0].noise_prev, state)
    assert np.any(state != 0.0)


@pytest.mark.parametrize("n_envs_before", [None, 1, 2, 4])
@pytest.mark.parametrize("n_envs", [2, 3, 4])
def test_noises_of_several_envs_are_independent(n_envs_before: int | None, n_envs: int) -> None:
    base_noise = make_noise()
    noise = base_noise if n_envs_before is None else VectorizedActionNoise(base_noise, n_envs_before)
    vectorized = vectorize_noise(noise, n_envs)
    assert isinstance(vectorized, VectorizedActionNoise)
    assert vectorized.n_envs == len(vectorized.noises) == n_envs
    assert vectorized.base_noise is base_noise
    sample = vectorized()
    assert sample.shape == (n_envs, 3)
    assert len(np.unique(sample)) == sample.size
    vectorized.reset(indices=[n_envs - 1])  # as collect_rollouts does at the end of an episode
    np.testing.assert_array_equal(vectorized.noises[-1].noise_prev, np.zeros(3))
    assert np.any(vectorized.noises[0].noise_prev != 0.0)


@pytest.mark.parametrize("n_envs_before", [2, 4])
def test_noise_for_several_envs_is_converted_to_one(n_envs_before: int) -> None:
    base_noise = normal_noise(size=3)
    noise = vectorize_noise(VectorizedActionNoise(base_noise, n_envs_before), 1)
    assert noise is base_noise
    noise.reset()  # without indices, as collect_rollouts does with one env
    assert noise().shape == (3,)
