"""TD3X compared with SB3's TD3 and DDPG: the same weights, data and random numbers give the same weights."""

from typing import Any

import numpy as np
import pytest
import torch as th
from comparing import assert_same_weights
from envs import SpacesEnv, image_env, saved_and_loaded, tiny_agent
from gymnasium import spaces
from networks import CenteredActivation, LearnedActivation
from noises import normal_noise
from stable_baselines3 import DDPG, TD3
from stable_baselines3.common.envs import SimpleMultiObsEnv
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule, configure_logger, set_random_seed
from torch import nn

from sb3_td3x import TD3X

N_UPDATES = 200
SMALL = {"net_arch": [32, 24]}

# With images, rounding errors grow, because Adam makes steps of full size from gradients near zero. SB3's TD3 with
# weights changed by a factor of 1 + 1e-7 diverges as fast. Small, damped steps prevent this
DAMPED = {"optimizer_kwargs": {"eps": 1e-2}}
SMALL_STEPS = {"learning_rate": 1e-4}


def dict_image_env() -> SimpleMultiObsEnv:
    return SimpleMultiObsEnv(num_col=2, num_row=2, discrete_actions=False, channel_last=False)


def dict_env() -> SpacesEnv:
    observation_space = spaces.Dict({"position": spaces.Box(-1, 1, (3,)), "velocity": spaces.Box(-5, 5, (2,))})
    return SpacesEnv(observation_space, spaces.Box(-1, 1, (2,)))


class SmallCnn(BaseFeaturesExtractor):
    """A CNN with batch normalization, whose running statistics are copied to the target networks."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=16)
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 4, 8, 4, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16)
        )
        self.cnn(th.zeros(2, *observation_space.shape))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.cnn(observations)


def fill_buffer(model: OffPolicyAlgorithm, transitions: int = 400) -> None:
    """Fill the replay buffer with random transitions, without drawing global random numbers."""
    rng = np.random.default_rng(0)
    space = model.observation_space
    space.seed(0)
    assert model.replay_buffer is not None
    for _ in range(transitions):
        obs, next_obs = [random_obs(space) for _ in range(2)]
        action = rng.uniform(-1, 1, (1, *model.action_space.shape)).astype(np.float32)
        done = np.array([rng.random() < 0.1])
        model.replay_buffer.add(
            obs, next_obs, action, rng.normal(size=1), done, [{"TimeLimit.truncated": rng.random() < 0.5}]
        )


def random_obs(space: spaces.Space) -> Any:
    """Draw an observation of one env."""
    sample = space.sample()
    return {key: value[None] for key, value in sample.items()} if isinstance(sample, dict) else sample[None]


def assert_close_weights(sb3: OffPolicyAlgorithm, td3x: TD3X) -> None:
    expected, actual = sb3.policy.state_dict(), td3x.policy.state_dict()
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key].numpy(), value.numpy(), rtol=1e-5, atol=2e-6, err_msg=key)


def train(model: OffPolicyAlgorithm) -> None:
    """Make updates with given transitions and random numbers, in calls of different lengths."""
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
    "activation with parameters": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "activation_fn": LearnedActivation}},
    ),
    "other optimizer": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "optimizer_class": th.optim.RMSprop, "optimizer_kwargs": {"momentum": 0.5}}},
    ),
    "optimizer of whole matrices": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "optimizer_class": th.optim.Adafactor}},
    ),
    "activation over the features": (
        "MlpPolicy",
        "Pendulum-v1",
        {"policy_kwargs": {**SMALL, "activation_fn": CenteredActivation}},
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
    "batch normalization": (
        "CnnPolicy",
        image_env,
        {**SMALL_STEPS, "policy_kwargs": {**SMALL, **DAMPED, "features_extractor_class": SmallCnn}},
    ),
    "dict": ("MultiInputPolicy", dict_env, {"policy_kwargs": {**SMALL, "n_critics": 3}}),
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
def test_same_weights_as_sb3(case: str) -> None:
    """After 200 updates; TD3X loads SB3's initial weights from a zip file."""
    policy, make_env, kwargs = CASES[case]
    env = make_env if isinstance(make_env, str) else make_env()
    sb3 = tiny_agent(env, policy, TD3, **kwargs)
    td3x = saved_and_loaded(sb3, env=sb3.env if isinstance(env, str) else env)
    for model in (sb3, td3x):
        train(model)
    assert_close_weights(sb3, td3x)
    assert td3x._n_updates == N_UPDATES


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", ["mlp", "three critics", "cnn", "dict"])
def test_same_initial_weights_as_sb3(case: str) -> None:
    policy, make_env, kwargs = CASES[case]
    env = make_env if isinstance(make_env, str) else make_env()
    assert_same_weights(*(tiny_agent(env, policy, cls, seed=5, buffer_size=1, **kwargs) for cls in (TD3, TD3X)))


@pytest.mark.lowest_sb3
def test_same_weights_as_sb3_ddpg() -> None:
    """Document 001: one critic, no delay and no smoothing, by TD3X's arguments and by loading a DDPG agent."""
    ddpg = tiny_agent("Pendulum-v1", cls=DDPG, policy_kwargs=dict(SMALL))
    loaded = saved_and_loaded(ddpg, env=ddpg.env)
    policy_kwargs = {**SMALL, "n_critics": 1}
    built = tiny_agent("Pendulum-v1", policy_delay=1, target_policy_noise=0, policy_kwargs=policy_kwargs)
    for model in (ddpg, loaded, built):
        train(model)
    assert_close_weights(ddpg, loaded)
    assert_close_weights(ddpg, built)


@pytest.mark.lowest_sb3
def test_same_rollout_as_sb3() -> None:
    """The same seed gives the same transitions."""
    models = []
    for cls in (TD3, TD3X):
        kwargs = {"seed": 7, "learning_starts": 300, "gradient_steps": 0, "action_noise": normal_noise(0.3)}
        model = tiny_agent("Pendulum-v1", cls=cls, **kwargs)
        model.learn(700)
        models.append(model)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        expected, actual = (getattr(model.replay_buffer, name)[:700] for model in models)
        # SB3 scales actions with other operations
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4, err_msg=name)


def test_fused_and_plain_adam_give_the_same_weights() -> None:
    models = []
    for optimizer_kwargs in ({}, {"foreach": False}):
        model = tiny_agent("Pendulum-v1", policy_kwargs={**SMALL, "optimizer_kwargs": optimizer_kwargs})
        fill_buffer(model)
        model.set_logger(configure_logger(verbose=0))
        set_random_seed(1)
        model.train(gradient_steps=50, batch_size=32)
        models.append(model)
    assert models[0].critic.optimizer.param_groups[0]["fused"] is True
    assert_close_weights(models[1], models[0])
