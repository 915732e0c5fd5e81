"""The faults in the documents that TD3X grew out of: one test or more for each, so that none of them comes in."""

import io
import random
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, Episode, counting_vec_env, tiny_agent, vec_env
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import DDPG
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise
from stable_baselines3.common.utils import configure_logger

from sb3_td3x import TD3X

ACTION_SPACE = spaces.Box(-1, 1, (3,), np.float32)


class ConstantNoise(ActionNoise):
    """The same noise always, so that an action shows the scale that it was multiplied by."""

    def __call__(self) -> np.ndarray:
        return np.ones(1, np.float32)

    def __repr__(self) -> str:
        return "ConstantNoise()"


def set_parameters(network: th.nn.Module, value: float, output_bias: float | None = None) -> None:
    """All parameters of a network to one value, the last bias to another."""
    with th.no_grad():
        parameters = list(network.parameters())
        for parameter in parameters:
            parameter.fill_(value)
        if output_bias is not None:
            parameters[-1].fill_(output_bias)


def store(model: TD3X, obs: float, next_obs: float, reward: float, done: bool, times: int = 1) -> None:
    """The same transition several times over, with action 0."""
    action_dim = model.action_space.shape[0]
    for _ in range(times):
        model.replay_buffer.add(
            np.full((1, 2), obs),
            np.full((1, 2), next_obs),
            np.zeros((1, action_dim)),
            np.array([reward]),
            np.array([done]),
            [{}],
        )


def target_in_training(model: TD3X) -> float:
    """
    The target y of the transition in the buffer, as the critics see it: they hold 0 for all states and actions, so that
    the loss of each is y².
    """
    set_parameters(model.critic, 0.0)
    model.set_logger(configure_logger(verbose=0))
    model.train(gradient_steps=1, batch_size=4)
    return float(np.sqrt(model.logger.name_to_value["train/critic_loss"] / model.critic.n_critics))


def linear_model(**kwargs: Any) -> TD3X:
    """No hidden layers; a step of learning that changes nothing."""
    return tiny_agent(learning_rate=0.0, policy_kwargs={"net_arch": []}, gamma=0.5, **kwargs)


@pytest.mark.parametrize("target_policy_noise", [0.0, 1e-6])
def test_target_action_is_that_of_the_next_state(target_policy_noise: float) -> None:
    """
    Document 000, ``update``: ``smooth_act = self.smooth_action(state)``; it must be that of ``next_state``.

    With π'(s) = tanh(s1 + s2) and Q'(s, a) = a: y = γ π'(s').
    """
    model = linear_model(target_policy_noise=target_policy_noise)
    set_parameters(model.actor_target, 1.0, output_bias=0.0)
    state = model.policy.state_dict()
    for idx in (0, 1):
        state[f"critic_target.qf{idx}.0.weight"][:] = th.tensor([[0.0, 0.0, 1.0]])
        state[f"critic_target.qf{idx}.0.bias"][:] = 0.0
    model.policy.load_state_dict(state)
    store(model, obs=-0.4, next_obs=0.25, reward=0.0, done=False, times=4)
    assert target_in_training(model) == pytest.approx(0.5 * np.tanh(0.5), abs=1e-5)


@pytest.mark.parametrize("way", ["save and load", "get_parameters and set_parameters"])
def test_actor_and_critics_are_saved_apart_and_come_back(way: str) -> None:
    """
    Document 000, ``save`` writes actor and critic to one path, and ``load`` calls a method that does not exist:
    the critic would overwrite the actor. All four networks and both optimizers must come back, each as itself.
    """
    model = tiny_agent(tau=0.3)
    model.learn(30)
    networks = {name: getattr(model, name) for name in ("actor", "actor_target", "critic", "critic_target")}
    saved = {name: network.state_dict() for name, network in networks.items()}
    assert not all(th.equal(a, b) for a, b in zip(saved["actor"].values(), saved["actor_target"].values(), strict=True))
    assert not all(
        th.equal(a, b) for a, b in zip(saved["critic"].values(), saved["critic_target"].values(), strict=True)
    )
    assert not th.equal(saved["critic"]["qf0.0.weight"], saved["critic"]["qf1.0.weight"])

    if way == "save and load":
        zip_file = io.BytesIO()
        model.save(zip_file)
        zip_file.seek(0)
        other = TD3X.load(zip_file, device="cpu")
    else:
        other = tiny_agent(seed=1)
        other.set_parameters(model.get_parameters())
    for name, expected in saved.items():
        actual = getattr(other, name).state_dict()
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert th.equal(actual[key], value), f"{name}.{key}"
    expected_parameters, actual_parameters = model.get_parameters(), other.get_parameters()
    for name in ("actor.optimizer", "critic.optimizer"):
        expected_state, actual_state = expected_parameters[name]["state"], actual_parameters[name]["state"]
        assert expected_state
        assert actual_state.keys() == expected_state.keys()
        for idx, entry in expected_state.items():
            for key, value in entry.items():
                assert th.equal(actual_state[idx][key], value), f"{name} {idx} {key}"


def test_exploration_does_not_end_after_5000_steps() -> None:
    """
    Document 000: a decay of 0.999 a step leaves 0.7% of the noise after 5,000 of its millions of steps.
    With a floor of 10% the actions keep their noise.
    """
    actions: list[float] = []

    class Env(CountingEnv):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            actions.append(float(action[0]))
            return super().step(action)

    model = tiny_agent(
        vec_env(Env()),
        action_noise=ConstantNoise(),
        action_noise_decay=0.999,
        action_noise_min_scale=0.1,
        learning_starts=0,
        gradient_steps=0,
        train_freq=100,
    )
    set_parameters(model.actor, 0.0)
    model.learn(5000)
    assert actions[0] == 1.0
    assert actions[1000] == pytest.approx(0.999**1000, rel=1e-4)
    assert 0.999**4999 < 0.007
    np.testing.assert_allclose(actions[2303:], 0.1, rtol=1e-4)


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("algorithm", ["TD3X as DDPG", "zip of DDPG", "TD3X"])
def test_target_ends_with_the_episode(algorithm: str, done: bool) -> None:
    """Document 001, ``Skylark_DDPG``: ``y_true = r1 + gamma * critic_target(s1, a1)`` for terminal s1 as well."""
    if algorithm == "zip of DDPG":
        ddpg = tiny_agent(cls=DDPG, learning_rate=0.0, policy_kwargs={"net_arch": []}, gamma=0.5)
        zip_file = io.BytesIO()
        ddpg.save(zip_file)
        zip_file.seek(0)
        model = TD3X.load(zip_file, env=counting_vec_env(1), device="cpu")
    elif algorithm == "TD3X":
        model = linear_model()
    else:
        model = tiny_agent(
            policy_delay=1,
            target_policy_noise=0,
            learning_rate=0.0,
            policy_kwargs={"net_arch": [], "n_critics": 1},
            gamma=0.5,
        )
    state = model.policy.state_dict()
    for idx in range(model.critic.n_critics):
        state[f"critic_target.qf{idx}.0.weight"][:] = 0.0
        state[f"critic_target.qf{idx}.0.bias"][:] = 8.0
    model.policy.load_state_dict(state)
    store(model, obs=0.0, next_obs=0.0, reward=3.0, done=done, times=4)
    assert target_in_training(model) == pytest.approx(3.0 if done else 7.0)


@pytest.mark.parametrize("n_critics", [1, 2])
def test_a_critic_gives_one_value_for_an_action_of_three_dimensions(n_critics: int) -> None:
    """
    Document 001: ``Critic(s_dim + a_dim, 256, a_dim)`` has a value for each dimension of the action. Its TD3 unpacks
    one critic's output as two, and gives four arguments to an actor of three: here each network is called as built.
    """
    env = vec_env(CountingEnv(action_space=ACTION_SPACE))
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


def test_the_buffer_is_a_ring() -> None:
    """
    Document 001 pops the head of a list, which moves all its entries at every step. Here the oldest transition is
    overwritten in its place, and the memory is allocated once.
    """
    model = tiny_agent(counting_vec_env(1, [Episode(1000, True)]), buffer_size=7, gradient_steps=0)
    buffer = model.replay_buffer
    memory = buffer.rewards
    model.learn(5)
    assert buffer.rewards[:5, 0].tolist() == [1, 2, 3, 4, 5]
    assert buffer.size() == 5
    model.learn(5, reset_num_timesteps=False)
    # The rewards are the numbers of the steps: 8, 9 and 10 have taken the places of 1, 2 and 3
    assert buffer.rewards[:, 0].tolist() == [8, 9, 10, 4, 5, 6, 7]
    assert buffer.rewards is memory
    assert buffer.size() == 7
    samples = buffer.sample(500)
    assert set(samples.rewards[:, 0].tolist()) == {4, 5, 6, 7, 8, 9, 10}


def test_a_buffer_of_one_transition_is_none() -> None:
    """Document 002, trick 2: ``buffer_size=1, batch_size=1`` learns from the newest transition alone."""
    model = tiny_agent(buffer_size=1, batch_size=1)
    model.learn(23)
    assert model.replay_buffer.size() == 1
    # After episodes of 5, 3, 5, 3 and 5 steps, step 23 is the second of its episode
    assert model.replay_buffer.rewards.tolist() == [[2.0]]
    assert model._n_updates == 23 - 5


class RecordTraining(BaseCallback):
    """Keeps the number of updates and what the parameters of the actor are, after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.n_updates: list[int] = []

    def _on_step(self) -> bool:
        assert isinstance(self.model, TD3X)
        self.n_updates.append(self.model._n_updates)
        return True


@pytest.mark.parametrize("learning_starts", [0, 1, 10, 64])
@pytest.mark.parametrize("n_envs", [1, 4])
def test_warm_up_is_random_and_ends_when_it_should(learning_starts: int, n_envs: int) -> None:
    """
    Document 001's warm-up condition, ``i * 1000 < start_timesteps`` with i from 1, is false from the first episode;
    004 has no random actions. Here the first ``learning_starts`` timesteps of all envs are random, without updates,
    and the next is the policy's. A policy that always gives 1 tells them apart.
    """
    actions: list[float] = []

    class Env(CountingEnv):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            actions.append(float(action[0]))
            return super().step(action)

    model = tiny_agent(
        vec_env(*(Env() for _ in range(n_envs))), learning_rate=0.0, learning_starts=learning_starts, gradient_steps=1
    )
    set_parameters(model.actor, 0.0, output_bias=100.0)
    callback = RecordTraining()
    model.learn(80, callback=callback)
    random_steps = -(-learning_starts // n_envs) * n_envs
    assert all(abs(action) < 1.0 for action in actions[:random_steps])
    assert actions[random_steps:] == [1.0] * (80 - random_steps)
    if random_steps > 1:
        assert np.std(actions[:random_steps]) > 0.3
    # Updates after each vector step from which more than learning_starts timesteps are behind
    n_updates = [*callback.n_updates[1:], model._n_updates]
    expected = np.cumsum([(step + 1) * n_envs > learning_starts for step in range(80 // n_envs)])
    assert n_updates == expected.tolist()


def test_policy_delay_lowered_in_a_running_training_still_fires() -> None:
    """
    Document 000 compares its counter with ``delay_freq`` by ``==``: lowered below it while training, the actor would
    never be updated again.
    """

    class Lower(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps == 10:
                assert isinstance(self.model, TD3X)
                self.model.policy_delay = 2
            return True

    model = tiny_agent(policy_delay=1000, learning_starts=0)
    before = {key: value.clone() for key, value in model.actor.state_dict().items()}
    model.learn(9)
    assert all(th.equal(value, before[key]) for key, value in model.actor.state_dict().items())
    model.learn(10, callback=Lower(), reset_num_timesteps=False)
    assert not any(th.equal(value, before[key]) for key, value in model.actor.state_dict().items())


BOUNDS = {
    "asymmetric": ([-3.0], [1.0]),
    "wider than 1": ([-5.0], [5.0]),
    "far from 0": ([10.0], [12.0]),
    "narrow": ([-0.25], [0.5]),
    "each dimension its own": ([-3.0, -0.1, 7.0], [1.0, 0.1, 70.0]),
}


@pytest.mark.parametrize("case", BOUNDS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_the_policy_reaches_both_bounds(case: str, stochastic: bool) -> None:
    """
    Document 004, ``torch.clamp(self.model(state), min_actions, max_actions)`` of a tanh: bounds wider than 1 are out
    of its reach, and bounds far from 0 all it can do. Document 002 scales; so must predictions and executed actions.
    """
    low, high = (np.array(bound, np.float32) for bound in BOUNDS[case])
    executed: list[np.ndarray] = []

    class Env(CountingEnv):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            executed.append(action.copy())
            return super().step(action)

    model = tiny_agent(
        vec_env(Env(action_space=spaces.Box(low, high))),
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
            with th.no_grad():
                model.actor.log_std.bias.fill_(-20.0)  # type: ignore[union-attr, operator]
        action, _ = model.predict(np.zeros(2, np.float32), deterministic=True)
        np.testing.assert_allclose(action, expected, rtol=1e-6, atol=1e-6)
        model.learn(2, reset_num_timesteps=False)
        np.testing.assert_allclose(executed[-1], expected, rtol=1e-5, atol=1e-5)


class Walk(gym.Env[np.ndarray, np.ndarray]):
    """
    Walks for ever, for a reward of 1 a step; the observation is the number of the step.

    :param falls_at: in which step of each episode it falls, which is terminal
    :param blind: whether the observation is always 0 instead
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
    """
    Document 004 stores the ``done`` of a time-out, so that a walk without end is worth what is left of the episode.
    What the update sees: no terminal state, and the true last observation, not the first after the reset.
    """
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


def test_falls_are_terminal_also_at_the_time_limit() -> None:
    """The other side of it: a fall is terminal, and stays so in the very step in which the time runs out."""
    falls_before = tiny_agent(vec_env(TimeLimit(Walk(falls_at=2), 3)), gradient_steps=0)
    falls_at = tiny_agent(vec_env(TimeLimit(Walk(falls_at=3), 3)), gradient_steps=0)
    for model, episode in ((falls_before, 2), (falls_at, 3)):
        model.learn(12)
        buffer = model.replay_buffer
        terminal = (buffer.dones * (1 - buffer.timeouts))[:12, 0]
        assert terminal.tolist() == [float(step % episode == episode - 1) for step in range(12)]


def test_value_of_a_walk_without_end_is_bootstrapped() -> None:
    """
    With r = 1, γ = 0.5 and time-outs after 2 steps, that cannot be seen coming: Q = 1 / (1 - γ) = 2. Were they
    terminal: Q = 1 + γ Q / 2 = 4/3.
    """
    model = tiny_agent(
        vec_env(TimeLimit(Walk(blind=True), 2)),
        action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)),
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


def test_python_s_own_generator_is_not_needed() -> None:
    """Document 001 samples by ``random.sample``; the buffer's sampling is NumPy's, which ``seed`` governs."""
    state = random.getstate()
    model = tiny_agent(seed=None)
    model.learn(20)
    assert random.getstate() == state
