"""Agents with classes and functions of the user, which only a pickle can hold."""

import functools
import io
import pathlib
from typing import Any

import hostile
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, tiny, tiny_agent, zip_of
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from torch import nn

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.policies import TD3XPolicy
from sb3_td3x.shaping import (
    ShapingBatch,
)


def saved(model: Any) -> bytes:
    """Return what ``save`` writes."""
    return zip_of(model).getvalue()


@pytest.fixture(scope="module")
def good_sb3() -> bytes:
    """Return the file of the same agent of SB3."""
    return saved(TD3("MlpPolicy", CountingEnv(), **tiny(action_noise=normal_noise())).learn(20))


class OwnNoise(ActionNoise):
    """A user's noise."""

    def __call__(self) -> np.ndarray:
        return np.zeros(1)


class OwnPolicy(TD3XPolicy):
    """A user's policy."""


class OwnBuffer(ReplayBuffer):
    """A user's replay buffer."""


def own_hook(batch: ShapingBatch) -> tuple[np.ndarray, np.ndarray]:
    """A user's hook."""
    return batch.rewards + 1, batch.terminations


OWN: dict[str, tuple[str, Any]] = {
    "learning_rate": ("learning_rate", lambda progress: 1e-3 * progress),
    "qf_learning_rate": ("qf_learning_rate", lambda progress: 1e-3 * progress),
    "action_noise": ("action_noise", OwnNoise()),
    "replay_buffer_class": ("replay_buffer_class", OwnBuffer),
    "reward_shaping": ("reward_shaping", own_hook),
    "policy_kwargs": ("policy_kwargs", {"net_arch": [8], "activation_fn": type("Own", (nn.ReLU,), {})}),
}


@pytest.mark.parametrize("case", [*OWN, "policy_class"])
def test_user_s_own_object_needs_trust_or_must_be_given(case: str, tmp_path: pathlib.Path) -> None:
    if case == "policy_class":
        value: Any = OwnPolicy
        model = TD3X(OwnPolicy, CountingEnv(), **tiny())
    else:
        _, value = OWN[case]
        model = tiny_agent(**{case: value})
    path = tmp_path / "agent.zip"
    model.learn(12).save(path)
    assert f"pickled.{case}.pkl" in hostile.members_of(path.read_bytes())
    with pytest.raises(ValueError, match=rf"agent\.zip .*{case}.*custom_objects.*trusted=True"):
        TD3X.load(path)
    assert case in describe_agent(path)
    for kwargs in ({"trusted": True}, {"custom_objects": {case: value}}, {case: value}):
        loaded = TD3X.load(path, env=CountingEnv(), **kwargs)
        assert type(getattr(loaded, case)) is type(value)
        loaded.learn(12)
    # Weights need no trust
    model.set_parameters(path)


def test_object_that_cannot_be_built_from_its_attributes_is_pickled(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    theta: Any = np.array([0.15])
    tiny_agent(action_noise=OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1), theta)).learn(12).save(path)
    with pytest.raises(ValueError, match=r"agent\.zip .*action_noise.*trusted=True"):
        TD3X.load(path)
    noise = TD3X.load(path, trusted=True).action_noise
    assert isinstance(noise, OrnsteinUhlenbeckActionNoise)
    assert noise._theta == theta
    assert TD3X.load(path, action_noise=None).action_noise is None


class OwnExtractor(FlattenExtractor):
    """A user's features extractor, whose constructor looks at tensors."""

    def __init__(self, observation_space: spaces.Space, table: Any) -> None:
        super().__init__(observation_space)
        self.scale = 1 / th.as_tensor(table, dtype=th.float32).sum().item()

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return super().forward(observations) * self.scale


OWN_NETWORKS: dict[str, dict[str, Any]] = {
    "table": {"features_extractor_class": OwnExtractor, "features_extractor_kwargs": {"table": list(range(101))}},
    "number": {"features_extractor_class": OwnExtractor, "features_extractor_kwargs": {"table": 2_000_000}},
    "partial": {"features_extractor_class": functools.partial(OwnExtractor, table=[1.0])},
    "function": {"features_extractor_class": lambda space: OwnExtractor(space, [1.0])},
}


def own_networks(case: str) -> dict[str, Any]:
    return {"net_arch": [8], **OWN_NETWORKS[case]}


@pytest.mark.parametrize("case", OWN_NETWORKS)
def test_user_s_own_networks_come_back(case: str) -> None:
    model = tiny_agent(policy_kwargs=own_networks(case)).learn(12)
    content = saved(model)
    with pytest.raises(ValueError, match=r"policy_kwargs.*custom_objects.*trusted=True"):
        TD3X.load(io.BytesIO(content))
    given = own_networks(case)
    for kwargs in ({"trusted": True}, {"custom_objects": {"policy_kwargs": given}}, {"policy_kwargs": given}):
        loaded = TD3X.load(io.BytesIO(content), env=CountingEnv(), **kwargs)
        obs = model.observation_space.sample()
        np.testing.assert_array_equal(loaded.predict(obs)[0], model.predict(obs)[0])
        loaded.learn(12)


def test_tensors_of_other_networks_than_the_user_s_own_are_refused() -> None:
    kwargs = own_networks("table")
    others = hostile.members_of(saved(tiny_agent(policy_kwargs={**kwargs, "net_arch": [9]})))
    content = hostile.with_members(saved(tiny_agent(policy_kwargs=kwargs)), policy__pth=others["policy.pth"])
    with pytest.raises((ValueError, RuntimeError), match="size mismatch"):
        TD3X.load(io.BytesIO(content), trusted=True)


def test_training_with_the_user_s_own_networks_is_resumed(tmp_path: pathlib.Path) -> None:
    tiny_agent(policy_kwargs=own_networks("number")).learn(20, ResumableCheckpoint(tmp_path))
    with pytest.raises(ValueError, match=r"policy_kwargs.*trusted=True"):
        TD3X.resume(tmp_path, CountingEnv())
    model = TD3X.resume(tmp_path, CountingEnv(), trusted=True)
    assert model.learn(10, ResumableCheckpoint(tmp_path), reset_num_timesteps=False).num_timesteps == 30


def test_trusted_file_of_a_class_that_is_not_here(good_sb3: bytes) -> None:
    content = hostile.with_pickle(good_sb3, "anything", b"cnot_installed\nNothing\n.")
    with pytest.raises(ValueError, match=r"bad anything: cannot.*ModuleNotFoundError.*custom_objects"):
        TD3X.load(io.BytesIO(content), trusted=True)
    TD3X.load(io.BytesIO(content), trusted=True, custom_objects={"anything": 1})


def test_hook_that_a_file_names_is_not_imported(tmp_path: pathlib.Path) -> None:
    path, sentinel = tmp_path / "agent.zip", tmp_path / "sentinel"
    content = saved(tiny_agent())
    for spec in (
        {"os.mkdir": {"path": str(sentinel)}},
        {"subprocess.Popen": {"args": ["mkdir", str(sentinel)]}},
        [{"sb3_td3x.shaping.RewardScale": {"scale": 1.0}}, {"os.mkdir": {"path": str(sentinel)}}],
        {"sb3_td3x.shaping.PotentialShaping": {"potential": {"subprocess.Popen": {"args": ["mkdir", str(sentinel)]}}}},
        {"sb3_td3x.shaping.ShapingChain": {"hooks": [{"subprocess.Popen": {"args": ["mkdir", str(sentinel)]}}]}},
        f"{__name__}.own_hook",
    ):
        path.write_bytes(hostile.with_data(content, reward_shaping=spec))
        loaded = TD3X.load(path, env=CountingEnv())
        loaded.predict(np.zeros(2, np.float32))
        for learn in (loaded.learn, loaded.learn):
            with pytest.raises(ValueError, match=r"reward_shaping=.*trusted=True"):
                learn(10)
        # A copy of the agent is not trusted either
        path.write_bytes(saved(loaded))
        with pytest.raises(ValueError, match=r"reward_shaping=.*trusted=True"):
            TD3X.load(path, env=CountingEnv()).learn(10)
    assert not sentinel.exists()
    TD3X.load(path, env=CountingEnv(), reward_shaping=f"{__name__}.own_hook").learn(10)
    TD3X.load(path, env=CountingEnv(), trusted=True).learn(10)
    loaded.reward_shaping = own_hook
    loaded.learn(10)


def test_built_in_hook_that_a_file_names_is_made() -> None:
    model = tiny_agent(reward_shaping=[{"sb3_td3x.shaping.RewardScale": {"scale": 2}}, "sb3_td3x.shaping.FallPenalty"])
    loaded = TD3X.load(io.BytesIO(saved(model)), env=CountingEnv()).learn(3)
    np.testing.assert_array_equal(loaded.replay_buffer.rewards[:3, 0], [2, 4, 6])
