"""Actions stay inside any bounds, stored actions inside [-1, 1], and noise is in units of half the range."""

from typing import Any

import numpy as np
import pytest
import torch as th
from envs import CountingEnv, RecordingEnv, tiny_agent, vec_env
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from noises import normal_noise
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise

from sb3_td3x import TD3X


def box(low: Any, high: Any, dtype: type = np.float32) -> spaces.Box:
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


@st.composite
def action_spaces(draw: st.DrawFn) -> spaces.Box:
    """Draw bounds between -1e4 and 2e4 for 1 or 17 dimensions, in float32 or float64."""
    n_dims = draw(st.sampled_from([1, 17]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    lows = draw(st.lists(st.floats(-1e4, 1e4), min_size=n_dims, max_size=n_dims))
    ranges = draw(st.lists(st.floats(1e-2, 1e4), min_size=n_dims, max_size=n_dims))
    return box(lows, np.add(lows, ranges), dtype)


SPACES = {
    "[-3, 1]": box([-3.0], [1.0]),
    "[-3, 1], float64": box([-3.0], [1.0], np.float64),
    "per dimension": box([-3.0, -0.1, 7.0], [1.0, 0.1, 70.0]),
    "17 dimensions": box(-0.4 * np.ones(17), 0.4 * np.ones(17)),
    "17 different dimensions, float64": box(-np.arange(1, 18), 0.1 * np.arange(1, 18), np.float64),
    "bounds that float32 cannot represent": box([-0.1, 0.1], [0.3, 0.7], np.float64),
    "two axes": box([[-3.0, -0.1, 7.0], [0.0, 1.0, -9.0]], [[1.0, 0.1, 70.0], [1.0, 2.0, -8.0]]),
}


class WideNoise(ActionNoise):
    """
    Noise that moves most actions out of [-1, 1].

    :param shape: Shape of an action
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def __call__(self) -> np.ndarray:
        return np.random.normal(0, 3, self.shape).astype(np.float32)  # noqa: NPY002

    def __repr__(self) -> str:
        return "WideNoise()"


def saturate(model: TD3X, signs: np.ndarray) -> None:
    """Set the actor's weights so that its output is +1 or -1, with the given sign in each dimension."""
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
        model.actor.mu[-2].bias.copy_(th.as_tensor(100.0 * signs.ravel()))


def assert_inside(action_space: spaces.Box, actions: np.ndarray) -> None:
    for action in actions:
        assert action_space.contains(action), f"{action!r} is not in {action_space}"


def rollout(action_space: spaces.Box, n_steps: int = 12, **kwargs: Any) -> tuple[TD3X, np.ndarray, np.ndarray]:
    """
    Train an agent for a few steps.

    :param action_space: The action space
    :param n_steps: Number of steps; the first 4 have random actions
    :param kwargs: Constructor arguments
    :return: The agent, the executed actions and the stored actions, of shape (n_steps, ...)
    """
    env = RecordingEnv(action_space=action_space)
    model = tiny_agent(vec_env(env), **{"learning_starts": 4, "seed": None, **kwargs})
    model.learn(n_steps)
    return model, np.array(env.actions), model.replay_buffer.actions[:n_steps, 0]


def assert_stored_as_executed(action_space: spaces.Box, executed: np.ndarray, stored: np.ndarray) -> None:
    """Assert that stored actions are inside [-1, 1] and equal the executed ones up to rounding."""
    assert stored.min() >= -1
    assert stored.max() <= 1
    low, high = action_space.low.astype(np.float64), action_space.high.astype(np.float64)
    center, radius = (low + high) / 2, (high - low) / 2
    # The rounding error of float32 is relative to the bounds
    atol = 4 * np.finfo(np.float32).eps * (1 + np.maximum(abs(low), abs(high)) / radius)
    difference = stored.reshape(executed.shape) - (executed - center) / radius
    assert (abs(difference) <= atol).all()


@settings(max_examples=40, deadline=None)
@given(action_space=action_spaces(), noisy=st.booleans(), stochastic=st.booleans())
def test_actions_of_any_bounds_are_inside_and_stored_scaled(
    action_space: spaces.Box, noisy: bool, stochastic: bool
) -> None:
    """With and without noise, for a deterministic and a stochastic policy."""
    model, executed, stored = rollout(
        action_space,
        action_noise=WideNoise(action_space.shape) if noisy and not stochastic else None,
        policy_kwargs={"net_arch": [8], "stochastic_actor": stochastic},
    )
    assert_inside(action_space, executed)
    assert_stored_as_executed(action_space, executed, stored)
    obs = np.random.default_rng(0).normal(0, 100, (20, 2)).astype(np.float32)
    for deterministic in (True, False):
        assert_inside(action_space, model.predict(obs, deterministic=deterministic)[0])
        assert_inside(action_space, model.predict(obs[0], deterministic=deterministic)[0][None])


@settings(max_examples=40, deadline=None)
@given(action_space=action_spaces(), seed=st.integers(0, 1000))
def test_a_saturated_policy_reaches_the_bounds_exactly(action_space: spaces.Box, seed: int) -> None:
    """A rounding error must not move the action outside the bounds."""
    model = tiny_agent(vec_env(CountingEnv(action_space=action_space)), seed=None)
    signs = np.random.default_rng(seed).choice([-1, 1], action_space.shape)
    saturate(model, signs)
    action, _ = model.predict(np.zeros(2, np.float32))
    assert_inside(action_space, action[None])
    expected = np.where(signs > 0, action_space.high, action_space.low)
    scale = np.maximum(abs(action_space.low), abs(action_space.high))
    assert (abs(action - expected) <= 4 * np.finfo(np.float32).eps * scale).all()


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", SPACES)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_actions_stay_inside_during_a_training(case: str, stochastic: bool, n_envs: int) -> None:
    action_space = SPACES[case]
    envs = [RecordingEnv(action_space=action_space) for _ in range(n_envs)]
    model = tiny_agent(
        vec_env(*envs),
        action_noise=None if stochastic else WideNoise(action_space.shape),
        policy_kwargs={"net_arch": [8], "stochastic_actor": stochastic},
        learning_rate=0.01,
    )
    model.learn(60)
    for idx, env in enumerate(envs):
        executed = np.array(env.actions)
        assert executed.shape == (60 // n_envs, *action_space.shape)
        assert_inside(action_space, executed)
        assert_stored_as_executed(action_space, executed, model.replay_buffer.actions[: 60 // n_envs, idx])
    if not stochastic:
        # The noise is so wide that actions reach both bounds
        actions = np.concatenate([env.actions for env in envs])[10:]
        np.testing.assert_allclose(actions.min(0), action_space.low, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(actions.max(0), action_space.high, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_in_float64_keeps_actions_inside_a_float32_space(dtype: type) -> None:
    action_space = box([-3.0], [1.0])
    noise = NormalActionNoise(np.zeros(1), np.ones(1), dtype=dtype)
    _, executed, stored = rollout(action_space, n_steps=50, action_noise=noise)
    assert_inside(action_space, executed)
    assert_stored_as_executed(action_space, executed, stored)


def executed_noise(
    action_space: spaces.Box, noise: ActionNoise | None, n_envs: int, n_actions: int = 4000, **kwargs: Any
) -> np.ndarray:
    """
    Return the noise in the executed actions of a policy whose output is always the center of the bounds.

    :param action_space: The action space
    :param noise: The noise
    :param n_envs: Number of envs
    :param n_actions: Number of actions of all envs together
    :param kwargs: Constructor arguments
    :return: The executed actions relative to the center, in units of half the range
    """
    envs = [RecordingEnv(action_space=action_space) for _ in range(n_envs)]
    model = tiny_agent(
        vec_env(*envs), action_noise=noise, learning_starts=0, gradient_steps=0, train_freq=100, **kwargs
    )
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
    model.learn(n_actions)
    actions = np.concatenate([env.actions for env in envs])
    low, high = action_space.low.astype(np.float64), action_space.high.astype(np.float64)
    scaled: np.ndarray = (actions - (low + high) / 2) / ((high - low) / 2)
    return scaled


@pytest.mark.parametrize("case", SPACES)
def test_executed_noise_has_the_standard_deviation_sigma_times_half_the_range(case: str) -> None:
    """As document 002's ``expl_noise``, and 000's ``max_action`` for symmetric bounds."""
    action_space = SPACES[case]
    noise = NormalActionNoise(np.zeros(action_space.shape), 0.2 * np.ones(action_space.shape))
    actions = executed_noise(action_space, noise, n_envs=4)
    np.testing.assert_allclose(actions.mean(0), 0.0, atol=0.02)
    np.testing.assert_allclose(actions.std(0), 0.2, rtol=0.06)


def test_each_dimension_can_have_another_noise() -> None:
    """σ = (0, 0.1, 0.3), scaled by the minimum of the decay."""
    noise = NormalActionNoise(np.array([0.0, 0.1, -0.1]), np.array([0.0, 0.1, 0.3]))
    actions = executed_noise(
        SPACES["per dimension"], noise, n_envs=4, action_noise_decay=1e-9, action_noise_min_scale=0.5
    )[1:]
    np.testing.assert_allclose(actions.mean(0), [0.0, 0.05, -0.05], atol=0.01)
    np.testing.assert_allclose(actions.std(0), [0.0, 0.05, 0.15], rtol=0.06, atol=1e-6)


def test_correlated_noise_is_scaled_too() -> None:
    """Ornstein-Uhlenbeck noise is the same for all bounds, relative to them."""
    action_space = SPACES["[-3, 1]"]
    narrow = box([-1.0], [1.0])
    results = []
    for space in (action_space, narrow):
        noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.5 * np.ones(1))
        results.append(executed_noise(space, noise, n_envs=1, n_actions=300))
    # Both trainings use the same seed
    np.testing.assert_allclose(results[0], results[1], atol=1e-6)
    assert np.std(results[0]) > 0.01


@pytest.mark.parametrize("case", ["[-3, 1]", "[-3, 1], float64"])
def test_bounds_do_not_change_what_is_learned(case: str) -> None:
    """Critics, smoothing and noise use scaled actions. In ``CountingEnv``, actions change nothing else."""
    models = []
    for action_space in (SPACES[case], box([-1.0], [1.0])):
        noise = normal_noise(0.3)
        model, _, _ = rollout(
            action_space,
            n_steps=60,
            seed=4,
            action_noise=noise,
            learning_rate=1e-3,
            policy_kwargs={"net_arch": [8], "optimizer_class": th.optim.SGD},
        )
        models.append(model)
    expected = models[1].policy.state_dict()
    for key, value in models[0].policy.state_dict().items():
        np.testing.assert_allclose(value.numpy(), expected[key].numpy(), rtol=1e-4, atol=1e-5, err_msg=key)


def test_samples_of_a_stochastic_actor_extend_to_the_bounds() -> None:
    action_space = SPACES["per dimension"]
    env = RecordingEnv(action_space=action_space)
    model = tiny_agent(
        vec_env(env), learning_starts=0, gradient_steps=0, policy_kwargs={"net_arch": [8], "stochastic_actor": True}
    )
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
        model.actor.log_std.bias.fill_(1.0)
    model.learn(300)
    assert_inside(action_space, np.array(env.actions))
    span = action_space.high - action_space.low
    assert (np.min(env.actions, 0) < action_space.low + 0.01 * span).all()
    assert (np.max(env.actions, 0) > action_space.high - 0.01 * span).all()
    action, _ = model.predict(np.zeros(2, np.float32), deterministic=True)
    np.testing.assert_allclose(action, (action_space.low + action_space.high) / 2, rtol=1e-6, atol=1e-6)
