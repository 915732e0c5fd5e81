"""Replay buffers in a training with TD3X: n-step returns, HER, SB3's options and users' own classes."""

import pathlib
from typing import Any

import numpy as np
import pytest
from envs import Episode, counting_vec_env, tiny_agent
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer

SMALL_MEMORY = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}


class OwnBuffer(ReplayBuffer):
    """A user's replay buffer."""

    def __init__(self, *args: Any, note: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.note = note


def test_class_of_the_replay_buffer() -> None:
    assert isinstance(tiny_agent().replay_buffer, PackedReplayBuffer)
    buffer = tiny_agent(n_steps=2, gamma=0.5).replay_buffer
    assert isinstance(buffer, PackedReplayBuffer)
    assert (buffer.n_steps, buffer.gamma) == (2, 0.5)
    buffer = tiny_agent(**SMALL_MEMORY).replay_buffer
    assert isinstance(buffer, PackedReplayBuffer)
    assert buffer.optimize_memory_usage
    assert type(tiny_agent(replay_buffer_class=ReplayBuffer).replay_buffer) is ReplayBuffer
    assert type(tiny_agent(cls=TD3).replay_buffer) is ReplayBuffer


def test_a_users_buffer_class() -> None:
    model = tiny_agent(replay_buffer_class=OwnBuffer, replay_buffer_kwargs={"note": "mine"}).learn(10)
    assert isinstance(model.replay_buffer, OwnBuffer)
    assert model.replay_buffer.note == "mine"
    with pytest.warns(UserWarning, match=r"n_steps=3"):
        tiny_agent(replay_buffer_class=OwnBuffer, n_steps=3)


@pytest.mark.parametrize("from_file", [False, True])
def test_n_step_returns_end_where_learn_resets_the_envs(from_file: bool, tmp_path: pathlib.Path) -> None:
    """The rewards are 1, 2, ... 5, and start again at the reset."""
    env = counting_vec_env(1, [Episode(100, True)])
    model = tiny_agent(env, n_steps=3, gamma=1.0).learn(5)
    if from_file:
        model.save(tmp_path / "agent")
        model.save_replay_buffer(tmp_path / "buffer")
        model = TD3X.load(tmp_path / "agent", env=env, device="cpu")
        model.load_replay_buffer(tmp_path / "buffer")
        model.learn(5, reset_num_timesteps=False)
    else:
        model.learn(5)
    batch = model.replay_buffer._get_samples(np.arange(7))
    assert batch.rewards.ravel().tolist() == [6, 9, 12, 9, 5, 6, 9]
    assert batch.next_observations.tolist() == [[0, 3], [0, 4], [0, 5], [0, 5], [0, 5], [1, 3], [1, 4]]
    assert not batch.dones.any()


def test_n_step_returns_continue_where_learn_continues() -> None:
    model = tiny_agent(counting_vec_env(1, [Episode(100, True)]), n_steps=3, gamma=1.0).learn(5)
    model.learn(5, reset_num_timesteps=False)
    batch = model.replay_buffer._get_samples(np.arange(7))
    assert batch.rewards.ravel().tolist() == [6, 9, 12, 15, 18, 21, 24]


@pytest.mark.lowest_sb3
def test_memory_optimized_buffer() -> None:
    model = tiny_agent(buffer_size=20, **SMALL_MEMORY).learn(50)
    assert model.replay_buffer.full
    assert model.replay_buffer.optimize_memory_usage
    with pytest.warns(UserWarning, match="truncated"):
        model.learn(10)


@pytest.mark.lowest_sb3
def test_her(tmp_path: pathlib.Path) -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True, max_steps=3)
    model = tiny_agent(
        env,
        "MultiInputPolicy",
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": 2, "goal_selection_strategy": "future"},
    ).learn(40)
    assert isinstance(model.replay_buffer, HerReplayBuffer)
    model.save(tmp_path / "agent")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = TD3X.load(tmp_path / "agent", env=env)
    loaded.load_replay_buffer(tmp_path / "buffer")
    loaded.learn(10, reset_num_timesteps=False)
    assert loaded.num_timesteps == 50
    assert "env" not in loaded.replay_buffer_kwargs
    without_env = TD3X.load(tmp_path / "agent")
    obs: Any = env.reset()[0]
    np.testing.assert_array_equal(without_env.predict(obs)[0], TD3X.load(tmp_path / "agent", env=env).predict(obs)[0])
