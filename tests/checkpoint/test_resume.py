"""Resuming: the training continues as if it had not been interrupted."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from callbacks import At
from checkpoints import (
    assert_same_replay_buffer,
    counting_agent,
    fail,
    goal_env,
    pendulum,
    saved_timesteps,
)
from comparing import assert_identical, everything, global_states
from envs import DictObs, Episode, counting_vec_env, tiny
from noises import normal_noise
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer, end_open_episodes
from sb3_td3x.checkpoint import ResumableCheckpoint

# Exact trainings: envs of the training, an env for evaluations, arguments of the agent


def rich() -> dict[str, Any]:
    """Return arguments with state that a resumed training needs."""
    return {
        "action_noise": OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.3 * np.ones(1)),
        "action_noise_decay": 0.99,
        "n_steps": 3,
        "learning_rate": "lin_1e-3",
        "reward_shaping": {"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
    }


def dict_pendulum() -> gym.Env:
    return DictObs(pendulum())


MakeEnv = Callable[[], gym.Env]
EXACT: dict[str, tuple[Callable[[], VecEnv], MakeEnv, Callable[[], dict[str, Any]]]] = {
    "1 env": (lambda: VecNormalize(DummyVecEnv([pendulum])), pendulum, rich),
    "8 envs": (lambda: VecNormalize(DummyVecEnv([pendulum] * 8)), pendulum, rich),
    "8 envs in processes": (lambda: VecNormalize(SubprocVecEnv([pendulum] * 8, "fork")), pendulum, rich),
    "stochastic actor": (
        lambda: DummyVecEnv([pendulum] * 2),
        pendulum,
        lambda: {"policy_kwargs": {"net_arch": [8], "stochastic_actor": True}},
    ),
    "optimize_memory_usage": (
        lambda: DummyVecEnv([pendulum]),
        pendulum,
        lambda: {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}},
    ),
    "prioritized": (
        lambda: VecNormalize(DummyVecEnv([pendulum] * 2)),
        pendulum,
        lambda: {"prioritized_replay_alpha": 0.6, "gamma": 0.9},
    ),
    "policy checkpoints": (
        lambda: DummyVecEnv([pendulum] * 2),
        pendulum,
        lambda: {"policy_checkpoint_episodes": 1, "gradient_steps": -1},
    ),
    "averaged actor": (
        lambda: DummyVecEnv([pendulum] * 2),
        pendulum,
        lambda: {"actor_average_tau": 0.01},
    ),
    "dictionaries": (
        lambda: VecNormalize(DummyVecEnv([dict_pendulum] * 2)),
        dict_pendulum,
        lambda: {"policy": "MultiInputPolicy"},
    ),
    "hindsight": (
        lambda: DummyVecEnv([goal_env] * 2),
        goal_env,
        lambda: {
            "policy": "MultiInputPolicy",
            "replay_buffer_class": HerReplayBuffer,
            "replay_buffer_kwargs": {"copy_info_dict": True},
        },
    ),
}


def run_exactly(case: str, folder: Path, stops: tuple[int, ...]) -> tuple[Any, ...]:
    """Train for 240 timesteps with interruptions, and return the state of everything at the end."""
    make_env, make_evaluation_env, make_kwargs = EXACT[case]

    def callbacks(env: VecEnv) -> tuple[ResumableCheckpoint, EvalCallback]:
        evaluation_env: VecEnv = DummyVecEnv([make_evaluation_env])
        if isinstance(env, VecNormalize):
            evaluation_env = VecNormalize(evaluation_env, training=False, norm_reward=False)
        evaluation = EvalCallback(
            evaluation_env, eval_freq=80 // env.num_envs, n_eval_episodes=1, warn=False, verbose=0
        )
        return ResumableCheckpoint(folder, 40, exact=True, verbose=0), evaluation

    kwargs = {"policy": "MlpPolicy", **tiny(seed=3, learning_starts=24, buffer_size=96, gradient_steps=2)}
    env = make_env()
    model = TD3X(env=env, **{**kwargs, **make_kwargs()})
    for stop in stops:
        with pytest.raises(LookupError):
            model.learn(
                240 - model.num_timesteps,
                [*callbacks(env), At(stop, fail)],
                reset_num_timesteps=not model.num_timesteps,
            )
        env.close()
        # Random numbers that are drawn in between do not matter
        random.random(), np.random.rand(3), th.rand(3)  # noqa: NPY002
        env = make_env()
        model = TD3X.resume(folder, env, device="cpu")
        assert model.num_timesteps == stop // 40 * 40
    checkpoint, evaluation = callbacks(env)
    model.learn(240 - model.num_timesteps, [checkpoint, evaluation], reset_num_timesteps=not model.num_timesteps)
    env.close()
    return everything(model), global_states(), evaluation.last_mean_reward, evaluation.n_calls


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", EXACT)
def test_exact_training_is_the_same_whether_interrupted_or_not(case: str, tmp_path: Path) -> None:
    """Parameters, optimizers, replay buffer, generators and evaluations are the same after two interruptions."""
    whole = run_exactly(case, tmp_path / "whole", ())
    interrupted = run_exactly(case, tmp_path / "interrupted", (104, 168))
    assert_identical(whole[0], interrupted[0])
    assert whole[1:] == interrupted[1:]


def test_exact_training_writes_nothing_when_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LookupError):
        counting_agent().learn(20, [At(15, fail), ResumableCheckpoint(tmp_path, 10, exact=True)])
    assert saved_timesteps(tmp_path) == 10
    assert "the training continues from its last checkpoint" in capsys.readouterr().out


# Counters and statistics


def test_counters_and_statistics_continue(tmp_path: Path) -> None:
    episodes = (Episode(5, True), Episode(3, False))
    kwargs = tiny(action_noise=normal_noise(), learning_rate="lin_1e-3")
    model = TD3X("MlpPolicy", VecNormalize(counting_vec_env(2, episodes)), **kwargs)
    model.learn(60, ResumableCheckpoint(tmp_path, 1000))
    resumed = TD3X.resume(tmp_path, VecNormalize(counting_vec_env(2, episodes)), device="cpu")
    names = ("num_timesteps", "_n_updates", "_exploration_timesteps", "_episode_num", "_current_progress_remaining")
    for name in names:
        assert getattr(resumed, name) == getattr(model, name)
    assert list(resumed.ep_info_buffer or ()) == list(model.ep_info_buffer or ())
    before, after = model.get_vec_normalize_env(), resumed.get_vec_normalize_env()
    assert before is not None
    assert after is not None
    # The reset adds one observation of each env
    assert after.obs_rms.count == before.obs_rms.count + 2
    np.testing.assert_equal(vars(after.ret_rms), vars(before.ret_rms))


# Open episodes


def test_open_episodes_are_time_outs_after_resuming(tmp_path: Path) -> None:
    """Rewards are the numbers of the steps, so a sum that crosses the reset would show."""
    episodes = (Episode(4, True), Episode(50, True))
    model = TD3X("MlpPolicy", counting_vec_env(2, episodes), **tiny(n_steps=3))
    model.learn(20, ResumableCheckpoint(tmp_path, 1000, verbose=0))
    assert model.replay_buffer.dones[9].tolist() == [0, 0]

    resumed = TD3X.resume(tmp_path, counting_vec_env(2, episodes), device="cpu")
    replay_buffer = resumed.replay_buffer
    assert replay_buffer.dones[9].tolist() == replay_buffer.timeouts[9].tolist() == [1, 1]
    assert replay_buffer.dones[3].tolist() == [1, 1]
    assert replay_buffer.timeouts[:9].sum() == 0
    resumed.learn(8, reset_num_timesteps=False)
    batch = replay_buffer._get_samples(np.array([9]))
    assert batch.dones.item() == 0
    assert batch.rewards.item() == 6  # the sixth step of the second episode alone
    assert batch.next_observations[0, 1] == 6  # type: ignore[call-overload, index]
    # New episodes begin
    assert replay_buffer.observations[10, :, 1].tolist() == [0, 0]


def test_mark_of_a_time_out_does_not_outlive_its_row() -> None:
    """Without the handling of time-outs, ``add`` would not remove it."""
    kwargs = tiny(buffer_size=7, replay_buffer_kwargs={"handle_timeout_termination": False})
    model = TD3X("MlpPolicy", counting_vec_env(1), **kwargs).learn(3).learn(40)
    assert not model.replay_buffer.timeouts.any()


# Envs, arguments and replay buffers of the resumed agent


@pytest.mark.parametrize(
    ("make_env", "kwargs", "message"),
    [
        (lambda: counting_vec_env(2), {}, "has n_envs=1, expected 2"),
        (lambda: VecNormalize(counting_vec_env(1)), {}, "has a VecNormalize, expected none"),
        (lambda: counting_vec_env(1), {"buffer_size": 7}, "has buffer_size=1000, expected 7"),
    ],
)
def test_other_envs_or_sizes_are_refused(
    make_env: Callable[[], VecEnv], kwargs: dict[str, Any], message: str, run_folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        TD3X.resume(run_folder, make_env(), device="cpu", **kwargs)


def test_env_can_be_given_by_its_id(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"learning_starts": 10, "buffer_size": 50, "policy_kwargs": {"net_arch": [8]}}
    TD3X("MlpPolicy", "Pendulum-v1", device="cpu", **kwargs).learn(20, ResumableCheckpoint(tmp_path))
    model = TD3X.resume(tmp_path, "Pendulum-v1", device="cpu")
    model.learn(5, ResumableCheckpoint(tmp_path), reset_num_timesteps=False)
    assert model.num_timesteps == 25


@pytest.mark.parametrize("given", ["class", "file", "smaller file", "SB3's file"])
def test_replay_buffer_that_the_agent_was_given(given: str, tmp_path: Path) -> None:
    kwargs = tiny(**({"replay_buffer_class": ReplayBuffer} if given == "class" else {}))
    model = TD3X("MlpPolicy", counting_vec_env(1), **kwargs)
    if given != "class":
        algorithm: Any = TD3 if given == "SB3's file" else TD3X
        own = {"replay_buffer_class": ReplayBuffer} if given == "file" else {}
        size = {"buffer_size": 25} if given == "smaller file" else {}
        other = algorithm("MlpPolicy", counting_vec_env(1), **{**kwargs, **own, **size}).learn(20)
        other.save_replay_buffer(tmp_path / "replay_buffer")
        model.load_replay_buffer(tmp_path / "replay_buffer")
    model.learn(20, ResumableCheckpoint(tmp_path / "run", 10, verbose=0))
    resumed = TD3X.resume(tmp_path / "run", counting_vec_env(1), device="cpu")
    assert type(resumed.replay_buffer) is type(model.replay_buffer)
    end_open_episodes(model.replay_buffer)
    assert_same_replay_buffer(model.replay_buffer, resumed.replay_buffer)
    resumed.learn(10, ResumableCheckpoint(tmp_path / "run", 10, verbose=0), reset_num_timesteps=False)
    assert saved_timesteps(tmp_path / "run") == 30


def test_number_of_steps_of_the_returns_may_change(tmp_path: Path) -> None:
    """The replay buffer stores single steps."""
    model = counting_agent(n_steps=3)
    callbacks: list[BaseCallback] = [ResumableCheckpoint(tmp_path, 10, verbose=0)]
    model.learn(20, callbacks)
    resumed = TD3X.resume(tmp_path, counting_vec_env(1), device="cpu", n_steps=5, gamma=0.9)
    assert isinstance(resumed.replay_buffer, PackedReplayBuffer)
    assert (resumed.replay_buffer.n_steps, resumed.replay_buffer.gamma) == (5, 0.9)
    np.testing.assert_array_equal(resumed.replay_buffer.rewards, model.replay_buffer.rewards)
