"""The update, computed by hand and in NumPy; the delay counter, the decay of exploration noise, and learning rates."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch as th
from envs import RecordingEnv, SpacesEnv, saved_and_loaded, tiny_agent, vec_env
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from noises import ConstantNoise
from sb3_contrib.common.utils import quantile_huber_loss as sb3_contrib_loss
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import LinearSchedule, configure_logger

from sb3_td3x import TD3X
from sb3_td3x.learner.equations import (
    actor_loss,
    critic_loss,
    huber_loss,
    next_values,
    quantile_huber_loss,
    smooth_target_actions,
    soft_update,
    td_target,
)
from sb3_td3x.priorities import N_LEVELS

NETWORKS = ("actor", "actor_target", "critic", "critic_target")


def vector_env(obs_dim: int = 1, action_dim: int = 1) -> SpacesEnv:
    return SpacesEnv(spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32), spaces.Box(-1, 1, (action_dim,), np.float32))


class WholeBuffer(ReplayBuffer):
    """A replay buffer whose batches are all its transitions, in the order in which they were stored."""

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        return self._get_samples(np.arange(self.size()), env=env)


def state_of(model: TD3X, *networks: str) -> dict[str, np.ndarray]:
    """Return copies of the networks' parameters, with SB3's names; by default of all networks."""
    return {
        key: value.numpy().copy()
        for key, value in model.policy.state_dict().items()
        if key.split(".")[0] in (networks or NETWORKS)
    }


def same(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(value, after[key]) for key, value in before.items())


def save_and_load(model: TD3X, **kwargs: Any) -> TD3X:
    """Save and load an agent, and give it the replay buffer of the original."""
    loaded = saved_and_loaded(model, env=model.get_env(), **kwargs)
    loaded.replay_buffer = model.replay_buffer
    loaded.set_logger(configure_logger(verbose=0))
    return loaded


# The update by hand. One observation, one action, no hidden layers:
#   π(s)  = tanh(w s + b)      with w = atanh(1/2), b = 0:   π(1) = 0.5, π(2) = 2 · 0.5 / (1 + 0.5²) = 0.8
#   π'(s) = tanh(w' s + b')    with w' = atanh(1/2) / 2:     π'(2) = 0.5
#   Q1(s, a)  = s + 2a         Q2(s, a)  = s/2 + a + 1       Q3(s, a)  = a
#   Q1'(s, a) = s + a + 1/2    Q2'(s, a) = 2s - 2a - 1       Q3'(s, a) = s - a - 1
# Transitions (s, a, r, s', done), γ = 1/2:
#   A = (1, -1/2, 1, 2, no)    B = (2, 1, -1, 1, yes)

ATANH_HALF = float(np.arctanh(0.5))
ONLINE = [(1.0, 2.0, 0.0), (0.5, 1.0, 1.0), (0.0, 1.0, 0.0)]
TARGET = [(1.0, 1.0, 0.5), (2.0, -2.0, -1.0), (1.0, -1.0, -1.0)]
QF_LR, LR, TAU = 0.1, 0.2, 0.25

# Targets: Q1'(2, .5) = 3, Q2'(2, .5) = 2, Q3'(2, .5) = 0.5, so y_A = 1 + γ min = 2 with the first two critics,
# 1 + γ 3 = 2.5 with only the first, and 1 + γ 0.5 = 1.25 with all three. B is terminal, so y_B = r = -1.
# Errors e = Q - y of (A, B), from Q1(A, B) = (0, 4), Q2(A, B) = (1, 3), Q3(A, B) = (-1/2, 1):
#   y_A = 2:     e1 = (-2, 5),     e2 = (-1, 4)                          L = (4 + 25)/2 + (1 + 16)/2 = 23
#   y_A = 2.5:   e1 = (-2.5, 5),   e2 = (-1.5, 4)                        L = 31.25/2 + 18.25/2 = 24.75; only Q1: 15.625
#   y_A = 1.25:  e1 = (-1.25, 5),  e2 = (-0.25, 4),  e3 = (-1.75, 2)     L = (26.5625 + 16.0625 + 7.0625)/2 = 24.84375
# Gradients, batch size 2: dL/du = Σ e s = e_A + 2 e_B,  dL/dv = Σ e a = -e_A/2 + e_B,  dL/dc = Σ e = e_A + e_B:
BY_HAND: dict[str, tuple[int, bool, float, float, list[tuple[float, float, float]]]] = {
    # Case: (n_critics, clipped_double_q, loss, mean of all Q, gradient of each critic)
    "minimum of two": (2, True, 23.0, 2.0, [(8.0, 6.0, 3.0), (7.0, 4.5, 3.0)]),
    "target from critic 1": (2, False, 24.75, 2.0, [(7.5, 6.25, 2.5), (6.5, 4.75, 2.5)]),
    "one critic": (1, True, 15.625, 2.0, [(7.5, 6.25, 2.5)]),
    "minimum of three": (3, True, 24.84375, 8.5 / 6, [(8.75, 5.625, 3.75), (7.75, 4.125, 3.75), (2.25, 2.875, 0.25)]),
}


def hand_computed_agent(n_critics: int = 2, **kwargs: Any) -> TD3X:
    """Make an agent with the networks above and the two transitions in its buffer."""
    model = tiny_agent(
        vector_env(),
        **{
            "learning_rate": LR,
            "qf_learning_rate": QF_LR,
            "tau": TAU,
            "gamma": 0.5,
            "target_policy_noise": 0.0,
            "policy_delay": 1,
            "buffer_size": 2,
            "replay_buffer_class": WholeBuffer,
            "policy_kwargs": {"net_arch": [], "n_critics": n_critics, "optimizer_class": th.optim.SGD},
            **kwargs,
        },
    )
    state = {
        "actor.mu.0.weight": [[ATANH_HALF]],
        "actor.mu.0.bias": [0.0],
        "actor_target.mu.0.weight": [[ATANH_HALF / 2]],
        "actor_target.mu.0.bias": [0.0],
    }
    for network, critics in (("critic", ONLINE), ("critic_target", TARGET)):
        for idx, (u, v, c) in enumerate(critics[:n_critics]):
            state[f"{network}.qf{idx}.0.weight"] = [[u, v]]
            state[f"{network}.qf{idx}.0.bias"] = [c]
    model.policy.load_state_dict({key: th.tensor(value) for key, value in state.items()})
    for obs, action, reward, next_obs, done in ((1, -0.5, 1, 2, False), (2, 1, -1, 1, True)):
        model.replay_buffer.add(
            np.array([[obs]]), np.array([[next_obs]]), np.array([[action]]), np.array([reward]), np.array([done]), [{}]
        )
    model.set_logger(configure_logger(verbose=0))
    return model


def critics_of(model: TD3X, network: str) -> list[tuple[float, float, float]]:
    """Return (u, v, c) of each critic."""
    state = state_of(model, network)
    n_critics = len(state) // 2
    return [
        (*state[f"{network}.qf{idx}.0.weight"][0].tolist(), state[f"{network}.qf{idx}.0.bias"].item())
        for idx in range(n_critics)
    ]


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", BY_HAND)
def test_one_update_computed_by_hand(case: str) -> None:
    """Compare critics, actor, target networks and logged values."""
    n_critics, clipped_double_q, loss, q_mean, gradients = BY_HAND[case]
    model = hand_computed_agent(n_critics, clipped_double_q=clipped_double_q)
    model.train(gradient_steps=1, batch_size=2)

    logged = model.logger.name_to_value
    assert logged["train/critic_loss"] == pytest.approx(loss)
    assert logged["train/q_mean"] == pytest.approx(q_mean)

    # Critics: θ - 0.1 dL/dθ, such as u1 = 1 - 0.8 = 0.2 with the minimum of two
    critics = [
        tuple(np.subtract(theta, QF_LR * np.array(grad))) for theta, grad in zip(ONLINE, gradients, strict=False)
    ]
    np.testing.assert_allclose(critics_of(model, "critic"), critics, atol=1e-6)

    # Actor, with the updated first critic: L = -mean(u1 s + v1 π(s) + c1),
    # dL/dw = -v1 mean((1 - π²) s) = -v1 (0.75 · 1 + 0.36 · 2) / 2 = -0.735 v1
    # dL/db = -v1 mean(1 - π²)     = -v1 (0.75 + 0.36) / 2         = -0.555 v1
    u1, v1, c1 = critics[0]
    assert logged["train/actor_loss"] == pytest.approx(-(1.5 * u1 + 0.65 * v1 + c1))
    actor = state_of(model, "actor")
    w, b = actor["actor.mu.0.weight"].item(), actor["actor.mu.0.bias"].item()
    assert w == pytest.approx(ATANH_HALF + LR * 0.735 * v1)
    assert b == pytest.approx(LR * 0.555 * v1)

    # Targets: θ' ← 0.25 θ + 0.75 θ'
    moved = [tuple(TAU * np.array(new) + (1 - TAU) * np.array(old)) for new, old in zip(critics, TARGET, strict=False)]
    np.testing.assert_allclose(critics_of(model, "critic_target"), moved, atol=1e-6)
    actor_target = state_of(model, "actor_target")
    assert actor_target["actor_target.mu.0.weight"].item() == pytest.approx(TAU * w + (1 - TAU) * ATANH_HALF / 2)
    assert actor_target["actor_target.mu.0.bias"].item() == pytest.approx(TAU * b)


def test_one_update_with_all_numbers_computed_by_hand() -> None:
    """The case "minimum of two", without any arithmetic in the test."""
    model = hand_computed_agent()
    model.train(gradient_steps=1, batch_size=2)
    assert critics_of(model, "critic") == [
        pytest.approx((0.2, 1.4, -0.3), abs=1e-6),
        pytest.approx((-0.2, 0.55, 0.7), abs=1e-6),
    ]
    # -(0.2 · 1 + 1.4 · 0.5 - 0.3 + 0.2 · 2 + 1.4 · 0.8 - 0.3) / 2 = -(0.6 + 1.22) / 2
    assert model.logger.name_to_value["train/actor_loss"] == pytest.approx(-0.91)
    actor = state_of(model, "actor")
    assert actor["actor.mu.0.weight"].item() == pytest.approx(0.5493061 + 0.2 * 1.029)
    assert actor["actor.mu.0.bias"].item() == pytest.approx(0.2 * 0.777)
    assert critics_of(model, "critic_target") == [
        pytest.approx((0.8, 1.1, 0.3), abs=1e-6),
        pytest.approx((1.45, -1.3625, -0.575), abs=1e-6),
    ]


@pytest.mark.parametrize("policy_delay", [2, 3, 5])
def test_only_critics_change_between_delayed_updates(policy_delay: int) -> None:
    """The actor and both target networks wait for the delayed step."""
    model = hand_computed_agent(policy_delay=policy_delay)
    start = state_of(model)
    for _ in range(policy_delay - 1):
        critic = state_of(model, "critic")
        model.train(gradient_steps=1, batch_size=2)
        assert not same(critic, state_of(model, "critic"))
        assert same({key: value for key, value in start.items() if not key.startswith("critic.")}, state_of(model))
    model.train(gradient_steps=1, batch_size=2)
    after = state_of(model)
    assert not any(np.array_equal(value, after[key]) for key, value in start.items())


def test_second_critic_is_trained_without_clipped_double_q() -> None:
    """Document 002, trick 6: critic 2 is trained, but its target network is not used."""
    model = hand_computed_agent(clipped_double_q=False)
    other = hand_computed_agent(clipped_double_q=False)
    state = other.policy.state_dict()
    state["critic_target.qf1.0.bias"] -= 100.0
    other.policy.load_state_dict(state)
    before = critics_of(model, "critic")[1]
    for each in (model, other):
        each.train(gradient_steps=1, batch_size=2)
    assert critics_of(model, "critic") == critics_of(other, "critic")
    assert critics_of(model, "critic")[1] != before


@pytest.mark.parametrize("tau", [1.0, 1])
def test_tau_1_means_no_target_networks(tau: float) -> None:
    """Document 002, trick 3: with tau = 1 and no delay, target networks equal the networks."""
    model = hand_computed_agent(tau=tau)
    for _ in range(3):
        model.train(gradient_steps=1, batch_size=2)
        state = state_of(model)
        for key in state:
            name, rest = key.split(".", 1)
            if not name.endswith("_target"):
                np.testing.assert_array_equal(state[key], state[f"{name}_target.{rest}"])


def test_tau_0_freezes_the_target_networks() -> None:
    """As in SB3."""
    model = hand_computed_agent(tau=0)
    before = state_of(model)
    model.train(gradient_steps=3, batch_size=2)
    after = state_of(model)
    for key, value in before.items():
        assert np.array_equal(after[key], value) == key.split(".")[0].endswith("_target"), key


# Target policy smoothing


def error_of_first_critic(**kwargs: Any) -> float:
    """Return the first critic's error for transition A, computed from its gradient in one update."""
    model = hand_computed_agent(**kwargs)
    model.train(gradient_steps=1, batch_size=2)
    # dL/dv = -e_A / 2 + e_B and dL/dc = e_A + e_B
    _, v, c = critics_of(model, "critic")[0]
    grad_v, grad_c = (2.0 - v) / QF_LR, -c / QF_LR
    return (grad_c - grad_v) / 1.5


def test_noise_clip_limits_the_noise_of_the_target_actions() -> None:
    """With a huge σ and c = 0.1: ã = 0.5 ± 0.1, Q2' = 3 - 2ã = 3 - 1 ∓ 0.2, y_A = 2 ∓ 0.1, e_A = -2 ± 0.1."""
    kwargs = {"target_policy_noise": 1e6, "target_noise_clip": 0.1}
    errors = {round(error_of_first_critic(seed=seed, **kwargs), 4) for seed in range(8)}
    assert errors == {-1.9, -2.1}


def test_smoothed_target_actions_stay_within_bounds() -> None:
    """With a huge σ and c: ã = ±1, Q1' = 2.5 ± 1, Q2' = 3 ∓ 2, min = 1 or 1.5, y_A = 1.5 or 1.75."""
    kwargs = {"target_policy_noise": 1e6, "target_noise_clip": 1e6}
    errors = {round(error_of_first_critic(seed=seed, **kwargs), 4) for seed in range(8)}
    assert errors == {-1.5, -1.75}


@pytest.mark.parametrize("off", [{"target_policy_noise": 0.0}, {"target_noise_clip": 0.0}])
def test_noise_or_clip_of_zero_turns_smoothing_off(off: dict[str, float]) -> None:
    for seed in range(3):
        assert error_of_first_critic(**{"target_policy_noise": 1.0, "target_noise_clip": 1.0, **off, "seed": seed}) == (
            pytest.approx(-2.0, abs=1e-4)
        )


def test_smoothing_of_a_batch() -> None:
    """The noise is independent in each dimension, and is clipped."""
    th.manual_seed(0)
    actions = th.zeros(20_000, 3)
    noise = smooth_target_actions(actions, 0.2, 10.0)
    np.testing.assert_allclose(noise.mean(0), 0.0, atol=0.01)
    np.testing.assert_allclose(noise.std(0), 0.2, rtol=0.03)
    assert abs(np.corrcoef(noise.T.numpy()) - np.eye(3)).max() < 0.03
    clipped = smooth_target_actions(actions, 0.2, 0.1)
    assert clipped.abs().max().item() == pytest.approx(0.1)
    assert (clipped.abs() == clipped.abs().max()).float().mean().item() == pytest.approx(0.617, abs=0.02)
    assert smooth_target_actions(th.full((1000, 1), 0.95), 0.2, 0.5).max().item() == 1.0
    assert smooth_target_actions(th.full((1000, 1), -0.95), 0.2, 0.5).min().item() == -1.0
    assert th.equal(actions, th.zeros(20_000, 3)), "the actor's output must not change"


def test_equations() -> None:
    """For a batch of two, with two and three critics."""
    rewards, dones = th.tensor([[1.0], [2.0]]), th.tensor([[0.0], [1.0]])
    next_q = th.tensor([[[10.0], [1.0]], [[8.0], [1.0]], [[9.0], [1.0]]])
    smallest = next_values(next_q, True, 2)
    assert smallest.tolist() == [[8.0], [1.0]]
    assert next_values(next_q, False, 2).tolist() == [[10.0], [1.0]]
    assert td_target(rewards, dones, 0.5, smallest).tolist() == [[5.0], [2.0]]
    assert td_target(rewards, dones, th.tensor([[0.25], [1.0]]), smallest).tolist() == [[3.0], [2.0]]
    q = th.tensor([[[1.0], [3.0]], [[0.0], [2.0]]])
    target = th.tensor([[1.0], [1.0]])
    loss, grad = critic_loss(q, target)
    assert loss.item() == (0 + 4) / 2 + (1 + 1) / 2
    assert grad.flatten().tolist() == [0, 2, -1, 1]
    loss, grad = huber_loss(q, target)
    assert loss.item() == (0 + 1.5) / 2 + (0.5 + 0.5) / 2
    assert grad.flatten().tolist() == [0, 0.5, -0.5, 0.5]
    loss, grad = actor_loss(th.tensor([[1.0], [4.0]]))
    assert loss.item() == -2.5
    assert grad.flatten().tolist() == [-0.5, -0.5]
    target_params = [th.tensor([0.0, 4.0])]
    soft_update([th.tensor([1.0, 0.0])], target_params, 0.25)
    assert target_params[0].tolist() == [0.25, 3.0]


def test_smallest_quantiles_of_all_target_critics() -> None:
    """One state; two critics with three quantiles each, of which one or none is dropped."""
    next_q = th.tensor([[[1.0, 5.0, 9.0]], [[2.0, 3.0, 4.0]]])

    def kept(clipped_double_q: bool, n_to_drop: int) -> list[float]:
        return sorted(next_values(next_q, clipped_double_q, n_to_drop)[0].tolist())

    assert kept(True, 1) == [1, 2, 3, 4]
    assert kept(True, 0) == [1, 2, 3, 4, 5, 9]
    assert kept(False, 1) == [1, 5]
    rewards, dones = th.tensor([[10.0]]), th.tensor([[0.0]])
    assert td_target(rewards, dones, 0.5, next_values(next_q, False, 1)).sort().values.tolist() == [[10.5, 12.5]]


@settings(deadline=None)
@given(n=st.integers(1, 3), batch=st.integers(1, 4), k=st.integers(1, 4), m=st.integers(1, 5), seed=st.integers(0, 99))
def test_quantile_loss_is_that_of_sb3_contrib(n: int, batch: int, k: int, m: int, seed: int) -> None:
    """Its loss is the mean over the critics, TD3X's the sum. The gradient is autograd's."""
    generator = th.Generator().manual_seed(seed)
    q = th.randn(n, batch, k, generator=generator).requires_grad_()
    target = 2 * th.randn(batch, m, generator=generator)
    expected = n * sb3_contrib_loss(q.transpose(0, 1), target.unsqueeze(1), sum_over_quantiles=False)
    expected.backward()
    assert q.grad is not None
    loss, grad = quantile_huber_loss(q.detach(), target)
    th.testing.assert_close(loss, expected.detach())
    th.testing.assert_close(grad, q.grad)


# The whole algorithm in NumPy, with gradients by hand


class Mlp:
    """
    A ReLU network with its gradients.

    :param state: Parameters with names as in ``nn.Sequential``
    :param prefix: Prefix of its parameters' names
    :param tanh: Whether the output is squashed by tanh
    """

    def __init__(self, state: dict[str, np.ndarray], prefix: str, tanh: bool = False) -> None:
        indices = sorted({int(key[len(prefix) :].split(".")[0]) for key in state if key.startswith(prefix)})
        self.params = [
            state[f"{prefix}{idx}.{name}"].astype(np.float64) for idx in indices for name in ("weight", "bias")
        ]
        self.tanh = tanh

    def forward(self, x: np.ndarray) -> np.ndarray:
        self.inputs: list[np.ndarray] = []
        n_layers = len(self.params) // 2
        for layer in range(n_layers):
            self.inputs.append(x)
            x = x @ self.params[2 * layer].T + self.params[2 * layer + 1]
            if layer < n_layers - 1:
                x = np.maximum(x, 0)
        self.output = np.tanh(x) if self.tanh else x
        return self.output

    def backward(self, grad: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the gradients of the parameters and of the input, given the gradient of the output."""
        if self.tanh:
            grad = grad * (1 - self.output**2)
        grads: list[np.ndarray] = []
        for layer in reversed(range(len(self.inputs))):
            x = self.inputs[layer]
            grads = [grad.T @ x, grad.sum(0), *grads]
            grad = grad @ self.params[2 * layer]
            if layer > 0:
                grad = grad * (x > 0)
        return grads, grad


class Adam:
    """Algorithm 1 of Kingma and Ba 2015."""

    def __init__(self, lr: float) -> None:
        self.lr, self.t = lr, 0
        self.m: list[np.ndarray] = []
        self.v: list[np.ndarray] = []

    def step(self, params: list[np.ndarray], grads: list[np.ndarray]) -> None:
        if not self.m:
            self.m, self.v = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
        self.t += 1
        for p, g, m, v in zip(params, grads, self.m, self.v, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g**2 - v)
            p -= self.lr * (m / (1 - 0.9**self.t)) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)


class Sgd:
    """Plain gradient descent."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def step(self, params: list[np.ndarray], grads: list[np.ndarray]) -> None:
        for p, g in zip(params, grads, strict=True):
            p -= self.lr * g


class NumpyTD3:
    """
    Algorithm 1 of Fujimoto et al. 2018, with separate critics and document 000's delay counter.

    :param model: Agent with the arguments and initial parameters
    """

    def __init__(self, model: TD3X) -> None:
        state = state_of(model)
        self.n_critics = len({key.split(".")[1] for key in state if key.startswith("critic.qf")})
        self.actor = Mlp(state, "actor.mu.", tanh=True)
        self.actor_target = Mlp(state, "actor_target.mu.", tanh=True)
        self.critics = [Mlp(state, f"critic.qf{idx}.") for idx in range(self.n_critics)]
        self.critic_targets = [Mlp(state, f"critic_target.qf{idx}.") for idx in range(self.n_critics)]
        optimizer_class = Adam if isinstance(model.actor.optimizer, th.optim.Adam) else Sgd
        self.actor_optimizer: Adam | Sgd = optimizer_class(1e-3)
        self.critic_optimizers = [optimizer_class(3e-3) for _ in self.critics]
        self.model = model
        self.delay_counter = -1

    def update(self, batch: ReplayBufferSamples) -> None:
        obs, actions, next_obs, dones, rewards = (tensor.numpy().astype(np.float64) for tensor in batch[:5])
        model = self.model
        self.delay_counter += 1
        if model.prioritized_replay_alpha > 0:
            # Random numbers of the draw by priority
            th.rand(N_LEVELS, len(obs), dtype=th.float64)
        # Draw the same random numbers as PyTorch
        noise = th.empty(actions.shape).normal_(0, model.target_policy_noise).numpy()
        next_actions = self.actor_target.forward(next_obs)
        next_actions = np.clip(next_actions + np.clip(noise, -model.target_noise_clip, model.target_noise_clip), -1, 1)
        next_qs = [critic.forward(np.hstack([next_obs, next_actions])) for critic in self.critic_targets]
        next_qs = next_qs if model.clipped_double_q else next_qs[:1]
        n_kept = len(next_qs) * (model.policy.n_quantiles - model.top_quantiles_to_drop_per_net)
        next_q = np.sort(np.hstack(next_qs), axis=1)[:, : n_kept if model.policy.n_quantiles > 1 else 1]
        discounts = model.gamma if batch.discounts is None else batch.discounts.numpy()
        target = rewards + (1 - dones) * discounts * next_q
        for critic, optimizer in zip(self.critics, self.critic_optimizers, strict=True):
            loss_grad = self.loss_grad(critic.forward(np.hstack([obs, actions])), target)
            optimizer.step(critic.params, critic.backward(loss_grad / len(target))[0])
        if self.delay_counter == model.policy_delay - 1:
            pi = self.actor.forward(obs)
            q = self.critics[0].forward(np.hstack([obs, pi]))
            dq_dinput = self.critics[0].backward(np.full(q.shape, -1 / q.size))[1]
            grads = self.actor.backward(dq_dinput[:, obs.shape[1] :])[0]
            self.actor_optimizer.step(self.actor.params, grads)
            pairs = [(self.actor, self.actor_target), *zip(self.critics, self.critic_targets, strict=True)]
            for network, target_network in pairs:
                for p, p_target in zip(network.params, target_network.params, strict=True):
                    p_target *= 1 - model.tau
                    p_target += model.tau * p
            self.delay_counter = -1

    def loss_grad(self, q: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the gradient of a critic's loss for each transition of the batch."""
        n_quantiles = q.shape[1]
        if n_quantiles == 1:
            error = q - target
            return 2 * error if self.model.prioritized_replay_alpha == 0 else np.clip(error, -1, 1)
        errors = q[:, :, None] - target[:, None, :]
        levels = (np.arange(n_quantiles)[:, None] + 0.5) / n_quantiles
        return (np.where(errors > 0, 1 - levels, levels) * np.clip(errors, -1, 1)).mean(axis=2) / n_quantiles

    def assert_same_as(self, model: TD3X) -> None:
        state = state_of(model)
        networks = {
            "actor.mu.": self.actor,
            "actor_target.mu.": self.actor_target,
            **{f"critic.qf{idx}.": critic for idx, critic in enumerate(self.critics)},
            **{f"critic_target.qf{idx}.": critic for idx, critic in enumerate(self.critic_targets)},
        }
        for prefix, network in networks.items():
            squashed = network.tanh
            for actual, expected in zip(Mlp(state, prefix, squashed).params, network.params, strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5, err_msg=prefix)


NUMPY_CASES: dict[str, dict[str, Any]] = {
    "one critic": {"n_critics": 1},
    "two critics": {},
    "three critics": {"n_critics": 3},
    "target from critic 1": {"clipped_double_q": False},
    "adam": {"optimizer_class": th.optim.Adam},
    "adam, three critics, target from critic 1": {
        "optimizer_class": th.optim.Adam,
        "n_critics": 3,
        "clipped_double_q": False,
    },
    "no delay, no target networks": {"policy_delay": 1, "tau": 1.0},
    "delay of 3, strong smoothing": {"policy_delay": 3, "target_policy_noise": 1.0, "target_noise_clip": 0.3},
    "n-step": {"n_steps": 3},
    "prioritized": {"prioritized_replay_alpha": 0.7},
    "quantiles": {"n_quantiles": 5},
    "quantiles, three critics, prioritized": {
        "n_quantiles": 4,
        "n_critics": 3,
        "top_quantiles_to_drop_per_net": 0,
        "prioritized_replay_alpha": 0.7,
    },
    "quantiles of critic 1": {"n_quantiles": 3, "clipped_double_q": False},
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", NUMPY_CASES)
def test_updates_equal_td3_in_numpy(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 updates in calls of 1, 4 and 9, with the same batches."""
    kwargs = {"n_critics": 2, "n_quantiles": 1, "optimizer_class": th.optim.SGD, **NUMPY_CASES[case]}
    names = ("n_critics", "n_quantiles", "optimizer_class")
    policy_kwargs = {"net_arch": [6, 5], **{name: kwargs.pop(name) for name in names}}
    model = tiny_agent(
        vector_env(3, 2),
        learning_rate=1e-3,
        qf_learning_rate=3e-3,
        buffer_size=100,
        policy_kwargs=policy_kwargs,
        seed=3,
        **{"tau": 0.1, "gamma": 0.9, **kwargs},
    )
    rng = np.random.default_rng(0)
    for _ in range(60):
        obs, next_obs = rng.normal(size=(2, 1, 3))
        action, reward, done = rng.uniform(-1, 1, (1, 2)), rng.normal(size=1), rng.random(1) < 0.2
        model.replay_buffer.add(obs, next_obs, action, reward, done, [{}])
    batches: list[ReplayBufferSamples] = []
    sample = model.replay_buffer.sample

    def recorded_sample(*args: Any, **kwargs: Any) -> ReplayBufferSamples:
        batches.append(sample(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr(model.replay_buffer, "sample", recorded_sample)
    model.set_logger(configure_logger(verbose=0))
    # Start with target networks that differ from the networks
    state = model.policy.state_dict()
    for key in state:
        if "target" in key:
            state[key] *= 0.5
    model.policy.load_state_dict(state)
    reference = NumpyTD3(model)
    th.manual_seed(11)
    for gradient_steps in (1, 4, 9):
        model.train(gradient_steps=gradient_steps, batch_size=16)
    th.manual_seed(11)
    for batch in batches:
        reference.update(batch)
    assert len(batches) == 14
    reference.assert_same_as(model)


# The delay counter


class RecordingSGD(th.optim.SGD):
    """An optimizer that records its steps."""

    steps: ClassVar[list[th.optim.Optimizer]] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps.append(self)
        return super().step(*args, **kwargs)


def document_counter(delay_freq: int) -> Iterator[bool]:
    """Yield whether each call of document 000's ``update`` updates the actor and the target networks."""
    delay_counter = -1
    while True:
        delay_counter += 1
        fires = delay_counter == delay_freq
        if fires:
            delay_counter = -1
        yield fires


def updates_of(model: TD3X, gradient_steps: int) -> list[bool]:
    """Train, and return for each update of the critics whether an update of the actor followed."""
    RecordingSGD.steps.clear()
    model.train(gradient_steps=gradient_steps, batch_size=2)
    fires: list[bool] = []
    for optimizer in RecordingSGD.steps:
        if optimizer is model.critic.optimizer:
            fires.append(False)
        else:
            assert optimizer is model.actor.optimizer
            assert fires[-1] is False, "more than one update of the actor after one of the critics"
            fires[-1] = True
    return fires


def recording_agent(policy_delay: int) -> TD3X:
    return hand_computed_agent(
        policy_delay=policy_delay,
        qf_learning_rate=1e-3,
        learning_rate=1e-3,
        policy_kwargs={"net_arch": [], "optimizer_class": RecordingSGD},
    )


@settings(max_examples=25, deadline=None)
@given(
    delay_freq=st.integers(0, 4),
    calls=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    saved_after=st.integers(0, 6),
)
def test_delay_counter_equals_that_of_document_000(delay_freq: int, calls: list[int], saved_after: int) -> None:
    """
    The actor is updated after the same critic updates, with ``policy_delay = delay_freq + 1``.

    Neither the number of updates per call of ``train`` nor saving and loading changes this. Target networks change
    only at the same time.
    """
    model = recording_agent(policy_delay=delay_freq + 1)
    counter = document_counter(delay_freq)
    for idx, gradient_steps in enumerate(calls):
        if idx == saved_after:
            model = save_and_load(model)
        before = state_of(model, "actor_target", "critic_target")
        expected = [next(counter) for _ in range(gradient_steps)]
        assert updates_of(model, gradient_steps) == expected
        assert same(before, state_of(model, "actor_target", "critic_target")) == (not any(expected))


@pytest.mark.parametrize(("before", "after"), [(7, 2), (5, 1), (3, 2)])
@pytest.mark.parametrize("loaded", [False, True])
def test_policy_delay_can_be_lowered_during_training(before: int, after: int, loaded: bool) -> None:
    """Document 000 compares its counter with ``==``. If it were above the new delay, the actor would stop learning."""
    model = recording_agent(policy_delay=before)
    assert not any(updates_of(model, before - 1))
    if loaded:
        model = save_and_load(model, policy_delay=after)
    else:
        model.policy_delay = after
    fires = updates_of(model, 20)
    assert any(fires[:after])
    assert fires[fires.index(True) :] == [idx % after == 0 for idx in range(20 - fires.index(True))]


def test_train_with_0_gradient_steps_does_nothing() -> None:
    model = hand_computed_agent()
    before = state_of(model)
    model.train(gradient_steps=0)
    assert same(before, state_of(model))
    assert model._n_updates == 0


# The decay of the exploration noise


class RecordScale(BaseCallback):
    """A callback that records ``action_noise_scale`` after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def _on_step(self) -> bool:
        self.scales.append(self.model.action_noise_scale)
        return True


def zero_agent(*envs: RecordingEnv, **kwargs: Any) -> TD3X:
    """Make an agent whose policy is always 0, so that its actions are the noise."""
    model = tiny_agent(vec_env(*envs), learning_rate=0.0, action_noise=ConstantNoise(0.8), **kwargs)
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
    return model


def document_noise(factor: float, n_actions: int) -> np.ndarray:
    """Return the noise of document 000's ``policy``, which multiplies it by the factor after each action."""
    noises, train_noise = [], 0.8
    for _ in range(n_actions):
        noises.append(train_noise)
        train_noise *= factor
    return np.array(noises)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("factor", [0.9, 0.99, 1.0])
def test_executed_noise_decays_as_in_document_000(n_envs: int, factor: float) -> None:
    """
    After 12 random actions, σ_t = σ_0 factor^t, where t counts the policy's timesteps in all envs.

    So the noise at a timestep does not depend on the number of envs.
    """
    envs = [RecordingEnv() for _ in range(n_envs)]
    model = zero_agent(*envs, learning_starts=12, action_noise_decay=factor)
    callback = RecordScale()
    model.learn(12 + 200, callback=callback)
    expected = document_noise(factor, 201)
    warm_up = 12 // n_envs
    for env in envs:
        np.testing.assert_allclose(np.ravel(env.actions)[warm_up:], expected[:200:n_envs], rtol=1e-5, atol=1e-7)
    # Callbacks see the scale of the next action
    assert set(callback.scales[:warm_up]) == {1.0}
    np.testing.assert_allclose(callback.scales[warm_up:], expected[n_envs::n_envs] / 0.8, rtol=1e-9)


def test_noise_has_a_minimum() -> None:
    """0.8 · max(0.25, 0.5^t) = 0.8, 0.4, 0.2, 0.2, ..."""
    env = RecordingEnv()
    zero_agent(env, learning_starts=0, action_noise_decay=0.5, action_noise_min_scale=0.25).learn(8)
    np.testing.assert_allclose(np.ravel(env.actions), [0.8, 0.4, *[0.2] * 6], rtol=1e-6)


def test_random_actions_do_not_reduce_the_noise() -> None:
    """If the warm-up ends within a step of 4 envs, all 4 actions are random."""
    model = zero_agent(*(RecordingEnv() for _ in range(4)), learning_starts=10, action_noise_decay=0.5)
    model.learn(12)
    assert model.action_noise_scale == 1.0
    model.learn(4, reset_num_timesteps=False)
    assert model.action_noise_scale == 0.5**4


@pytest.mark.parametrize("between", ["nothing", "save and load", "load with other envs"])
def test_decay_continues_in_a_second_training(between: str) -> None:
    """``learn`` resets ``num_timesteps`` by default, as with the zoo's ``-i``, but not the counter of the decay."""
    env = RecordingEnv()
    model = zero_agent(env, learning_starts=5, action_noise_decay=0.99)
    model.learn(25)
    assert model.action_noise_scale == pytest.approx(0.99**20)
    n_envs = 1
    if between == "save and load":
        model = save_and_load(model)
    elif between == "load with other envs":
        n_envs = 3
        env = RecordingEnv()
        model = saved_and_loaded(model, env=vec_env(env, RecordingEnv(), RecordingEnv()))
    assert model.action_noise_scale == pytest.approx(0.99**20)
    env.actions.clear()
    model.learn(15, reset_num_timesteps=True)
    assert model.num_timesteps == 15
    warm_up = -(-5 // n_envs)
    expected = 0.8 * 0.99 ** (20 + n_envs * np.arange(15 // n_envs - warm_up))
    np.testing.assert_allclose(np.ravel(env.actions)[warm_up:], expected, rtol=1e-5)


def test_predictions_do_not_reduce_the_noise() -> None:
    """In document 000, ``policy`` always does."""
    model = zero_agent(RecordingEnv(), action_noise_decay=0.9, learning_starts=0)
    model.learn(3)
    scale = model.action_noise_scale
    for deterministic in (True, False):
        assert model.predict(np.zeros(2, np.float32), deterministic=deterministic)[0] == [0.0]
    assert model.action_noise_scale == scale


# Learning rates


class RecordRates(BaseCallback):
    """A callback that records the learning rates of the last update and the logged ones, by timestep."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[int, tuple[float, float]] = {}
        self.logged: dict[int, tuple[Any, Any]] = {}

    def _on_step(self) -> bool:
        step = self.num_timesteps - 1
        self.rates[step] = (
            self.model.actor.optimizer.param_groups[0]["lr"],
            self.model.critic.optimizer.param_groups[0]["lr"],
        )
        values = self.logger.name_to_value
        self.logged[step] = (values.get("train/learning_rate"), values.get("train/qf_learning_rate"))
        return True


RATES: dict[str, tuple[dict[str, Any], Callable[[float], float], Callable[[float], float]]] = {
    # Case: (arguments, learning rate of the actor, learning rate of the critics), as functions of remaining progress
    "one for both": ({"learning_rate": 2e-3}, lambda p: 2e-3, lambda p: 2e-3),
    "document 000": ({"learning_rate": 1e-4, "qf_learning_rate": 3e-4}, lambda p: 1e-4, lambda p: 3e-4),
    "integer zero": ({"learning_rate": 1e-4, "qf_learning_rate": 0}, lambda p: 1e-4, lambda p: 0.0),
    "string": ({"learning_rate": 1e-3, "qf_learning_rate": "lin_7e-4"}, lambda p: 1e-3, lambda p: 7e-4 * p),
    "strings": ({"learning_rate": "lin_1e-3", "qf_learning_rate": "lin_7e-4"}, lambda p: 1e-3 * p, lambda p: 7e-4 * p),
    "string for both": ({"learning_rate": "lin_1e-3"}, lambda p: 1e-3 * p, lambda p: 1e-3 * p),
    "functions": (
        {"learning_rate": lambda p: 1e-3 * p**2, "qf_learning_rate": LinearSchedule(1e-3, 1e-4, 0.5)},
        lambda p: 1e-3 * p**2,
        lambda p: max(1e-4, 1e-3 - 9e-4 * (1 - p) / 0.5),
    ),
    "schedule only for the actor": (
        {"learning_rate": lambda p: 1e-3 * p, "qf_learning_rate": 1e-3},
        lambda p: 1e-3 * p,
        lambda p: 1e-3,
    ),
}


@pytest.mark.parametrize("case", RATES)
@pytest.mark.parametrize("loaded", [False, True])
def test_learning_rates_reach_optimizers_and_log(case: str, loaded: bool) -> None:
    """Each optimizer has its own rate, also after loading."""
    arguments, actor_rate, critic_rate = RATES[case]
    model = tiny_agent(**arguments)
    if loaded:
        model = save_and_load(model)
    callback = RecordRates()
    model.learn(40, callback=callback, log_interval=1000)
    for step in (6, 20, 39):
        # Updates after a step use the progress including that step
        remaining = 1 - step / 40
        expected = (actor_rate(remaining), critic_rate(remaining))
        assert callback.rates[step] == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert callback.logged[step] == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("rates", "frozen", "trained"),
    [
        ({"learning_rate": 0.0}, {"actor", "critic"}, set()),
        ({"learning_rate": 0.0, "qf_learning_rate": 1e-3}, {"actor"}, {"critic"}),
        ({"learning_rate": 1e-3, "qf_learning_rate": 0.0}, {"critic"}, {"actor"}),
    ],
)
def test_learning_rates_of_0(rates: dict[str, float], frozen: set[str], trained: set[str]) -> None:
    """The zoo's ``enjoy`` loads every agent with ``learning_rate=0.0``."""
    model = tiny_agent(**rates)
    before = state_of(model)
    model.learn(30)
    after = state_of(model)
    moved = {key.split(".")[0] for key in before if not np.array_equal(before[key], after[key])}
    assert moved & {"actor", "critic"} == trained
    assert not moved & frozen


def test_load_with_another_learning_rate_of_the_critics() -> None:
    model = tiny_agent()
    model.learn(10)
    model = save_and_load(model, qf_learning_rate="lin_4e-3")
    callback = RecordRates()
    model.learn(20, callback=callback)
    assert callback.rates[19] == pytest.approx((1e-3, 4e-3 * 0.05))
