"""Comparisons of agents, and the same updates for several."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.utils import configure_logger


def sample_obs(model: BaseAlgorithm, number: int = 20) -> Any:
    """Return observations to compare predictions on."""
    space = model.observation_space
    if isinstance(space, spaces.Dict):
        samples = [space.sample() for _ in range(number)]
        return {key: np.stack([sample[key] for sample in samples]) for key in space}
    return np.stack([space.sample() for _ in range(number)])


def assert_same_predictions(first: BaseAlgorithm, second: BaseAlgorithm) -> None:
    obs = sample_obs(first)
    np.testing.assert_allclose(
        second.predict(obs, deterministic=True)[0], first.predict(obs, deterministic=True)[0], atol=1e-6
    )


def assert_same(expected: Any, actual: Any, rtol: float = 0, atol: float = 0, where: str = "") -> None:
    """Compare nested dictionaries and lists of tensors and numbers."""
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_same(expected[key], actual[key], rtol, atol, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), where
        for idx, pair in enumerate(zip(expected, actual, strict=True)):
            assert_same(*pair, rtol, atol, f"{where}/{idx}")
    elif th.is_tensor(expected):
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=rtol, atol=atol, err_msg=where)
    else:
        assert expected == actual, where


def optimizer_states(model: BaseAlgorithm) -> dict[str, Any]:
    """Return the states of the optimizers without their options: SB3's optimizers lack those of the kernel."""
    return {name: params["state"] for name, params in model.get_parameters().items() if name.endswith("optimizer")}


def assert_same_agent(expected: OffPolicyAlgorithm, actual: OffPolicyAlgorithm) -> None:
    """Compare networks, optimizers, counters and arguments that TD3 and TD3X share."""
    assert_same(expected.policy.state_dict(), actual.policy.state_dict())
    assert_same(optimizer_states(expected), optimizer_states(actual))
    for name in (
        *("num_timesteps", "_n_updates", "_episode_num", "_total_timesteps", "_current_progress_remaining", "n_envs"),
        *("buffer_size", "learning_starts", "batch_size", "tau", "gamma", "train_freq", "gradient_steps", "n_steps"),
        *("policy_delay", "target_policy_noise", "target_noise_clip", "optimize_memory_usage", "_stats_window_size"),
        *("observation_space", "action_space", "seed"),
    ):
        assert getattr(expected, name) == getattr(actual, name), name
    assert [actual.lr_schedule(progress) for progress in (1, 0.5, 0)] == [expected.lr_schedule(p) for p in (1, 0.5, 0)]
    for name in ("critic", "actor"):
        rates = [getattr(model, name).optimizer.param_groups[0]["lr"] for model in (expected, actual)]
        assert rates[0] == rates[1], name


def train_on_same_data(models: list[Any], data: OffPolicyAlgorithm, updates: int = 20) -> None:
    """Update all agents on the transitions of one, with the same random draws."""
    for model in models:
        for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
            if hasattr(data.replay_buffer, name):
                setattr(model.replay_buffer, name, getattr(data.replay_buffer, name))
        assert data.replay_buffer is not None
        model.replay_buffer.pos, model.replay_buffer.full = data.replay_buffer.pos, data.replay_buffer.full
        if isinstance(data.replay_buffer, HerReplayBuffer):
            for name in ("infos", "ep_start", "ep_length", "_current_ep_start"):
                setattr(model.replay_buffer, name, getattr(data.replay_buffer, name))
        model.set_logger(configure_logger(verbose=0))
        np.random.seed(3)  # noqa: NPY002 - SB3's replay buffers draw from it
        th.manual_seed(3)
        model._current_progress_remaining = 0.4
        model.train(gradient_steps=updates, batch_size=16)


def assert_same_updates(expected: OffPolicyAlgorithm, actual: OffPolicyAlgorithm) -> None:
    assert_same(expected.policy.state_dict(), actual.policy.state_dict(), rtol=1e-5, atol=2e-6)
