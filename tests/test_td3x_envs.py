"""Envs and observations that TD3X trains with: wrappers, processes, images, dictionaries."""

import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from envs import CountingEnv, DictObs, Episode, counting_vec_env, image_env, tiny_agent, vec_env
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer


@pytest.mark.lowest_sb3
def test_envs_in_processes() -> None:
    env = SubprocVecEnv([CountingEnv] * 2, start_method="fork")
    model = tiny_agent(env, action_noise=normal_noise(), gradient_steps=-1).learn(40)
    assert model._n_updates == 36
    assert model.replay_buffer.pos == 20
    env.close()


@pytest.mark.lowest_sb3
def test_vec_normalize(tmp_path: pathlib.Path) -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", 2, seed=0))
    model = tiny_agent(env, action_noise=normal_noise()).learn(60)
    assert model.get_vec_normalize_env() is env
    assert np.abs(model.replay_buffer.observations[:30]).max() > 1  # raw
    model.save(tmp_path / "agent")
    env.save(str(tmp_path / "statistics.pkl"))
    again = VecNormalize.load(str(tmp_path / "statistics.pkl"), make_vec_env("Pendulum-v1", 2))
    loaded = TD3X.load(tmp_path / "agent", env=again).learn(20)
    assert loaded.get_vec_normalize_env() is again


def test_set_env() -> None:
    model = tiny_agent().learn(20)
    other = CountingEnv([Episode(7, False)], first_episode=50)
    model.set_env(other)
    model.learn(10, reset_num_timesteps=False)
    np.testing.assert_array_equal(model.replay_buffer.observations[20:30, 0, 0], [50] * 7 + [51] * 3)
    with pytest.raises(AssertionError, match="number of environments"):
        model.set_env(counting_vec_env(2))


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("channels_last", [False, True])
def test_images(channels_last: bool) -> None:
    policy_kwargs = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}
    env = image_env(channel_first=not channels_last)
    model = tiny_agent(env, "CnnPolicy", policy_kwargs=policy_kwargs, buffer_size=30).learn(12)
    assert model.replay_buffer.observations.dtype == np.uint8
    assert model.replay_buffer.obs_shape == (1, 36, 36)
    action, _ = model.predict(model.observation_space.sample())
    assert model.action_space.contains(action)


def test_stacked_frames() -> None:
    env = VecFrameStack(counting_vec_env(2), n_stack=3)
    model = tiny_agent(env, action_noise=normal_noise()).learn(40)
    np.testing.assert_array_equal(model.replay_buffer.next_observations[4, 0], [0, 3, 0, 4, 0, 5])


@pytest.mark.lowest_sb3
def test_dict_observations() -> None:
    env = vec_env(DictObs(CountingEnv()), DictObs(CountingEnv()))
    model = tiny_agent(env, "MultiInputPolicy").learn(40)
    assert isinstance(model.replay_buffer, PackedReplayBuffer)
    with pytest.raises(ValueError, match="MultiInputPolicy"):
        tiny_agent(env)


class WithParity(DictObs):
    """A wrapper that adds a Discrete observation, for which SB3's replay buffers use another shape."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.observation_space = spaces.Dict({**self.observation_space.spaces, "parity": spaces.Discrete(2)})

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {**super().observation(observation), "parity": int(observation[1]) % 2}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 2])
@pytest.mark.parametrize("hook", [None, lambda batch: (batch.rewards, batch.terminations)], ids=["raw", "shaped"])
def test_dict_observations_with_a_number(n_envs: int, hook: Any) -> None:
    env = vec_env(*(WithParity(CountingEnv()) for _ in range(n_envs)))
    model = tiny_agent(env, "MultiInputPolicy", reward_shaping=hook).learn(40)
    buffer = model.replay_buffer
    parities = (buffer.observations["count"][: buffer.pos, :, 1] % 2).ravel()
    np.testing.assert_array_equal(buffer.observations["parity"][: buffer.pos].ravel(), parities)
    assert model._last_obs["parity"].shape == (n_envs,)


@pytest.mark.lowest_sb3
def test_her_with_discrete_observations() -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True, max_steps=3, discrete_obs_space=True)
    model = tiny_agent(env, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer).learn(40)
    assert model._n_updates == 35
