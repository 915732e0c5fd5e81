"""Returns from fixed starts and values of the critic, for algorithms of every kind, from folders as the zoo leaves."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import study_env
import torch as th
import yaml
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import DDPG, PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.studies.measure import (
    TrainedRun,
    agent_timesteps,
    estimate_value,
    estimate_values,
    has_critic,
    play_episodes,
    q1_values,
    read_evaluations,
    read_training_returns,
)

ENV = "StudyPoint-v0"
N = study_env.EPISODE_LENGTH
GAMMA = 0.9
# 1 for each step
DISCOUNTED = (1 - GAMMA**N) / (1 - GAMMA)
CRITICS: dict[str, type[BaseAlgorithm]] = {
    **{"td3x": TD3X, "td3": TD3, "ddpg": DDPG, "sac": SAC, "tqc": TQC, "crossq": CrossQ}
}


def trained(folder: Path, algo: str, model: BaseAlgorithm, env: str = ENV, **config: Any) -> TrainedRun:
    """A run's folder with what the zoo writes."""
    run = TrainedRun(folder, algo, env)
    run.settings_folder.mkdir(parents=True, exist_ok=True)
    (run.settings_folder / "config.yml").write_text(yaml.safe_dump({"policy": "MlpPolicy", **config}))
    (run.settings_folder / "args.yml").write_text(yaml.safe_dump({"env": env, "env_kwargs": None}))
    model.save(run.last_agent)
    return run


def make(cls: type[BaseAlgorithm], **kwargs: Any) -> BaseAlgorithm:
    options: dict[str, Any] = {"policy_kwargs": {"net_arch": [8]}, "gamma": GAMMA, "device": "cpu", "seed": 0, **kwargs}
    return cls("MlpPolicy", gym.make(ENV), **options)


@pytest.mark.parametrize("algo", list(CRITICS))
def test_values_of_every_kind_of_critic(tmp_path: Path, algo: str) -> None:
    model: Any = make(CRITICS[algo])
    run = trained(tmp_path, algo, model)
    assert has_critic(algo)
    obs = np.random.default_rng(0).uniform(-1, 1, (5, 2)).astype(np.float32)
    # What the actor's loss of SB3 and TD3X takes, without noise
    tensors = th.as_tensor(obs)
    with th.no_grad():
        model.policy.set_training_mode(False)
        actions = model.policy._predict(tensors, deterministic=True)
        if algo in ("td3x", "td3", "ddpg"):
            expected = model.critic.q1_forward(tensors, actions)[:, 0]
        else:
            q = model.critic(tensors, actions)
            expected = q[:, 0].mean(1) if algo == "tqc" else q[0][:, 0]
    np.testing.assert_allclose(q1_values(model, obs), expected.numpy(), rtol=1e-5, atol=1e-6)

    estimate = estimate_value(run, run.last_agent, 7, n_states=4, seed=0)
    assert (estimate.timesteps, estimate.n_states) == (7, 4)
    assert estimate.monte_carlo == pytest.approx(DISCOUNTED, rel=1e-5)
    returns, lengths = play_episodes(run, run.last_agent, n_episodes=3, seed=0)
    assert (returns, lengths) == ([N] * 3, [N] * 3)


@pytest.mark.parametrize("algo", ["ppo", "ppo_lstm"])
def test_algorithms_without_critic(tmp_path: Path, algo: str) -> None:
    from sb3_contrib import RecurrentPPO

    if algo == "ppo":
        model = make(PPO, n_steps=8, batch_size=8)
    else:
        model = RecurrentPPO("MlpLstmPolicy", gym.make(ENV), n_steps=8, batch_size=8, device="cpu")
    run = trained(tmp_path, algo, model)
    assert not has_critic(algo)
    assert estimate_values(run, 10, 4, 0) is None
    assert play_episodes(run, run.last_agent, n_episodes=2, seed=0)[0] == [N, N]


def test_values_are_in_the_units_that_the_critic_learned(tmp_path: Path) -> None:
    hook = [{"sb3_td3x.shaping.RewardClip": {"low": -1.0, "high": 0.5}}, {"sb3_td3x.shaping.RewardScale": {"scale": 5}}]
    run = trained(tmp_path, "td3x", make(TD3X, reward_shaping=hook))
    assert estimate_value(run, run.last_agent, 1, 2, 0).monte_carlo == pytest.approx(2.5 * DISCOUNTED, rel=1e-5)
    # Tests stay raw
    assert play_episodes(run, run.last_agent, n_episodes=2, seed=0)[0] == [N, N]


def end_at_once(batch: Any) -> Any:
    return batch.rewards, np.ones_like(batch.terminations)


def test_nothing_counts_after_a_shaped_termination(tmp_path: Path) -> None:
    # A function of the user's own, as well
    run = trained(tmp_path, "td3x", make(TD3X, reward_shaping=end_at_once))
    assert estimate_value(run, run.last_agent, 1, 2, 0).monte_carlo == 1.0


@pytest.mark.parametrize("norm_reward", [True, False])
def test_normalized_rewards(tmp_path: Path, norm_reward: bool) -> None:
    env = VecNormalize(make_vec_env(ENV), gamma=GAMMA, norm_reward=norm_reward)
    model = TD3X("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, gamma=GAMMA, device="cpu", learning_starts=1000)
    model.learn(100)
    run = trained(tmp_path, "td3x", model, normalize=f"dict(norm_reward={norm_reward})")
    model.save(run.folder / "rl_model_50_steps.zip")
    env.save(str(run.settings_folder / "vecnormalize.pkl"))
    # The statistics of the first 50 steps are lost
    (estimate,) = estimate_values(run, 100, 2, 0) or []
    unit = np.sqrt(env.ret_rms.var + env.epsilon) if norm_reward else 1.0
    assert estimate.monte_carlo == pytest.approx(DISCOUNTED / unit, rel=1e-4)
    assert play_episodes(run, run.last_agent, n_episodes=2, seed=0)[0] == [N, N]


def test_agents_saved_on_the_way(tmp_path: Path) -> None:
    model = make(TD3X)
    run = trained(tmp_path, "td3x", model)
    assert agent_timesteps(run.last_agent) == 0
    for steps in (100, 20):
        model.save(run.folder / f"rl_model_{steps}_steps.zip")
    estimates = estimate_values(run, 100, 2, 0)
    assert estimates is not None
    assert [estimate.timesteps for estimate in estimates] == [20, 100]


def test_episodes_are_whole_where_a_wrapper_ends_them_at_each_lost_life(tmp_path: Path) -> None:
    wrapper = "stable_baselines3.common.atari_wrappers.EpisodicLifeEnv"
    run = trained(tmp_path, "td3x", make(TD3X), "StudyLives-v0", env_wrapper=[wrapper])
    env = run.make_env(1, seed=0)
    env.reset()
    ends = [env.step(np.zeros((1, 2)))[2][0] for _ in range(3)]
    assert ends == [False, False, True]
    assert play_episodes(run, run.last_agent, n_episodes=3, seed=0) == ([N] * 3, [N] * 3)


def test_starts_are_the_same_for_all_runs(tmp_path: Path) -> None:
    run = trained(tmp_path, "td3x", make(TD3X))
    first, second = run.make_env(2, seed=5), run.make_env(3, seed=5)
    np.testing.assert_array_equal(first.reset(), second.reset()[:2])


def test_what_the_zoo_logged(tmp_path: Path) -> None:
    run = trained(tmp_path, "td3x", make(TD3X))
    run.last_agent.unlink()
    assert read_evaluations(run).timesteps == []
    assert read_training_returns(tmp_path).returns == []
    assert agent_timesteps(run.last_agent) == 0
    env = make_vec_env(ENV, n_envs=2, monitor_dir=str(tmp_path))
    env.reset()
    for _ in range(2 * N):
        env.step(np.zeros((2, 2)))
    env.close()
    episodes = read_training_returns(tmp_path)
    assert (episodes.timesteps, episodes.returns) == ([N, 2 * N, 3 * N, 4 * N], [N] * 4)
    np.savez(tmp_path / "evaluations.npz", timesteps=[5, 9], results=[[1, 2], [3, 4]])
    assert read_evaluations(run).timesteps == [5, 9]
    assert read_evaluations(run).returns == [[1, 2], [3, 4]]
    # In env steps, of which each timestep of the zoo is three now
    trained(tmp_path, "td3x", make(TD3X), env_wrapper=[{"rl_zoo3.wrappers.FrameSkip": {"skip": 3}}])
    assert read_evaluations(run).timesteps == [15, 27]
    make(TD3X).save(tmp_path / "rl_model_5_steps.zip")
    assert list(run.saved_agents()) == [15]
