"""Returns from fixed starts, and the critic's values, for all kinds of algorithms."""

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
from sb3_td3x.studies import measure
from sb3_td3x.studies.measure import (
    agent_data,
    estimate_value,
    estimate_values,
    has_critic,
    play_test,
    q1_values,
    read_evaluations,
)
from sb3_td3x.zoo.play import Episode
from sb3_td3x.zoo.runs import ZooRun

ENV = "StudyPoint-v0"
N = study_env.EPISODE_LENGTH
GAMMA = 0.9
# 1 for each step
DISCOUNTED = (1 - GAMMA**N) / (1 - GAMMA)
CRITICS: dict[str, type[BaseAlgorithm]] = {
    **{"td3x": TD3X, "td3": TD3, "ddpg": DDPG, "sac": SAC, "tqc": TQC, "crossq": CrossQ}
}


def trained(folder: Path, algo: str, model: BaseAlgorithm, env: str = ENV, **config: Any) -> ZooRun:
    """Write the folder of a run as the zoo does."""
    (folder / env).mkdir(parents=True, exist_ok=True)
    (folder / env / "config.yml").write_text(yaml.safe_dump({"policy": "MlpPolicy", **config}))
    (folder / env / "args.yml").write_text(yaml.safe_dump({"algo": algo, "env": env, "env_kwargs": None}))
    run = ZooRun(folder, trusted=True)
    model.save(run.last_agent)
    return run


def make(cls: type[BaseAlgorithm], **kwargs: Any) -> BaseAlgorithm:
    options: dict[str, Any] = {"policy_kwargs": {"net_arch": [8]}, "gamma": GAMMA, "device": "cpu", "seed": 0, **kwargs}
    return cls("MlpPolicy", gym.make(ENV), **options)


def test_value_of_quantiles_is_their_mean() -> None:
    model: Any = make(TD3X, policy_kwargs={"net_arch": [8], "n_quantiles": 3})
    obs = np.ones((5, 2), np.float32)
    tensors = th.as_tensor(obs)
    with th.no_grad():
        expected = model.critic.q1_forward(tensors, model.actor(tensors)).mean(dim=1)
    np.testing.assert_allclose(q1_values(model, obs), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algo", list(CRITICS))
def test_values_of_every_kind_of_critic(tmp_path: Path, algo: str) -> None:
    model: Any = make(CRITICS[algo])
    run = trained(tmp_path, algo, model)
    assert has_critic(algo)
    obs = np.random.default_rng(0).uniform(-1, 1, (5, 2)).astype(np.float32)
    # As in the actor's loss of SB3 and TD3X, without noise
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
    assert estimate["timesteps"] == 7
    assert estimate["monte_carlo"] == pytest.approx(DISCOUNTED, rel=1e-5)
    assert play_test(run, run.last_agent, 3, 0) == [N] * 3


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
    assert play_test(run, run.last_agent, 2, 0) == [N, N]


def test_values_are_in_the_units_that_the_critic_learned(tmp_path: Path) -> None:
    hook: list[Any] = [
        {"sb3_td3x.shaping.RewardClip": {"low": -1.0, "high": 0.5}},
        {"sb3_td3x.shaping.RewardScale": {"scale": 5}},
    ]
    run = trained(tmp_path, "td3x", make(TD3X, reward_shaping=hook), reward_shaping=hook)
    assert estimate_value(run, run.last_agent, 1, 2, 0)["monte_carlo"] == pytest.approx(2.5 * DISCOUNTED, rel=1e-5)
    # Returns of the test stay raw
    assert play_test(run, run.last_agent, 2, 0) == [N, N]


def test_nothing_counts_after_a_shaped_termination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "import numpy as np\ndef end_at_once(batch):\n    return batch.rewards, np.ones_like(batch.terminations)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    hook = "of_mine.end_at_once"
    run = trained(tmp_path / "run", "td3x", make(TD3X, reward_shaping=hook), reward_shaping=hook)
    assert estimate_value(run, run.last_agent, 1, 2, 0)["monte_carlo"] == 1.0


@pytest.mark.parametrize("norm_reward", [True, False])
def test_normalized_rewards(tmp_path: Path, norm_reward: bool) -> None:
    env = VecNormalize(make_vec_env(ENV), gamma=GAMMA, norm_reward=norm_reward)
    model = TD3X("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, gamma=GAMMA, device="cpu", learning_starts=1000)
    model.learn(100)
    run = trained(tmp_path, "td3x", model, normalize=f"dict(norm_reward={norm_reward})")
    model.save(run.folder / "rl_model_50_steps.zip")
    env.save(str(run.config_folder / "vecnormalize.pkl"))
    # The zoo does not keep the statistics of the first 50 steps
    (estimate,) = estimate_values(run, 100, 2, 0) or []
    unit = np.sqrt(env.ret_rms.var + env.epsilon) if norm_reward else 1.0
    assert estimate["monte_carlo"] == pytest.approx(DISCOUNTED / unit, rel=1e-4)
    assert play_test(run, run.last_agent, 2, 0) == [N, N]


def test_agents_saved_on_the_way(tmp_path: Path) -> None:
    model = make(TD3X)
    run = trained(tmp_path, "td3x", model)
    assert agent_data(run.last_agent)["num_timesteps"] == 0
    for steps in (100, 20):
        model.save(run.folder / f"rl_model_{steps}_steps.zip")
    estimates = estimate_values(run, 100, 2, 0)
    assert estimates is not None
    assert [estimate["timesteps"] for estimate in estimates] == [20, 100]


def test_episodes_are_whole_where_a_wrapper_ends_them_at_each_lost_life(tmp_path: Path) -> None:
    wrapper = "stable_baselines3.common.atari_wrappers.EpisodicLifeEnv"
    run = trained(tmp_path, "td3x", make(TD3X), "StudyLives-v0", env_wrapper=[wrapper])
    env = run.make_env(1, seed=0)
    env.reset()
    ends = [env.step(np.zeros((1, 2)))[2][0] for _ in range(3)]
    assert ends == [False, False, True]
    assert play_test(run, run.last_agent, 3, 0) == [N] * 3


def test_starts_are_the_same_for_all_runs(tmp_path: Path) -> None:
    run = trained(tmp_path, "td3x", make(TD3X))
    first, second = run.make_env(2, seed=5), run.make_env(3, seed=5)
    np.testing.assert_array_equal(first.reset(), second.reset()[:2])


def test_what_the_zoo_logged(tmp_path: Path) -> None:
    run = trained(tmp_path, "td3x", make(TD3X))
    run.last_agent.unlink()
    assert read_evaluations(run)["timesteps"] == []
    assert agent_data(run.last_agent) == {}
    np.savez(tmp_path / "evaluations.npz", timesteps=[5, 9], results=[[1, 2], [3, 4]])
    assert read_evaluations(run)["timesteps"] == [5, 9]
    assert read_evaluations(run)["returns"] == [[1, 2], [3, 4]]
    # Each timestep of the zoo is three env steps now
    run = trained(tmp_path, "td3x", make(TD3X), env_wrapper=[{"rl_zoo3.wrappers.FrameSkip": {"skip": 3}}])
    assert read_evaluations(run)["timesteps"] == [15, 27]
    make(TD3X).save(tmp_path / "rl_model_5_steps.zip")
    assert list(run.saved_agents()) == [15]


def test_any_number_of_episodes_begins_alike(tmp_path: Path) -> None:
    """Envs such as BipedalWalker keep state over ``reset``, so no copy of the env plays a second counted episode."""
    run = trained(tmp_path, "td3x", make(TD3X))
    made: list[int] = []
    played: list[tuple[int, int]] = []

    def make_env(n_envs: int) -> Any:
        made.append(n_envs)
        return ZooRun.make_env(run, n_envs)

    def play_episodes(model: Any, env: Any, n_episodes: int, seed: int) -> list[Episode]:
        played.append((n_episodes, th.get_num_threads()))
        return [Episode(float(seed + idx), 1) for idx in range(n_episodes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "make_env", make_env)
        patch.setattr(measure, "play_episodes", play_episodes)
        n_threads = th.get_num_threads()
        try:
            th.set_num_threads(2)
            assert play_test(run, run.last_agent, 14, 5) == [float(seed) for seed in range(5, 19)]
            # Returns depend on the number of threads, so they are played with one, whatever the caller uses
            assert (played, th.get_num_threads()) == ([(10, 1), (4, 1)], 2)
        finally:
            th.set_num_threads(n_threads)
    assert made == [10, 10]
