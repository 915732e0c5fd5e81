"""TD3X against SB3's TD3 and DDPG: same weights, data and random draws give the same parameters."""

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import DDPG, TD3
from stable_baselines3.common.envs import FakeImageEnv, SimpleMultiObsEnv
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule, configure_logger, set_random_seed
from torch import nn

from sb3_td3x import TD3X

N_UPDATES = 200
SMALL = {"net_arch": [32, 24]}


# With images, rounding errors grow: Adam makes steps of full size out of gradients near zero, and units switch on and
# off. SB3's TD3 with weights that differ by a factor of 1 + 1e-7 drifts apart as far. Small, damped steps prevent it.
DAMPED = {"optimizer_kwargs": {"eps": 1e-3}}
SMALL_STEPS = {"learning_rate": 1e-4}


def image_env() -> FakeImageEnv:
    return FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=False)


def dict_image_env() -> SimpleMultiObsEnv:
    return SimpleMultiObsEnv(num_col=2, num_row=2, discrete_actions=False, channel_last=False)


class DictEnv(gym.Env):
    """Two vectors as observation; only its spaces are used."""

    observation_space = spaces.Dict({"position": spaces.Box(-1, 1, (3,)), "velocity": spaces.Box(-5, 5, (2,))})
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}


class SmallCnn(BaseFeaturesExtractor):
    """A CNN with batch normalisation, whose running statistics the targets copy."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=16)
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 4, 8, 4, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16)
        )
        self.cnn(th.zeros(2, *observation_space.shape))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.cnn(observations)


class PReLUNet(nn.PReLU):
    """An activation with a parameter of its own in each critic."""


class CentredReLU(nn.Module):
    """An activation that looks at all features of a layer."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return th.relu(x - x.mean(dim=1, keepdim=True))


def fill_buffer(model: OffPolicyAlgorithm, transitions: int = 400) -> None:
    """Random transitions, drawn from a generator of their own."""
    rng = np.random.default_rng(0)
    space = model.observation_space
    space.seed(0)
    assert model.replay_buffer is not None
    for _ in range(transitions):
        obs, next_obs = [_batch(space) for _ in range(2)]
        action = rng.uniform(-1, 1, (1, *model.action_space.shape)).astype(np.float32)
        done = np.array([rng.random() < 0.1])
        model.replay_buffer.add(
            obs, next_obs, action, rng.normal(size=1), done, [{"TimeLimit.truncated": rng.random() < 0.5}]
        )


def _batch(space: spaces.Space) -> Any:
    sample = space.sample()
    return {key: value[None] for key, value in sample.items()} if isinstance(sample, dict) else sample[None]


def assert_same_parameters(sb3: OffPolicyAlgorithm, td3x: TD3X) -> None:
    expected, actual = sb3.policy.state_dict(), td3x.policy.state_dict()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key].numpy(), value.numpy(), rtol=1e-5, atol=2e-6, err_msg=key)


def train_both(sb3: OffPolicyAlgorithm, td3x: TD3X) -> None:
    """The same updates with the same random draws, in calls of different lengths."""
    for model in (sb3, td3x):
        fill_buffer(model)
        model.set_logger(configure_logger(verbose=0))
        set_random_seed(1)
        for progress, gradient_steps in ((1.0, 1), (0.9, 50), (0.5, N_UPDATES - 51)):
            model._current_progress_remaining = progress
            model.train(gradient_steps=gradient_steps, batch_size=32)


CASES = {
    "mlp": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": SMALL}),
    "one critic": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {**SMALL, "n_critics": 1}}),
    "three critics": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {**SMALL, "n_critics": 3}}),
    "split net_arch": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {"net_arch": {"pi": [16], "qf": [24, 16, 8]}}}),
    "no hidden layer": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {"net_arch": {"pi": [], "qf": []}}}),
    "activation with parameters": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": {**SMALL, "activation_fn": PReLUNet}}),
    "other optimizer": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "optimizer_class": th.optim.RMSprop, "optimizer_kwargs": {"momentum": 0.5}}},
    ),
    "optimizer that looks at whole matrices": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "optimizer_class": th.optim.Adafactor}},
    ),
    "activation over the features": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "activation_fn": CentredReLU}},
    ),
    "policy_delay": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": SMALL, "policy_delay": 3, "tau": 0.05}),
    "no target networks": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": SMALL, "policy_delay": 1, "tau": 1.0}),
    "schedule": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": SMALL, "learning_rate": LinearSchedule(2e-3, 1e-4, 1.0)},
    ),
    "n-step": ("MlpPolicy", "Pendulum-v1", {"policy_kwargs": SMALL, "n_steps": 3, "gamma": 0.9}),
    "cnn": (
        "CnnPolicy",
        image_env,
        {**SMALL_STEPS, "policy_kwargs": {**SMALL, **DAMPED, "features_extractor_kwargs": {"features_dim": 16}}},
    ),
    "cnn, shared": (
        "CnnPolicy",
        image_env,
        {
            "policy_kwargs": {
                **SMALL,
                "features_extractor_kwargs": {"features_dim": 16},
                "share_features_extractor": True,
                "n_critics": 3,
            }
        },
    ),
    "batch normalisation": (
        "CnnPolicy",
        image_env,
        {**SMALL_STEPS, "policy_kwargs": {**SMALL, **DAMPED, "features_extractor_class": SmallCnn}},
    ),
    "dict": ("MultiInputPolicy", DictEnv, {"policy_kwargs": {**SMALL, "n_critics": 3}}),
    "dict with images": (
        "MultiInputPolicy",
        dict_image_env,
        {
            **SMALL_STEPS,
            "policy_kwargs": {**SMALL, **DAMPED, "features_extractor_kwargs": {"cnn_output_dim": 16}, "n_critics": 3},
        },
    ),
}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", CASES)
def test_same_parameters_as_sb3(case: str) -> None:
    """200 updates; SB3's weights come over in its zip."""
    policy, make_env, kwargs = CASES[case]
    env = make_env if isinstance(make_env, str) else make_env()
    sb3 = TD3(policy, env, seed=0, buffer_size=500, device="cpu", **kwargs)
    zip_file = io.BytesIO()
    sb3.save(zip_file)
    zip_file.seek(0)
    # Some cases have classes of this module
    td3x = TD3X.load(zip_file, env=env if not isinstance(env, str) else sb3.env, device="cpu", trusted=True)
    train_both(sb3, td3x)
    assert_same_parameters(sb3, td3x)
    assert td3x._n_updates == N_UPDATES


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", ["mlp", "three critics", "cnn", "dict"])
def test_same_seed_same_initial_parameters_as_sb3(case: str) -> None:
    policy, make_env, kwargs = CASES[case]
    env = make_env if isinstance(make_env, str) else make_env()
    models = [cls(policy, env, seed=5, buffer_size=1, device="cpu", **kwargs) for cls in (TD3, TD3X)]
    expected, actual = (model.policy.state_dict() for model in models)
    for key, value in expected.items():
        assert th.equal(actual[key], value), key


@pytest.mark.lowest_sb3
def test_same_parameters_as_sb3_ddpg() -> None:
    """Document 001: one critic, no delay, no smoothing; by TD3X's own arguments and from DDPG's zip."""
    ddpg = DDPG("MlpPolicy", "Pendulum-v1", seed=0, buffer_size=500, policy_kwargs=dict(SMALL))
    zip_file = io.BytesIO()
    ddpg.save(zip_file)
    zip_file.seek(0)
    loaded = TD3X.load(zip_file, env=ddpg.env)
    built = TD3X(
        "MlpPolicy",
        "Pendulum-v1",
        policy_delay=1,
        target_policy_noise=0,
        buffer_size=500,
        seed=0,
        policy_kwargs={**SMALL, "n_critics": 1},
    )
    train_both(ddpg, loaded)
    fill_buffer(built)
    built.set_logger(configure_logger(verbose=0))
    set_random_seed(1)
    built.train(gradient_steps=N_UPDATES, batch_size=32)
    assert_same_parameters(ddpg, loaded)
    assert_same_parameters(ddpg, built)


@pytest.mark.lowest_sb3
def test_same_rollout_as_sb3() -> None:
    """The same seed collects the same transitions: warm-up, noise and storage draw the same random numbers."""
    noise = NormalActionNoise(np.zeros(1), 0.3 * np.ones(1))
    models = []
    for cls in (TD3, TD3X):
        model = cls(
            "MlpPolicy",
            "Pendulum-v1",
            seed=7,
            learning_starts=300,
            gradient_steps=0,
            action_noise=noise,
            policy_kwargs=SMALL,
        )
        model.learn(700)
        models.append(model)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        expected, actual = (getattr(model.replay_buffer, name)[:700] for model in models)
        # The same draws; actions are scaled by other operations
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4, err_msg=name)


def test_fused_and_plain_adam_agree() -> None:
    """The default kernel is a matter of speed alone."""
    models = []
    for optimizer_kwargs in ({}, {"foreach": False}):
        model = TD3X(
            "MlpPolicy",
            "Pendulum-v1",
            seed=0,
            buffer_size=500,
            policy_kwargs={**SMALL, "optimizer_kwargs": optimizer_kwargs},
        )
        fill_buffer(model)
        model.set_logger(configure_logger(verbose=0))
        set_random_seed(1)
        model.train(gradient_steps=50, batch_size=32)
        models.append(model)
    assert models[0].critic.optimizer.param_groups[0]["fused"] is True
    assert_same_parameters(models[1], models[0])
