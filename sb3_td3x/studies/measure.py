"""Measurements of a trained agent: returns from fixed start states, and how accurate its critic is there."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from sb3_contrib import TQC, CrossQ
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecNormalize, unwrap_vec_normalize

from sb3_td3x.rollout import EnvStep, shape_step, with_last_observations
from sb3_td3x.studies.results import Evaluations, ValueEstimate
from sb3_td3x.td3x import TD3X
from sb3_td3x.zoo.play import play_episodes, play_steps
from sb3_td3x.zoo.runs import ZooRun, zoo_algorithms

# Copies of the env that play a test side by side
N_ENVS = 10


def play_test(run: ZooRun, agent: Path, n_episodes: int, first_seed: int, n_envs: int = N_ENVS) -> list[float]:
    """
    Play an agent deterministically, each episode in a new copy of the env.

    Some envs keep state over ``reset`` (BipedalWalker keeps Box2D's world), so an episode in a used copy would depend
    on the episodes before it, and not on its seed only. With more than one thread, and with another number of copies,
    the last digits of sums differ, which can decide between a step and a fall.

    :param first_seed: episode i starts from ``first_seed + i``
    :param n_envs: copies of the env that are played side by side
    :return: the env's own returns, neither shaped nor normalized
    """
    n_threads = th.get_num_threads()
    th.set_num_threads(1)
    returns: list[float] = []
    try:
        while len(returns) < n_episodes:
            env = run.make_env(n_envs)
            model = run.load_agent(agent, env)
            episodes = play_episodes(model, env, min(n_envs, n_episodes - len(returns)), first_seed + len(returns))
            env.close()
            returns += [round(episode.episode_return, 3) for episode in episodes]
    finally:
        th.set_num_threads(n_threads)
    return returns


def has_critic(algo: str) -> bool:
    """Return whether agents of an algorithm have a Q critic of states and actions."""
    return issubclass(zoo_algorithms()[algo], (TD3X, TD3, SAC, TQC, CrossQ))


@th.no_grad()
def q1_values(model: BaseAlgorithm, obs: Any) -> np.ndarray:
    """
    Return the first critic's values of observations and the policy's deterministic actions there.

    :return: Q1(s, π(s)), of shape (batch,); for critics that estimate quantiles, the mean of the first one's
    """
    policy: Any = model.policy
    actions, _ = model.predict(obs, deterministic=True)
    policy.set_training_mode(False)
    tensors, _ = policy.obs_to_tensor(obs)
    scaled = th.as_tensor(policy.scale_action(actions), device=model.device, dtype=th.float32)
    values = policy.critic(tensors, scaled)
    # A tuple of critics, or for TQC (batch, critic, quantile)
    first = values[0] if isinstance(values, tuple) else values[:, 0]
    return np.asarray(first.mean(dim=1).cpu())


def estimate_value(run: ZooRun, agent: Path, timesteps: int, n_states: int, seed: int) -> ValueEstimate:
    """
    Compare the critic's values of start states with the discounted returns from there.

    :param timesteps: env steps before the agent was saved
    :return: the comparison, in the units that the critic learned
    """
    env = run.make_env(n_states, seed)
    model: Any = run.load_agent(agent, env)
    hook = run.make_shaping()
    vec_normalize = unwrap_vec_normalize(env)
    estimated: np.ndarray | None = None
    returns, discounts = np.zeros(n_states), np.ones(n_states)
    running = np.ones(n_states, bool)
    for step in play_steps(model, env):
        if estimated is None:
            estimated = q1_values(model, step.obs)
        rewards, dones = step.rewards, step.dones
        if hook is not None:
            before, after = _unnormalized(step.obs, vec_normalize), _unnormalized(step.next_obs, vec_normalize)
            after = with_last_observations(after, dones, step.infos, vec_normalize)
            env_step = EnvStep(before, step.actions, rewards, after, dones, step.infos)
            # A termination that only the hook declares ends the sum too: the critic learned nothing from beyond it
            shaped = shape_step(hook, env_step, model.gamma, model.num_timesteps)
            rewards, dones = shaped.rewards, shaped.dones
        if vec_normalize is not None and (run.normalize_kwargs or {}).get("norm_reward", True):
            rewards = _normalized(rewards, vec_normalize)
        returns += np.where(running, discounts * rewards, 0.0)
        discounts *= model.gamma
        # An end that the hook declares not terminal still ends the episode
        running &= ~(dones | step.dones)
        if not running.any():
            break
    env.close()
    assert estimated is not None
    return ValueEstimate(timesteps=timesteps, estimated=float(estimated.mean()), monte_carlo=float(returns.mean()))


def estimate_values(run: ZooRun, timesteps: int, n_states: int, seed: int) -> list[ValueEstimate] | None:
    """
    Compare values with returns for each agent that was saved during training, and for the last one.

    With ``VecNormalize`` only the last agent is compared, since the zoo keeps only the last statistics.

    :param timesteps: length of the training in env steps
    :param seed: seed of the first start state
    :return: the comparisons, in the order of the training; None: the algorithm has no Q critic
    """
    if not has_critic(run.algo):
        return None
    agents = {} if run.normalize_kwargs is not None else run.saved_agents()
    agents[timesteps] = run.last_agent
    return [estimate_value(run, path, steps, n_states, seed) for steps, path in sorted(agents.items())]


def read_evaluations(run: ZooRun) -> Evaluations:
    """Read the evaluations during training."""
    path = run.folder / "evaluations.npz"
    if not path.exists():
        return Evaluations(timesteps=[], returns=[])
    with np.load(path) as content:
        timesteps = content["timesteps"] * run.action_repeat
        return Evaluations(timesteps=timesteps.tolist(), returns=content["results"].tolist())


def agent_data(path: Path) -> dict[str, Any]:
    """
    Read the attributes in an agent's file as plain data, such as ``num_timesteps`` and ``_n_updates``.

    :return: its attributes, those that are pickled as text; empty if the file is missing or not whole
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return dict(json.loads(archive.read("data")))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}


def _unnormalized(obs: Any, vec_normalize: VecNormalize | None) -> Any:
    return obs if vec_normalize is None else vec_normalize.unnormalize_obs(obs)


def _normalized(rewards: np.ndarray, vec_normalize: VecNormalize) -> np.ndarray:
    """Return the rewards as the critic learned from them, with the statistics of the training."""
    vec_normalize.norm_reward = True
    normalized = vec_normalize.normalize_reward(rewards)
    vec_normalize.norm_reward = False
    return normalized
