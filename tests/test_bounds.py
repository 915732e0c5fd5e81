"""Action bounds of all kinds: actions stay inside, stored ones within [-1, 1], noise is in units of half the range."""

from typing import Any

import numpy as np
import pytest
import torch as th
from envs import CountingEnv, tiny_agent, vec_env
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise, OrnsteinUhlenbeckActionNoise

from sb3_td3x import TD3X


class RecordingEnv(CountingEnv):
    """
    Keeps the actions.

    :param action_space: the action space
    """

    def __init__(self, action_space: spaces.Box) -> None:
        super().__init__(action_space=action_space)
        self.actions: list[np.ndarray] = []

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.actions.append(np.array(action))
        return super().step(action)


def box(low: Any, high: Any, dtype: type = np.float32) -> spaces.Box:
    return spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype)


@st.composite
def action_spaces(draw: st.DrawFn) -> spaces.Box:
    """Bounds of 1 or 17 dimensions, each its own, between -1e4 and 2e4, in float32 or float64."""
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
    "17 dimensions, each its own, float64": box(-np.arange(1, 18), 0.1 * np.arange(1, 18), np.float64),
    "bounds that are no float32": box([-0.1, 0.1], [0.3, 0.7], np.float64),
    "two axes": box([[-3.0, -0.1, 7.0], [0.0, 1.0, -9.0]], [[1.0, 0.1, 70.0], [1.0, 2.0, -8.0]]),
}


class WideNoise(ActionNoise):
    """
    Noise that throws most actions out of [-1, 1].

    :param shape: an action's shape
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape

    def __call__(self) -> np.ndarray:
        return np.random.normal(0, 3, self.shape).astype(np.float32)  # noqa: NPY002

    def __repr__(self) -> str:
        return "WideNoise()"


def saturate(model: TD3X, signs: np.ndarray) -> None:
    """
    :param model: its actor gives ±1, whatever the observation is
    :param signs: which of them in each dimension of the action
    """
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
        model.actor.mu[-2].bias.copy_(th.as_tensor(100.0 * signs.ravel()))  # type: ignore[operator]


def assert_inside(action_space: spaces.Box, actions: np.ndarray) -> None:
    for action in actions:
        assert action_space.contains(action), f"{action!r} is not in {action_space}"


def rollout(action_space: spaces.Box, n_steps: int = 12, **kwargs: Any) -> tuple[TD3X, np.ndarray, np.ndarray]:
    """
    A short training in one env with a small network.

    :param action_space: the action space
    :param n_steps: number of steps, 4 of them random
    :param kwargs: arguments of the constructor
    :return: the agent, the executed actions, the stored actions; (n_steps, ...)
    """
    env = RecordingEnv(action_space)
    model = tiny_agent(vec_env(env), **{"learning_starts": 4, "seed": None, **kwargs})
    model.learn(n_steps)
    return model, np.array(env.actions), model.replay_buffer.actions[:n_steps, 0]


def assert_stored_as_executed(action_space: spaces.Box, executed: np.ndarray, stored: np.ndarray) -> None:
    """Stored actions lie within [-1, 1] and are the executed ones, up to rounding."""
    assert stored.min() >= -1
    assert stored.max() <= 1
    low, high = action_space.low.astype(np.float64), action_space.high.astype(np.float64)
    centre, radius = (low + high) / 2, (high - low) / 2
    # float32 rounds in units of the bounds
    atol = 4 * np.finfo(np.float32).eps * (1 + np.maximum(abs(low), abs(high)) / radius)
    difference = stored.reshape(executed.shape) - (executed - centre) / radius
    assert (abs(difference) <= atol).all()


@settings(max_examples=40, deadline=None)
@given(action_space=action_spaces(), noisy=st.booleans(), stochastic=st.booleans())
def test_actions_of_any_bounds_are_inside_and_stored_scaled(
    action_space: spaces.Box, noisy: bool, stochastic: bool
) -> None:
    """Random ones, the policy's and those with much noise; of a stochastic policy as well."""
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
def test_saturated_policy_gives_the_bounds_and_not_beyond(action_space: spaces.Box, seed: int) -> None:
    """A tanh of 1 scaled to the bounds must not step over them by a rounding error, nor stop before."""
    model = tiny_agent(vec_env(CountingEnv(action_space=action_space)), seed=None)
    signs = np.random.default_rng(seed).choice([-1, 1], action_space.shape)
    saturate(model, signs)
    action, _ = model.predict(np.zeros(2, np.float32))
    assert_inside(action_space, action[None])
    expected = np.where(signs > 0, action_space.high, action_space.low)
    scale = np.maximum(abs(action_space.low), abs(action_space.high))
    assert (abs(action - expected) <= 4 * np.finfo(np.float32).eps * scale).all()


@pytest.mark.parametrize("case", SPACES)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_long_training_stays_inside(case: str, stochastic: bool, n_envs: int) -> None:
    """While it learns and with several envs, on bounds of the kinds that matter most."""
    action_space = SPACES[case]
    envs = [RecordingEnv(action_space) for _ in range(n_envs)]
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
        # The noise was wide: both bounds are reached, and clipping is what keeps actions inside
        actions = np.concatenate([env.actions for env in envs])[10:]
        np.testing.assert_allclose(actions.min(0), action_space.low, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(actions.max(0), action_space.high, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_in_double_precision_leaves_actions_inside(dtype: type) -> None:
    """``NormalActionNoise(..., dtype=np.float64)`` must not hand a float32 space actions that it doesn't contain."""
    action_space = box([-3.0], [1.0])
    noise = NormalActionNoise(np.zeros(1), np.ones(1), dtype=dtype)
    _, executed, stored = rollout(action_space, n_steps=50, action_noise=noise)
    assert_inside(action_space, executed)
    assert_stored_as_executed(action_space, executed, stored)


def centred_actions(
    action_space: spaces.Box, noise: ActionNoise | None, n_envs: int, n_actions: int = 4000, **kwargs: Any
) -> np.ndarray:
    """
    Actions of a policy that gives the centre always, plus noise.

    :param action_space: the action space
    :param noise: the noise
    :param n_envs: number of envs
    :param n_actions: number of actions, of all envs together
    :param kwargs: arguments of the constructor
    :return: the executed actions, relative to the centre in units of half the range
    """
    envs = [RecordingEnv(action_space) for _ in range(n_envs)]
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
def test_deviation_of_the_executed_noise_is_sigma_times_half_the_range(case: str) -> None:
    """0.2 in every dimension, whatever its bounds (document 002's ``expl_noise``, 000's ``max_action`` made right)."""
    action_space = SPACES[case]
    noise = NormalActionNoise(np.zeros(action_space.shape), 0.2 * np.ones(action_space.shape))
    actions = centred_actions(action_space, noise, n_envs=4)
    np.testing.assert_allclose(actions.mean(0), 0.0, atol=0.02)
    np.testing.assert_allclose(actions.std(0), 0.2, rtol=0.06)


def test_each_dimension_may_have_its_own_noise() -> None:
    """σ = (0, 0.1, 0.3) on bounds of three widths, scaled by the floor of the decay."""
    noise = NormalActionNoise(np.array([0.0, 0.1, -0.1]), np.array([0.0, 0.1, 0.3]))
    actions = centred_actions(
        SPACES["per dimension"], noise, n_envs=4, action_noise_decay=1e-9, action_noise_min_scale=0.5
    )[1:]
    np.testing.assert_allclose(actions.mean(0), [0.0, 0.05, -0.05], atol=0.01)
    np.testing.assert_allclose(actions.std(0), [0.0, 0.05, 0.15], rtol=0.06, atol=1e-6)


def test_correlated_noise_is_scaled_too() -> None:
    """Ornstein-Uhlenbeck noise: relative to the bounds the same for all of them."""
    action_space = SPACES["[-3, 1]"]
    narrow = box([-1.0], [1.0])
    results = []
    for space in (action_space, narrow):
        noise = OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.5 * np.ones(1))
        results.append(centred_actions(space, noise, n_envs=1, n_actions=300))
    # The same seed draws the same noise
    np.testing.assert_allclose(results[0], results[1], atol=1e-6)
    assert np.std(results[0]) > 0.01


@pytest.mark.parametrize("case", ["[-3, 1]", "[-3, 1], float64"])
def test_bounds_are_nothing_that_learning_sees(case: str) -> None:
    """
    Critics, smoothing and noise live in the scaled space: where the env's answer does not depend on the actions, bounds
    of [-3, 1] and [-1, 1] learn the same parameters from the same seed.
    """
    models = []
    for action_space in (SPACES[case], box([-1.0], [1.0])):
        noise = NormalActionNoise(np.zeros(1), 0.3 * np.ones(1))
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


def test_stochastic_actor_s_samples_fill_the_bounds() -> None:
    """A wide squashed Gaussian comes near both bounds of every dimension, never beyond, and its mean is the centre."""
    action_space = SPACES["per dimension"]
    env = RecordingEnv(action_space)
    model = tiny_agent(
        vec_env(env), learning_starts=0, gradient_steps=0, policy_kwargs={"net_arch": [8], "stochastic_actor": True}
    )
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
        model.actor.log_std.bias.fill_(1.0)  # type: ignore[union-attr, operator]
    model.learn(300)
    assert_inside(action_space, np.array(env.actions))
    span = action_space.high - action_space.low
    assert (np.min(env.actions, 0) < action_space.low + 0.01 * span).all()
    assert (np.max(env.actions, 0) > action_space.high - 0.01 * span).all()
    action, _ = model.predict(np.zeros(2, np.float32), deterministic=True)
    np.testing.assert_allclose(action, (action_space.low + action_space.high) / 2, rtol=1e-6, atol=1e-6)
