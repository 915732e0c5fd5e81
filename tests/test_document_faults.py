"""
Tests that TD3X does not have the faults of the documents that it is based on.

The fault of the delay counter is tested in ``learner/test_update.py``.
"""

import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from comparing import assert_same_tensors, state_dicts_are_equal
from envs import CountingEnv, Episode, RecordingEnv, counting_vec_env, saved_and_loaded, tiny_agent, vec_env
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from noises import ConstantNoise, normal_noise
from stable_baselines3 import DDPG
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import configure_logger

from sb3_td3x import TD3X

ACTION_SPACE = spaces.Box(-1, 1, (3,), np.float32)


def set_parameters(network: th.nn.Module, value: float, output_bias: float | None = None) -> None:
    """Set all parameters of a network to one value, and its last bias to another."""
    with th.no_grad():
        parameters = list(network.parameters())
        for parameter in parameters:
            parameter.fill_(value)
        if output_bias is not None:
            parameters[-1].fill_(output_bias)


def store(model: TD3X, obs: float, next_obs: float, reward: float, done: bool) -> None:
    """Add a transition with action 0 to the replay buffer four times."""
    observations = np.full((1, 2), obs), np.full((1, 2), next_obs)
    for _ in range(4):
        model.replay_buffer.add(*observations, np.zeros((1, 1)), np.array([reward]), np.array([done]), [{}])


def target_in_training(model: TD3X) -> float:
    """Return the target y of the transition in the buffer, from the loss y² of critics that are 0 everywhere."""
    set_parameters(model.critic, 0.0)
    model.set_logger(configure_logger(verbose=0))
    model.train(gradient_steps=1, batch_size=4)
    return float(np.sqrt(model.logger.name_to_value["train/critic_loss"] / model.critic.n_critics))


def linear_agent(cls: Any = TD3X, n_critics: int = 2, **kwargs: Any) -> Any:
    """Make an agent without hidden layers that is not changed by training."""
    policy_kwargs = {"net_arch": [], "n_critics": n_critics}
    return tiny_agent(cls=cls, learning_rate=0.0, gamma=0.5, policy_kwargs=policy_kwargs, **kwargs)


@pytest.mark.parametrize("target_policy_noise", [0.0, 1e-6])
def test_target_action_is_that_of_the_next_state(target_policy_noise: float) -> None:
    """
    Document 000 smooths the target action of ``state`` instead of ``next_state``.

    With π'(s) = tanh(s1 + s2) and Q'(s, a) = a, the target is y = γ π'(s').
    """
    model = linear_agent(target_policy_noise=target_policy_noise)
    set_parameters(model.actor_target, 1.0, output_bias=0.0)
    state = model.policy.state_dict()
    for idx in (0, 1):
        state[f"critic_target.qf{idx}.0.weight"][:] = th.tensor([[0.0, 0.0, 1.0]])
        state[f"critic_target.qf{idx}.0.bias"][:] = 0.0
    model.policy.load_state_dict(state)
    store(model, obs=-0.4, next_obs=0.25, reward=0.0, done=False)
    assert target_in_training(model) == pytest.approx(0.5 * np.tanh(0.5), abs=1e-5)


@pytest.mark.parametrize("way", ["save and load", "get_parameters and set_parameters"])
def test_all_networks_and_optimizers_are_saved_and_restored(way: str) -> None:
    """Document 000 saves actor and critic to the same path, and its ``load`` calls a method that does not exist."""
    model = tiny_agent(tau=0.3).learn(30)
    for name in ("actor", "critic"):
        assert not state_dicts_are_equal(
            getattr(model, name).state_dict(), getattr(model, f"{name}_target").state_dict()
        )
    assert not th.equal(model.critic.state_dict()["qf0.0.weight"], model.critic.state_dict()["qf1.0.weight"])
    if way == "save and load":
        other = saved_and_loaded(model)
    else:
        other = tiny_agent(seed=1)
        other.set_parameters(model.get_parameters())
    for name in ("actor", "actor_target", "critic", "critic_target"):
        assert_same_tensors(getattr(model, name).state_dict(), getattr(other, name).state_dict())
    for name in ("actor", "critic"):
        expected, actual = (getattr(each, name).optimizer.state_dict()["state"] for each in (model, other))
        assert expected
        assert actual.keys() == expected.keys()
        for idx, entry in expected.items():
            assert_same_tensors(entry, actual[idx])


def test_exploration_does_not_end_after_5000_steps() -> None:
    """Document 000's decay of 0.999 a step leaves 0.7% of the noise after 5,000 of its millions of steps."""
    env = RecordingEnv()
    model = tiny_agent(
        env,
        action_noise=ConstantNoise(),
        action_noise_decay=0.999,
        action_noise_min_scale=0.1,
        learning_starts=0,
        gradient_steps=0,
        train_freq=100,
    )
    set_parameters(model.actor, 0.0)
    model.learn(5000)
    actions = np.ravel(env.actions)
    assert actions[0] == 1.0
    assert actions[1000] == pytest.approx(0.999**1000, rel=1e-4)
    assert 0.999**4999 < 0.007
    np.testing.assert_allclose(actions[2303:], 0.1, rtol=1e-4)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("algorithm", ["TD3X as DDPG", "loaded DDPG", "TD3X"])
def test_targets_do_not_bootstrap_from_terminal_states(algorithm: str, done: bool) -> None:
    """Document 001's DDPG has ``y_true = r1 + gamma * critic_target(s1, a1)``, also for terminal s1."""
    if algorithm == "loaded DDPG":
        model = saved_and_loaded(linear_agent(DDPG, n_critics=1), env=CountingEnv())
    elif algorithm == "TD3X":
        model = linear_agent()
    else:
        model = linear_agent(policy_delay=1, target_policy_noise=0, n_critics=1)
    state = model.policy.state_dict()
    for idx in range(model.critic.n_critics):
        state[f"critic_target.qf{idx}.0.weight"][:] = 0.0
        state[f"critic_target.qf{idx}.0.bias"][:] = 8.0
    model.policy.load_state_dict(state)
    store(model, obs=0.0, next_obs=0.0, reward=3.0, done=done)
    assert target_in_training(model) == pytest.approx(3.0 if done else 7.0)


@pytest.mark.parametrize("n_critics", [1, 2])
def test_a_critic_returns_one_value_for_an_action_of_three_dimensions(n_critics: int) -> None:
    """
    Document 001's critic, ``Critic(s_dim + a_dim, 256, a_dim)``, returns one value per dimension of the action.

    Its TD3 also unpacks one critic's output as two, and calls an actor of three arguments with four.
    """
    env = CountingEnv(action_space=spaces.Box(-1, 1, (3,), np.float32))
    model = tiny_agent(env, policy_kwargs={"net_arch": [8], "n_critics": n_critics})
    obs = th.zeros(5, 2)
    actions = model.actor(obs)
    assert actions.shape == (5, 3)
    for critic in (model.critic, model.critic_target):
        values = critic(obs, actions)
        assert [tuple(value.shape) for value in values] == [(5, 1)] * n_critics
        assert critic.q1_forward(obs, actions).shape == (5, 1)
    state = model.critic.state_dict()
    assert [tuple(state[f"qf{idx}.2.weight"].shape) for idx in range(n_critics)] == [(1, 8)] * n_critics
    model.learn(20)


def test_the_buffer_overwrites_the_oldest_transition_in_place() -> None:
    """Document 001 removes the first entry of a list, which moves all other entries at every step."""
    model = tiny_agent(counting_vec_env(1, [Episode(1000, True)]), buffer_size=7, gradient_steps=0)
    buffer = model.replay_buffer
    memory = buffer.rewards
    model.learn(5)
    assert buffer.rewards[:5, 0].tolist() == [1, 2, 3, 4, 5]
    assert buffer.size() == 5
    model.learn(5, reset_num_timesteps=False)
    # The rewards are the numbers of the steps: 8, 9 and 10 replaced 1, 2 and 3
    assert buffer.rewards[:, 0].tolist() == [8, 9, 10, 4, 5, 6, 7]
    assert buffer.rewards is memory
    assert buffer.size() == 7
    samples = buffer.sample(500)
    assert set(samples.rewards[:, 0].tolist()) == {4, 5, 6, 7, 8, 9, 10}


def test_training_without_a_replay_buffer() -> None:
    """Document 002, trick 2: with ``buffer_size=1, batch_size=1`` only the newest transition is used."""
    model = tiny_agent(buffer_size=1, batch_size=1)
    model.learn(23)
    assert model.replay_buffer.size() == 1
    # After episodes of 5, 3, 5, 3 and 5 steps, step 23 is the second of its episode
    assert model.replay_buffer.rewards.tolist() == [[2.0]]
    assert model._n_updates == 23 - 5


class RecordUpdates(BaseCallback):
    """A callback that records the number of updates after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.n_updates: list[int] = []

    def _on_step(self) -> bool:
        self.n_updates.append(self.model._n_updates)
        return True


@pytest.mark.parametrize("learning_starts", [0, 1, 10, 64])
@pytest.mark.parametrize("n_envs", [1, 4])
def test_warm_up_has_random_actions_and_ends_on_time(learning_starts: int, n_envs: int) -> None:
    """
    Document 001's warm-up condition is false from the first episode, and 004 has no random actions.

    Here the first ``learning_starts`` timesteps of all envs have random actions and no updates. All later actions are
    those of the policy, which is always 1 in this test.
    """
    envs = [RecordingEnv() for _ in range(n_envs)]
    model = tiny_agent(vec_env(*envs), learning_rate=0.0, learning_starts=learning_starts, gradient_steps=1)
    set_parameters(model.actor, 0.0, output_bias=100.0)
    callback = RecordUpdates()
    model.learn(80, callback=callback)
    actions = np.array([env.actions for env in envs])[..., 0].T.ravel()
    random_steps = -(-learning_starts // n_envs) * n_envs
    assert (abs(actions[:random_steps]) < 1).all()
    assert (actions[random_steps:] == 1).all()
    if random_steps > 1:
        assert np.std(actions[:random_steps]) > 0.3
    # One update follows each step of the envs, once more than learning_starts timesteps are over
    n_updates = [*callback.n_updates[1:], model._n_updates]
    expected = np.cumsum([(step + 1) * n_envs > learning_starts for step in range(80 // n_envs)])
    assert n_updates == expected.tolist()


BOUNDS = {
    "asymmetric": ([-3.0], [1.0]),
    "wider than 1": ([-5.0], [5.0]),
    "far from 0": ([10.0], [12.0]),
    "narrow": ([-0.25], [0.5]),
    "each dimension different": ([-3.0, -0.1, 7.0], [1.0, 0.1, 70.0]),
}


@pytest.mark.parametrize("case", BOUNDS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_policy_reaches_both_bounds(case: str, stochastic: bool) -> None:
    """Document 004 clamps the output of a tanh to the bounds instead of scaling it, so it cannot reach wide bounds."""
    low, high = (np.array(bound, np.float32) for bound in BOUNDS[case])
    env = RecordingEnv(action_space=spaces.Box(low, high))
    model = tiny_agent(
        env,
        learning_starts=0,
        gradient_steps=0,
        policy_kwargs={"net_arch": [4], "stochastic_actor": stochastic},
    )
    output: Any = model.actor.mu if stochastic else model.actor.mu[2]
    for bias, expected in ((100.0, high), (-100.0, low), (0.0, (low + high) / 2)):
        set_parameters(model.actor, 0.0)
        with th.no_grad():
            output.bias.fill_(bias)
            if stochastic:
                model.actor.log_std.bias.fill_(-20.0)
        action, _ = model.predict(np.zeros(2, np.float32), deterministic=True)
        np.testing.assert_allclose(action, expected, rtol=1e-6, atol=1e-6)
        model.learn(2, reset_num_timesteps=False)
        np.testing.assert_allclose(env.actions[-1], expected, rtol=1e-5, atol=1e-5)


class Walk(gym.Env[np.ndarray, np.ndarray]):
    """
    An env without an end, with a reward of 1 per step. The observation is the number of the step.

    :param falls_at: Step of each episode that is terminal
    :param blind: Whether the observation is always 0
    """

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, falls_at: int = 10**9, blind: bool = False) -> None:
        self.falls_at = falls_at
        self.blind = blind

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        obs = np.full(1, 0 if self.blind else self.steps, np.float32)
        return obs, 1.0, self.steps == self.falls_at, False, {}


@pytest.mark.parametrize("n_envs", [1, 3])
def test_time_outs_are_not_terminal(n_envs: int) -> None:
    """Document 004 stores time-outs as terminal. The next observation must be the last one before the reset."""
    model = tiny_agent(vec_env(*(TimeLimit(Walk(), 4) for _ in range(n_envs))), gradient_steps=0, buffer_size=60)
    model.learn(20 * n_envs)
    buffer = model.replay_buffer
    ends = np.arange(20) % 4 == 3
    assert (buffer.dones[:20] == ends[:, None]).all()
    assert (buffer.timeouts[:20] == ends[:, None]).all()
    assert (buffer.dones * (1 - buffer.timeouts) == 0).all()
    np.testing.assert_array_equal(buffer.next_observations[:20, 0, 0], np.arange(20) % 4 + 1)
    samples = buffer.sample(200)
    assert not samples.dones.any()
    assert set(samples.next_observations[:, 0].tolist()) == {1, 2, 3, 4}


def test_a_fall_at_the_time_limit_is_terminal() -> None:
    falls_before = tiny_agent(vec_env(TimeLimit(Walk(falls_at=2), 3)), gradient_steps=0)
    falls_at = tiny_agent(vec_env(TimeLimit(Walk(falls_at=3), 3)), gradient_steps=0)
    for model, episode in ((falls_before, 2), (falls_at, 3)):
        model.learn(12)
        buffer = model.replay_buffer
        terminal = (buffer.dones * (1 - buffer.timeouts))[:12, 0]
        assert terminal.tolist() == [float(step % episode == episode - 1) for step in range(12)]


def test_values_are_bootstrapped_at_time_outs() -> None:
    """
    With r = 1, γ = 0.5 and time-outs after 2 steps, Q = 1 / (1 - γ) = 2.

    If time-outs were terminal, Q = 1 + γ Q / 2 = 4/3, since the observation does not show when they come.
    """
    model = tiny_agent(
        vec_env(TimeLimit(Walk(blind=True), 2)),
        action_noise=normal_noise(),
        gamma=0.5,
        tau=0.05,
        learning_rate=3e-3,
        learning_starts=50,
        batch_size=32,
        policy_kwargs={"net_arch": [16]},
        gradient_steps=4,
    )
    model.learn(250)
    obs = th.zeros(1, 1)
    with th.no_grad():
        for value in model.critic(obs, model.actor(obs)):
            assert value.item() == pytest.approx(2.0, abs=0.1)


def test_pythons_random_generator_is_not_used() -> None:
    """Document 001 samples with ``random.sample``, which ignores the agent's seed."""
    state = random.getstate()
    model = tiny_agent(seed=None)
    model.learn(20)
    assert random.getstate() == state
