"""The update on paper and in NumPy, the delay counter, the decay of the exploration noise, the learning rates."""

import io
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, tiny_agent
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise, NormalActionNoise
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.utils import LinearSchedule, configure_logger
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from sb3_td3x.learner.equations import actor_loss, critic_loss, smooth_target_actions, soft_update, td_target

NETWORKS = ("actor", "actor_target", "critic", "critic_target")


class SpacesEnv(gym.Env[np.ndarray, np.ndarray]):
    """Only its spaces matter, and that it can be reset."""

    def __init__(self, obs_dim: int = 1, action_dim: int = 1) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.action_space = spaces.Box(-1, 1, (action_dim,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape or (), np.float32), {}


class WholeBuffer(ReplayBuffer):
    """Every batch is the whole memory, in the order of storing."""

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        return self._get_samples(np.arange(self.size()), env=env)


def state_of(model: TD3X, *networks: str) -> dict[str, np.ndarray]:
    """Copies of all parameters of the networks, with SB3's names."""
    return {
        key: value.numpy().copy()
        for key, value in model.policy.state_dict().items()
        if key.split(".")[0] in (networks or NETWORKS)
    }


def same(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(value, after[key]) for key, value in before.items())


def save_and_load(model: TD3X, **kwargs: Any) -> TD3X:
    """Through a zip; the replay buffer goes along by itself, as users keep it by ``save_replay_buffer``."""
    zip_file = io.BytesIO()
    model.save(zip_file)
    zip_file.seek(0)
    loaded = TD3X.load(zip_file, env=model.get_env(), device="cpu", trusted=True, **kwargs)
    loaded.replay_buffer = model.replay_buffer
    loaded.set_logger(configure_logger(verbose=0))
    return loaded


# On paper. One observation, one action, no hidden layers:
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

# Targets: Q1'(2, .5) = 3, Q2'(2, .5) = 2, Q3'(2, .5) = 0.5, so that y_A = 1 + γ min = 2 with the first two critics,
# 1 + γ 3 = 2.5 with the first alone, 1 + γ 0.5 = 1.25 with all three; B is terminal: y_B = r = -1.
# Errors e = Q - y of (A, B), from Q1(A, B) = (0, 4), Q2(A, B) = (1, 3), Q3(A, B) = (-1/2, 1):
#   y_A = 2:     e1 = (-2, 5),     e2 = (-1, 4)                          L = (4 + 25)/2 + (1 + 16)/2 = 23
#   y_A = 2.5:   e1 = (-2.5, 5),   e2 = (-1.5, 4)                        L = 31.25/2 + 18.25/2 = 24.75; Q1 alone 15.625
#   y_A = 1.25:  e1 = (-1.25, 5),  e2 = (-0.25, 4),  e3 = (-1.75, 2)     L = (26.5625 + 16.0625 + 7.0625)/2 = 24.84375
# Gradients, batch size 2: dL/du = Σ e s = e_A + 2 e_B,  dL/dv = Σ e a = -e_A/2 + e_B,  dL/dc = Σ e = e_A + e_B:
PAPER: dict[str, tuple[int, bool, float, float, list[tuple[float, float, float]]]] = {
    # name: (n_critics, clipped_double_q, loss, mean of all Q, gradient of each critic)
    "minimum of two": (2, True, 23.0, 2.0, [(8.0, 6.0, 3.0), (7.0, 4.5, 3.0)]),
    "critic 1 alone decides": (2, False, 24.75, 2.0, [(7.5, 6.25, 2.5), (6.5, 4.75, 2.5)]),
    "one critic": (1, True, 15.625, 2.0, [(7.5, 6.25, 2.5)]),
    "minimum of three": (3, True, 24.84375, 8.5 / 6, [(8.75, 5.625, 3.75), (7.75, 4.125, 3.75), (2.25, 2.875, 0.25)]),
}


def paper_model(n_critics: int = 2, **kwargs: Any) -> TD3X:
    """The model above with its two transitions in the buffer."""
    model = TD3X(
        "MlpPolicy",
        SpacesEnv(),
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
            "device": "cpu",
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
    """(u, v, c) of each critic."""
    state = state_of(model, network)
    n_critics = len(state) // 2
    return [
        (*state[f"{network}.qf{idx}.0.weight"][0].tolist(), state[f"{network}.qf{idx}.0.bias"].item())
        for idx in range(n_critics)
    ]


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", PAPER)
def test_one_whole_update_on_paper(case: str) -> None:
    """Critics by -0.1 times the gradients above, then the actor, then all targets; also what is logged."""
    n_critics, clipped_double_q, loss, q_mean, gradients = PAPER[case]
    model = paper_model(n_critics, clipped_double_q=clipped_double_q)
    model.train(gradient_steps=1, batch_size=2)

    logged = model.logger.name_to_value
    assert logged["train/critic_loss"] == pytest.approx(loss)
    assert logged["train/q_mean"] == pytest.approx(q_mean)

    # Critics: θ - 0.1 dL/dθ, for instance u1 = 1 - 0.8 = 0.2 with the minimum of two
    critics = [
        tuple(np.subtract(theta, QF_LR * np.array(grad))) for theta, grad in zip(ONLINE, gradients, strict=False)
    ]
    np.testing.assert_allclose(critics_of(model, "critic"), critics, atol=1e-6)

    # Actor, through the updated first critic: L = -mean(u1 s + v1 π(s) + c1),
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


def test_numbers_of_the_paper_update_written_out() -> None:
    """The case "minimum of two" once more, all numbers computed by hand, none by the test."""
    model = paper_model()
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
def test_between_delayed_updates_only_critics_move(policy_delay: int) -> None:
    """All three other networks, the critics' targets included, wait for the delayed step."""
    model = paper_model(policy_delay=policy_delay)
    start = state_of(model)
    for _ in range(policy_delay - 1):
        critic = state_of(model, "critic")
        model.train(gradient_steps=1, batch_size=2)
        assert not same(critic, state_of(model, "critic"))
        assert same({key: value for key, value in start.items() if not key.startswith("critic.")}, state_of(model))
    model.train(gradient_steps=1, batch_size=2)
    after = state_of(model)
    assert not any(np.array_equal(value, after[key]) for key, value in start.items())


def test_second_critic_is_trained_where_the_first_alone_decides() -> None:
    """Document 002, trick 6: critic 2 is kept and trained, its target copy just has no say."""
    model = paper_model(clipped_double_q=False)
    other = paper_model(clipped_double_q=False)
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
    """Document 002, trick 3: with tau = 1 and no delay the targets are the networks themselves, bit for bit."""
    model = paper_model(tau=tau)
    for _ in range(3):
        model.train(gradient_steps=1, batch_size=2)
        state = state_of(model)
        for key in state:
            name, rest = key.split(".", 1)
            if not name.endswith("_target"):
                np.testing.assert_array_equal(state[key], state[f"{name}_target.{rest}"])


def test_tau_0_freezes_the_targets() -> None:
    """As in SB3."""
    model = paper_model(tau=0)
    before = state_of(model)
    model.train(gradient_steps=3, batch_size=2)
    after = state_of(model)
    for key, value in before.items():
        assert np.array_equal(after[key], value) == key.split(".")[0].endswith("_target"), key


# Smoothing


def paper_targets(**kwargs: Any) -> float:
    """The first critic's error in transition A after one update without delay, read from its gradient."""
    model = paper_model(**kwargs)
    model.train(gradient_steps=1, batch_size=2)
    # dL/dv = -e_A / 2 + e_B and dL/dc = e_A + e_B
    _, v, c = critics_of(model, "critic")[0]
    grad_v, grad_c = (2.0 - v) / QF_LR, -c / QF_LR
    return (grad_c - grad_v) / 1.5


def test_noise_clip_limits_the_noise_of_the_target_actions() -> None:
    """
    A huge σ and c = 0.1: ã = 0.5 ± 0.1, Q2' = 3 - 2ã = 3 - 1 ∓ 0.2, y_A = 2 ∓ 0.1, e_A = -2 ± 0.1.
    """
    errors = set()
    for seed in range(8):
        errors.add(round(paper_targets(target_policy_noise=1e6, target_noise_clip=0.1, seed=seed), 4))
    assert errors == {-1.9, -2.1}


def test_smoothed_target_actions_stay_within_bounds() -> None:
    """A huge σ and c: ã = ±1, Q1' = 2.5 ± 1, Q2' = 3 ∓ 2, min = 1 or 1.5, y_A = 1.5 or 1.75."""
    errors = set()
    for seed in range(8):
        errors.add(round(paper_targets(target_policy_noise=1e6, target_noise_clip=1e6, seed=seed), 4))
    assert errors == {-1.5, -1.75}


@pytest.mark.parametrize("off", [{"target_policy_noise": 0.0}, {"target_noise_clip": 0.0}])
def test_noise_or_clip_of_zero_turns_smoothing_off(off: dict[str, float]) -> None:
    for seed in range(3):
        assert paper_targets(**{"target_policy_noise": 1.0, "target_noise_clip": 1.0, **off, "seed": seed}) == (
            pytest.approx(-2.0, abs=1e-4)
        )


def test_smoothing_of_a_batch() -> None:
    """Mean and deviation of the noise, its clip and the bounds, in every dimension by itself."""
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
    assert th.equal(actions, th.zeros(20_000, 3)), "the actor's output itself must not change"


def test_formulas_of_tensors() -> None:
    """The same functions on a batch of two and three critics."""
    rewards, dones = th.tensor([[1.0], [2.0]]), th.tensor([[0.0], [1.0]])
    next_q = th.tensor([[[10.0], [1.0]], [[8.0], [1.0]], [[9.0], [1.0]]])
    assert td_target(rewards, dones, 0.5, next_q, True).tolist() == [[5.0], [2.0]]
    assert td_target(rewards, dones, 0.5, next_q, False).tolist() == [[6.0], [2.0]]
    assert td_target(rewards, dones, th.tensor([[0.25], [1.0]]), next_q, True).tolist() == [[3.0], [2.0]]
    q = th.tensor([[[1.0], [3.0]], [[0.0], [2.0]]])
    assert critic_loss(q, th.tensor([[1.0], [1.0]])).item() == (0 + 4) / 2 + (1 + 1) / 2
    assert actor_loss(th.tensor([[1.0], [4.0]])).item() == -2.5
    target = [th.tensor([0.0, 4.0])]
    soft_update([th.tensor([1.0, 0.0])], target, 0.25)
    assert target[0].tolist() == [0.25, 3.0]


# The whole algorithm a second time, in NumPy with gradients by hand


class Mlp:
    """
    A ReLU network with its gradients.

    :param state: parameters with names as in ``nn.Sequential``
    :param prefix: what stands before its names
    :param tanh: whether the output is squashed
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
        """Gradients of the parameters and of the input, for the gradient of the output."""
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
    """Kingma and Ba 2015, algorithm 1."""

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
    TD3 as in Fujimoto et al. 2018, algorithm 1, one critic after the other, by the document's counter.

    :param model: where arguments and initial parameters come from
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
        # The same draws as PyTorch's and SB3's
        noise = th.empty(actions.shape).normal_(0, model.target_policy_noise).numpy()
        next_actions = self.actor_target.forward(next_obs)
        next_actions = np.clip(next_actions + np.clip(noise, -model.target_noise_clip, model.target_noise_clip), -1, 1)
        next_qs = [critic.forward(np.hstack([next_obs, next_actions])) for critic in self.critic_targets]
        next_q = np.min(next_qs, axis=0) if model.clipped_double_q else next_qs[0]
        discounts = model.gamma if batch.discounts is None else batch.discounts.numpy()
        target = rewards + (1 - dones) * discounts * next_q
        for critic, optimizer in zip(self.critics, self.critic_optimizers, strict=True):
            error = critic.forward(np.hstack([obs, actions])) - target
            optimizer.step(critic.params, critic.backward(2 * error / len(error))[0])
        if self.delay_counter == model.policy_delay - 1:
            pi = self.actor.forward(obs)
            self.critics[0].forward(np.hstack([obs, pi]))
            dq_dinput = self.critics[0].backward(np.full((len(obs), 1), -1 / len(obs)))[1]
            grads = self.actor.backward(dq_dinput[:, obs.shape[1] :])[0]
            self.actor_optimizer.step(self.actor.params, grads)
            pairs = [(self.actor, self.actor_target), *zip(self.critics, self.critic_targets, strict=True)]
            for network, target_network in pairs:
                for p, p_target in zip(network.params, target_network.params, strict=True):
                    p_target *= 1 - model.tau
                    p_target += model.tau * p
            self.delay_counter = -1

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
    "critic 1 alone decides": {"clipped_double_q": False},
    "adam": {"optimizer_class": th.optim.Adam},
    "adam, three critics, critic 1 alone decides": {
        "optimizer_class": th.optim.Adam,
        "n_critics": 3,
        "clipped_double_q": False,
    },
    "no delay, no target networks": {"policy_delay": 1, "tau": 1.0},
    "delay of 3, strong smoothing": {"policy_delay": 3, "target_policy_noise": 1.0, "target_noise_clip": 0.3},
    "n-step": {"n_steps": 3},
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", NUMPY_CASES)
def test_same_as_td3_in_numpy(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """14 updates in calls of 1, 4 and 9, with smoothing; the batches are those that the buffer gave."""
    kwargs = {"n_critics": 2, "optimizer_class": th.optim.SGD, **NUMPY_CASES[case]}
    policy_kwargs = {"net_arch": [6, 5], **{name: kwargs.pop(name) for name in ("n_critics", "optimizer_class")}}
    model = TD3X(
        "MlpPolicy",
        SpacesEnv(3, 2),
        learning_rate=1e-3,
        qf_learning_rate=3e-3,
        buffer_size=100,
        policy_kwargs=policy_kwargs,
        seed=3,
        device="cpu",
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
    # The networks start apart from their targets
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
    """Notes every step."""

    steps: ClassVar[list[th.optim.Optimizer]] = []

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps.append(self)
        return super().step(*args, **kwargs)


def document_counter(delay_freq: int) -> Iterator[bool]:
    """Document 000's ``update``: for each call whether the actor and the targets are updated."""
    delay_counter = -1
    while True:
        delay_counter += 1
        fires = delay_counter == delay_freq
        if fires:
            delay_counter = -1
        yield fires


def updates_of(model: TD3X, gradient_steps: int) -> list[bool]:
    """Trains; for each update of the critics whether one of the actor followed it."""
    RecordingSGD.steps.clear()
    model.train(gradient_steps=gradient_steps, batch_size=2)
    fires: list[bool] = []
    for optimizer in RecordingSGD.steps:
        if optimizer is model.critic.optimizer:
            fires.append(False)
        else:
            assert optimizer is model.actor.optimizer
            assert fires[-1] is False, "at most one update of the actor after one of the critics"
            fires[-1] = True
    return fires


def recording_model(policy_delay: int) -> TD3X:
    return paper_model(
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
def test_delay_counter_is_that_of_document_000(delay_freq: int, calls: list[int], saved_after: int) -> None:
    """
    ``policy_delay = delay_freq + 1`` fires after the same critic updates as the document's counter, whatever the calls
    of ``train`` are and whenever the agent is saved and loaded in between; the targets move then and only then.
    """
    model = recording_model(policy_delay=delay_freq + 1)
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
def test_delay_lowered_while_training_still_fires(before: int, after: int, loaded: bool) -> None:
    """
    Document 000 compares its counter by ``==``: at 5 of 7, lowered to 2, it would never come by again.
    """
    model = recording_model(policy_delay=before)
    assert not any(updates_of(model, before - 1))
    if loaded:
        model = save_and_load(model, policy_delay=after)
    else:
        model.policy_delay = after
    fires = updates_of(model, 20)
    assert any(fires[:after])
    assert fires[fires.index(True) :] == [idx % after == 0 for idx in range(20 - fires.index(True))]


def test_train_without_updates_does_nothing() -> None:
    """SB3's ``train(0)`` is legal: a callback may well ask for no updates."""
    model = paper_model()
    before = state_of(model)
    model.train(gradient_steps=0)
    assert same(before, state_of(model))
    assert model._n_updates == 0


# The decay of the exploration noise


class ConstantNoise(ActionNoise):
    """The same noise always: what reaches the env shows the scale."""

    def __init__(self, value: float = 0.8) -> None:
        super().__init__()
        self.value = value

    def __call__(self) -> np.ndarray:
        return np.full(1, self.value, np.float32)

    def __repr__(self) -> str:
        return f"ConstantNoise({self.value})"


class RecordingEnv(CountingEnv):
    """Keeps the actions."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[float] = []

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.actions.append(float(action[0]))
        return super().step(action)


class RecordScale(BaseCallback):
    """Keeps ``action_noise_scale`` after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def _on_step(self) -> bool:
        assert isinstance(self.model, TD3X)
        self.scales.append(self.model.action_noise_scale)
        return True


def zero_actor_model(envs: list[RecordingEnv], **kwargs: Any) -> TD3X:
    """Its policy gives 0 always and learns nothing, so that actions are noise alone."""
    model = tiny_agent(
        DummyVecEnv([lambda env=env: env for env in envs]), learning_rate=0.0, action_noise=ConstantNoise(), **kwargs
    )
    with th.no_grad():
        for parameter in model.actor.parameters():
            parameter.zero_()
    return model


def document_noise(factor: float, n_actions: int) -> np.ndarray:
    """Document 000's ``policy``: noise of the given action, then the reduction."""
    noises, train_noise = [], 0.8
    for _ in range(n_actions):
        noises.append(train_noise)
        train_noise *= factor
    return np.array(noises)


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("factor", [0.9, 0.99, 1.0])
def test_executed_noise_decays_as_in_document_000(n_envs: int, factor: float) -> None:
    """
    In a real training, after 12 random actions: σ_t = σ_0 factor^t, t the policy's env timesteps before the action,
    of all envs together. So 4 envs have at any env timestep the noise that one has.
    """
    envs = [RecordingEnv() for _ in range(n_envs)]
    model = zero_actor_model(envs, learning_starts=12, action_noise_decay=factor)
    callback = RecordScale()
    model.learn(12 + 200, callback=callback)
    expected = document_noise(factor, 201)
    warm_up = 12 // n_envs
    for env in envs:
        np.testing.assert_allclose(env.actions[warm_up:], expected[:200:n_envs], rtol=1e-5, atol=1e-7)
    # The scale that the callback sees is that of the next action
    assert set(callback.scales[:warm_up]) == {1.0}
    np.testing.assert_allclose(callback.scales[warm_up:], expected[n_envs::n_envs] / 0.8, rtol=1e-9)


def test_scale_at_chosen_timesteps() -> None:
    """factor^t for t of the length of a whole training, through an agent's own counter."""
    model = zero_actor_model([RecordingEnv()], action_noise_decay=0.999, learning_starts=0, gradient_steps=0)
    expected = document_noise(0.999, 1001) / 0.8
    steps = 0
    for t in (0, 1, 2, 10, 100, 1000):
        if t > steps:
            model.learn(t - steps, reset_num_timesteps=False)
            steps = t
        assert model.action_noise_scale == pytest.approx(expected[t], rel=1e-9)


def test_noise_stops_decaying_at_the_floor() -> None:
    """0.8 · max(0.25, 0.5^t): 0.8, 0.4, 0.2, 0.2, ..."""
    env = RecordingEnv()
    zero_actor_model([env], learning_starts=0, action_noise_decay=0.5, action_noise_min_scale=0.25).learn(8)
    np.testing.assert_allclose(env.actions, [0.8, 0.4, *[0.2] * 6], rtol=1e-6)


def test_random_actions_have_the_full_noise_and_do_not_count() -> None:
    """Warm-up takes nothing from the exploration; when it ends inside a vector step of 4, all 4 were random."""
    model = zero_actor_model([RecordingEnv() for _ in range(4)], learning_starts=10, action_noise_decay=0.5)
    model.learn(12)
    assert model.action_noise_scale == 1.0
    model.learn(4, reset_num_timesteps=False)
    assert model.action_noise_scale == 0.5**4


@pytest.mark.parametrize("between", ["nothing", "save and load", "load with other envs"])
def test_decay_goes_on_in_a_later_training(between: str) -> None:
    """
    ``learn`` resets ``num_timesteps``, and warms up anew, whenever it isn't told otherwise (the zoo's ``-i``):
    the decay has a counter of its own, which also lives in the zip.
    """
    env = RecordingEnv()
    model = zero_actor_model([env], learning_starts=5, action_noise_decay=0.99)
    model.learn(25)
    assert model.action_noise_scale == pytest.approx(0.99**20)
    n_envs = 1
    if between == "save and load":
        model = save_and_load(model)
    elif between == "load with other envs":
        n_envs = 3
        zip_file = io.BytesIO()
        model.save(zip_file)
        zip_file.seek(0)
        env = RecordingEnv()
        envs = DummyVecEnv([lambda: env, RecordingEnv, RecordingEnv])
        model = TD3X.load(zip_file, env=envs, device="cpu", trusted=True)
    assert model.action_noise_scale == pytest.approx(0.99**20)
    env.actions.clear()
    model.learn(15, reset_num_timesteps=True)
    assert model.num_timesteps == 15
    warm_up = -(-5 // n_envs)
    expected = 0.8 * 0.99 ** (20 + n_envs * np.arange(15 // n_envs - warm_up))
    np.testing.assert_allclose(env.actions[warm_up:], expected, rtol=1e-5)


def test_predictions_and_evaluations_do_not_count() -> None:
    """Only actions of the training reduce the noise, unlike the document's ``policy`` with ``train`` left on."""
    model = zero_actor_model([RecordingEnv()], action_noise_decay=0.9, learning_starts=0)
    model.learn(3)
    scale = model.action_noise_scale
    for deterministic in (True, False):
        assert model.predict(np.zeros(2, np.float32), deterministic=deterministic)[0] == [0.0]
    assert model.action_noise_scale == scale


# Learning rates


class RecordRates(BaseCallback):
    """Keeps the learning rates of the updates before each step, and what was logged of them."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: dict[int, tuple[float, float]] = {}
        self.logged: dict[int, tuple[Any, Any]] = {}

    def _on_step(self) -> bool:
        assert isinstance(self.model, TD3X)
        step = self.num_timesteps - 1
        self.rates[step] = (
            self.model.actor.optimizer.param_groups[0]["lr"],
            self.model.critic.optimizer.param_groups[0]["lr"],
        )
        values = self.logger.name_to_value
        self.logged[step] = (values.get("train/learning_rate"), values.get("train/qf_learning_rate"))
        return True


RATES: dict[str, tuple[dict[str, Any], Callable[[float], float], Callable[[float], float]]] = {
    # name: (arguments, actor's learning rate, critics'), by the progress remaining
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
    "schedule of the actor alone": (
        {"learning_rate": lambda p: 1e-3 * p, "qf_learning_rate": 1e-3},
        lambda p: 1e-3 * p,
        lambda p: 1e-3,
    ),
}


@pytest.mark.parametrize("case", RATES)
@pytest.mark.parametrize("loaded", [False, True])
def test_learning_rates_reach_optimizers_and_log(case: str, loaded: bool) -> None:
    """Each optimizer runs at its own rate at every point of the training, also after loading."""
    arguments, actor_rate, critic_rate = RATES[case]
    model = tiny_agent(**arguments)
    if loaded:
        model = save_and_load(model)
    callback = RecordRates()
    model.learn(40, callback=callback, log_interval=1000)
    for step in (6, 20, 39):
        # The updates after a step see the progress with that step
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
def test_learning_rate_of_zero_is_legal(rates: dict[str, float], frozen: set[str], trained: set[str]) -> None:
    """The zoo's ``enjoy`` loads every agent with ``learning_rate=0.0``; a 0 for one network must not stop the other."""
    model = tiny_agent(**rates)
    before = state_of(model)
    model.learn(30)
    after = state_of(model)
    moved = {key.split(".")[0] for key in before if not np.array_equal(before[key], after[key])}
    assert moved & {"actor", "critic"} == trained
    assert not moved & frozen


def test_critics_rate_is_changed_at_loading() -> None:
    """``load(..., qf_learning_rate=...)`` is how a training goes on with another rate."""
    model = tiny_agent(action_noise=NormalActionNoise(np.zeros(1), 0.1 * np.ones(1)))
    model.learn(10)
    model = save_and_load(model, qf_learning_rate="lin_4e-3")
    callback = RecordRates()
    model.learn(20, callback=callback)
    assert callback.rates[19] == pytest.approx((1e-3, 4e-3 * 0.05))
