"""Agents with replay buffers of all kinds, and comparisons of replay buffers."""

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from envs import CountingEnv, DictObs, counting_vec_env, image_env, tiny
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from sb3_td3x.buffers import REBUILT, PackedReplayBuffer


def goal_env() -> BitFlippingEnv:
    return BitFlippingEnv(n_bits=2, continuous=True)


def goal_envs() -> DummyVecEnv:
    return DummyVecEnv([goal_env, goal_env])


HER: dict[str, Any] = {"replay_buffer_class": HerReplayBuffer, "buffer_size": 50}
NO_TIMEOUTS = {"handle_timeout_termination": False}
OPTIMIZED: dict[str, Any] = {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS}
SMALL_CNN = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}
# Class, policy, env, arguments
BUFFERS: dict[str, tuple[type[ReplayBuffer], str, Callable[[], Any], dict[str, Any]]] = {
    "packed": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {}),
    "packed, 3 envs": (PackedReplayBuffer, "MlpPolicy", lambda: counting_vec_env(3), {}),
    "packed, full": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {"buffer_size": 20}),
    "packed, last row": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {"buffer_size": 31}),
    "packed, images": (PackedReplayBuffer, "CnnPolicy", image_env, {"policy_kwargs": SMALL_CNN, "buffer_size": 60}),
    "packed, dict": (PackedReplayBuffer, "MultiInputPolicy", lambda: DictObs(CountingEnv()), {}),
    "packed, n-step": (PackedReplayBuffer, "MlpPolicy", lambda: counting_vec_env(2), {"n_steps": 3}),
    "packed, optimized": (PackedReplayBuffer, "MlpPolicy", CountingEnv, OPTIMIZED),
    "packed, optimized, full": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {**OPTIMIZED, "buffer_size": 20}),
    "packed, prioritized": (
        PackedReplayBuffer,
        "MlpPolicy",
        lambda: counting_vec_env(2),
        {"prioritized_replay_alpha": 0.5, "buffer_size": 20, "learning_starts": 10},
    ),
    "packed, prioritized, optimized": (
        PackedReplayBuffer,
        "MlpPolicy",
        CountingEnv,
        {**OPTIMIZED, "buffer_size": 20, "prioritized_replay_alpha": 0.5},
    ),
    "packed, without time-outs": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {"replay_buffer_kwargs": NO_TIMEOUTS}),
    "SB3's": (ReplayBuffer, "MlpPolicy", CountingEnv, {"replay_buffer_class": ReplayBuffer}),
    "SB3's, images": (
        ReplayBuffer,
        "CnnPolicy",
        image_env,
        {"policy_kwargs": SMALL_CNN, "buffer_size": 60, "replay_buffer_class": ReplayBuffer},
    ),
    "SB3's, optimized": (
        ReplayBuffer,
        "MlpPolicy",
        CountingEnv,
        {**OPTIMIZED, "replay_buffer_class": ReplayBuffer, "buffer_size": 20},
    ),
    "SB3's, n-step": (
        NStepReplayBuffer,
        "MlpPolicy",
        lambda: counting_vec_env(2),
        {"replay_buffer_class": NStepReplayBuffer, "replay_buffer_kwargs": {"n_steps": 3, "gamma": 0.9}},
    ),
    "SB3's, dict": (
        DictReplayBuffer,
        "MultiInputPolicy",
        lambda: DictObs(CountingEnv()),
        {"replay_buffer_class": DictReplayBuffer},
    ),
    "her": (HerReplayBuffer, "MultiInputPolicy", goal_env, HER),
    "her, 2 envs, infos": (
        HerReplayBuffer,
        "MultiInputPolicy",
        goal_envs,
        {**HER, "replay_buffer_kwargs": {"copy_info_dict": True, "goal_selection_strategy": "episode"}},
    ),
    "her, full": (HerReplayBuffer, "MultiInputPolicy", goal_env, {**HER, "buffer_size": 11}),
}


def agent_with(case: str, steps: int = 30) -> TD3X:
    """Make an agent with one of the replay buffers above, and train it for some steps."""
    cls, policy, env, kwargs = BUFFERS[case]
    model = TD3X(policy, env(), **tiny(**deepcopy(kwargs)))
    assert type(model.replay_buffer) is cls
    return model.learn(steps) if steps else model


def state_of(replay_buffer: Any) -> dict[str, Any]:
    """Return all that a replay buffer holds, except for its env."""
    state = pickle.loads(pickle.dumps(replay_buffer)).__dict__
    return {name: value for name, value in state.items() if name not in ("env", "device", *REBUILT)}


def assert_same_state(expected: Any, actual: Any, where: str = "") -> None:
    """Compare nested values with their types."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_same_state(expected[key], actual[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(actual), where
        for number, pair in enumerate(zip(expected, actual, strict=True)):
            assert_same_state(*pair, f"{where}/{number}")
    elif isinstance(expected, np.ndarray) and expected.dtype == object:
        assert expected.shape == actual.shape
        assert_same_state(expected.tolist(), actual.tolist(), where)
    elif isinstance(expected, np.ndarray):
        assert expected.dtype == actual.dtype, where
        np.testing.assert_array_equal(actual, expected, where)
    else:
        assert expected == actual, where
        assert type(expected) is type(actual), where


def saved(model: Any) -> bytes:
    """Return what ``save_replay_buffer`` writes."""
    file = io.BytesIO()
    model.save_replay_buffer(file)
    return file.getvalue()
