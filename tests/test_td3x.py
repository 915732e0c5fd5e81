"""Training with TD3X as with SB3's TD3: learning, seeds, training in parts, and how often updates happen."""

import contextlib
import math
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from callbacks import At, stop
from comparing import assert_same_weights
from envs import CountingEnv, Episode, counting_vec_env, readable, saved_and_loaded, tiny_agent
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer
from stable_baselines3.common.callbacks import StopTrainingOnMaxEpisodes
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X


class Imitate(gym.Env[np.ndarray, np.ndarray]):
    """An env in which the best action is half the observation. Episodes have ten steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.steps = 0
        self.target = np.zeros(1, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = -float((action[0] - self.target[0] / 2) ** 2)
        self.steps += 1
        self.target = self.np_random.uniform(-1, 1, 1).astype(np.float32)
        return self.target, reward, False, self.steps == 10, {}


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("option", [{}, {"clipped_double_q": False}, {"n_steps": 3}, {"gamma": 0.0}], ids=readable)
def test_learns(option: dict[str, Any]) -> None:
    kwargs = {
        "gamma": 0.5,
        "learning_rate": 3e-3,
        "batch_size": 32,
        "tau": 0.05,
        "learning_starts": 100,
        "action_noise": normal_noise(),
        "policy_kwargs": {"net_arch": [32, 32]},
    }
    model = tiny_agent(Imitate(), **{**kwargs, **option})
    returns: list[Any] = []
    for timesteps in (0, 700):
        model.learn(timesteps)
        returns.append(evaluate_policy(model, make_vec_env(Imitate, seed=1), n_eval_episodes=5)[0])
    assert returns[0] < -0.5
    assert returns[1] > -0.1


@pytest.mark.lowest_sb3
def test_env_as_string_and_default_arguments() -> None:
    model = TD3X("MlpPolicy", "Pendulum-v1", buffer_size=1000, device="cpu").learn(120)
    assert model.num_timesteps == 120
    assert model._n_updates == 20
    action, state = model.predict(model.observation_space.sample())
    assert model.action_space.contains(action)
    assert state is None


def test_defaults_are_those_of_sb3() -> None:
    sb3, td3x = (cls("MlpPolicy", "Pendulum-v1") for cls in (TD3, TD3X))
    for name in (
        *("learning_rate", "buffer_size", "learning_starts", "batch_size", "tau", "gamma", "train_freq"),
        *("gradient_steps", "action_noise", "optimize_memory_usage", "n_steps", "policy_delay"),
        *("target_policy_noise", "target_noise_clip", "_stats_window_size", "tensorboard_log", "verbose", "seed"),
    ):
        assert getattr(td3x, name) == getattr(sb3, name), name
    assert [p.shape for p in td3x.actor.parameters()] == [p.shape for p in sb3.actor.parameters()]


def test_set_random_seed() -> None:
    models = []
    for seed in (11, 11, 12):
        model = tiny_agent("Pendulum-v1", seed=1)
        model.set_random_seed(seed)
        models.append(model.learn(40))
    assert_same_weights(models[0], models[1])
    assert not th.equal(next(models[2].actor.parameters()), next(models[0].actor.parameters()))


def test_predict() -> None:
    model = tiny_agent(CountingEnv(action_space=spaces.Box(-3, 1, (1,))))
    obs = np.zeros(2, np.float32)
    single, _ = model.predict(obs)
    assert single.shape == (1,)
    batch, _ = model.predict(np.stack([obs, obs]), deterministic=True)
    np.testing.assert_allclose(batch, [single, single])
    with pytest.raises(ValueError, match="observation shape"):
        model.predict(np.zeros(3, np.float32))


@pytest.mark.lowest_sb3
def test_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = VecNormalize(counting_vec_env(2))
        model = tiny_agent(env, action_noise=normal_noise(), reward_shaping="sb3_td3x.shaping.FallPenalty")
        model.learn(40)
        saved_and_loaded(model, env=counting_vec_env(3)).learn(30)


# Training in parts


def test_total_timesteps() -> None:
    """Any integral number is accepted, as users of SB3 write them; a negative number trains no more."""
    model = tiny_agent()
    for timesteps in (7.0, np.int64(7), 7):
        assert model.learn(timesteps).num_timesteps == 7
        assert type(model._total_timesteps) is int
    assert model.learn(-3, reset_num_timesteps=False).num_timesteps == 7
    # Trains until a callback stops it
    assert model.learn(math.inf, StopTrainingOnMaxEpisodes(1, verbose=0)).num_timesteps <= 5
    for bad in (7.5, "7", None, math.nan):
        with pytest.raises(ValueError, match=r"total_timesteps=.* is not allowed, expected an integer$"):
            model.learn(bad)


@pytest.mark.lowest_sb3
def test_learn_twice() -> None:
    model = tiny_agent(action_noise=normal_noise(), action_noise_decay=0.9).learn(20)
    assert (model.num_timesteps, model._n_updates, model._exploration_timesteps) == (20, 15, 15)
    model.learn(10, reset_num_timesteps=False)
    assert (model.num_timesteps, model._n_updates, model._exploration_timesteps) == (30, 25, 25)
    # As in SB3, the warm-up starts again. The decay of the noise continues
    model.learn(10, reset_num_timesteps=True)
    assert (model.num_timesteps, model._n_updates, model._exploration_timesteps) == (10, 30, 30)
    assert model.action_noise_scale == pytest.approx(0.9**30)
    assert model.replay_buffer.pos == 40


def test_two_halves_equal_one_training() -> None:
    """The first half ends in the middle of an episode."""
    whole = tiny_agent("Pendulum-v1", action_noise=normal_noise()).learn(60)
    halves = tiny_agent("Pendulum-v1", action_noise=normal_noise()).learn(31)
    halves.learn(29, reset_num_timesteps=False)
    assert_same_weights(whole, halves)


def fail() -> None:
    raise LookupError


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("interruption", [stop, fail])
@pytest.mark.parametrize("kwargs", [{}, {"n_steps": 3}], ids=readable)
def test_an_interrupted_episode_is_ended_in_the_buffer(kwargs: dict[str, Any], interruption: Any) -> None:
    """The observations show which episode a step belongs to."""
    model = tiny_agent(CountingEnv([Episode(5, True)]), **kwargs)
    with contextlib.suppress(LookupError):
        # Before the last step of the second episode is stored
        model.learn(20, At(8, interruption))
    model.learn(6, reset_num_timesteps=False)
    buffer = model.replay_buffer
    steps = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (3, 0)]
    assert buffer.observations[:13, 0].tolist() == [[*step] for step in steps]
    assert (buffer.observations[:13, 0, 0] == buffer.next_observations[:13, 0, 0]).all()
    assert np.flatnonzero(buffer.dones[:13, 0]).tolist() == [4, 6, 11]
    assert np.flatnonzero(buffer.timeouts[:13, 0]).tolist() == [6]


class OwnBuffer(NStepReplayBuffer):
    """A user's replay buffer, in which TD3X cannot end an open episode."""


def test_an_interrupted_episode_continues_in_a_users_buffer_as_in_sb3() -> None:
    kwargs = {"replay_buffer_class": OwnBuffer, "replay_buffer_kwargs": {"n_steps": 2}}
    model = tiny_agent(CountingEnv([Episode(50, True)]), **kwargs).learn(20, At(8, stop))
    model.learn(6, reset_num_timesteps=False)
    assert set(model.replay_buffer.observations[:13, 0, 0]) == {0}


@pytest.mark.lowest_sb3
def test_an_interrupted_episode_is_ended_with_her() -> None:
    env = BitFlippingEnv(n_bits=3, continuous=True, max_steps=4)
    model = tiny_agent(env, "MultiInputPolicy", replay_buffer_class=HerReplayBuffer, learning_starts=1000)
    model.learn(100, StopTrainingOnMaxEpisodes(2)).learn(9, reset_num_timesteps=False)
    assert isinstance(model.replay_buffer, HerReplayBuffer)
    assert model.replay_buffer.ep_length.max() <= 4


# Frequency of updates


@pytest.mark.lowest_sb3
@pytest.mark.parametrize(
    ("kwargs", "n_envs", "updates", "ratio"),
    [
        ({}, 1, 40, 1),
        ({}, 4, 10, 1 / 4),
        ({"gradient_steps": -1}, 4, 40, 1),
        ({"gradient_steps": 8}, 4, 80, 2),
        ({"train_freq": 2, "gradient_steps": 1}, 1, 20, 1 / 2),
        ({"train_freq": (2, "step"), "gradient_steps": -1}, 4, 40, 1),
        ({"train_freq": 5, "gradient_steps": 2}, 1, 16, 2 / 5),
        ({"train_freq": (1, "episode"), "gradient_steps": -1}, 1, 40, 1),
        ({"train_freq": (2, "episode"), "gradient_steps": 2}, 1, 10, 2 / 8),
    ],
    ids=readable,
)
def test_updates_per_env_step(kwargs: dict[str, Any], n_envs: int, updates: int, ratio: float) -> None:
    model = tiny_agent(counting_vec_env(n_envs), learning_starts=0, **kwargs)
    model.learn(40, log_interval=None)
    assert model._n_updates == updates
    assert model.logger.name_to_value["train/updates_per_env_step"] == pytest.approx(ratio)


def test_no_updates_during_the_warm_up_or_with_gradient_steps_0() -> None:
    assert tiny_agent(learning_starts=30).learn(30)._n_updates == 0
    assert tiny_agent(gradient_steps=0).learn(30)._n_updates == 0
    assert tiny_agent(learning_starts=0).learn(1)._n_updates == 1
