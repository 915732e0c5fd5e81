"""Playing an agent, and the agent of a run's folder without running code from the folder."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_td3x.zoo.runs import ZooRun


class Episode(NamedTuple):
    """What ``Monitor`` says of an episode, below all wrappers: the sum of the env's own rewards, and its env steps."""

    episode_return: float
    length: int


class Step(NamedTuple):
    """
    One step of all copies of an env, as SB3's ``VecEnv`` returns it.

    :param obs: observations in which the actions were chosen
    :param episodes: the episodes that ended in this step, by index of the copy
    """

    obs: Any
    actions: np.ndarray
    next_obs: Any
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]
    episodes: dict[int, Episode]


def play_steps(model: BaseAlgorithm, env: VecEnv, deterministic: bool = True) -> Iterator[Step]:
    """
    Play without an end; the caller stops.

    :param env: the env, with a ``Monitor`` around each copy
    :param deterministic: whether a stochastic policy takes its mean
    """
    # The zoo's wrappers lie around Monitor. Atari's end an episode at each lost life, Monitor at the end of the game.
    # An episode that another wrapper cuts is never counted by Monitor.
    loses_lives = env.env_is_wrapped(EpisodicLifeEnv)
    returns, lengths = np.zeros(env.num_envs), np.zeros(env.num_envs, int)
    obs: Any = env.reset()
    state, starts = None, np.ones(env.num_envs, bool)
    while True:
        actions, state = model.predict(obs, state, starts, deterministic)
        next_obs, rewards, dones, infos = env.step(actions)
        returns += rewards
        lengths += 1
        episodes = {}
        for idx in np.flatnonzero(dones):
            monitored = infos[idx].get("episode")
            if monitored is not None:
                episodes[int(idx)] = Episode(float(monitored["r"]), int(monitored["l"]))
            elif not loses_lives[idx]:
                episodes[int(idx)] = Episode(float(returns[idx]), int(lengths[idx]))
        returns[dones], lengths[dones] = 0.0, 0
        yield Step(obs, actions, next_obs, rewards, dones, infos, episodes)
        obs, starts = next_obs, dones


def play_episodes(model: BaseAlgorithm, env: VecEnv, n_episodes: int, seed: int | None = None) -> list[Episode]:
    """
    Play episodes side by side from fixed start states: the first one of each copy of the env, deterministically.

    In the last digits the actions depend on the number of copies: matrix products do.

    :param env: at least ``n_episodes`` copies, each with a ``Monitor`` around it
    :param seed: seed of the first episode, the next one has ``seed + 1``; None: the env continues with its own random
        numbers
    """
    assert n_episodes <= env.num_envs
    if seed is not None:
        env.seed(seed)
    first: dict[int, Episode] = {}
    steps = play_steps(model, env)
    while not first.keys() >= set(range(n_episodes)):
        first = {**next(steps).episodes, **first}
    return [first[idx] for idx in range(n_episodes)]


def play(
    folder: Path,
    timesteps: int = 1000,
    render: bool = False,
    seed: int = 0,
    deterministic: bool = True,
    best: bool = False,
    every_step: bool = False,
    trusted: bool = False,
) -> list[float]:
    """
    Play the agent of a run of RL Zoo, and print the returns of its episodes.

    :param render: whether to show the env on the screen
    :param best: whether to play the best agent of the evaluations instead of the last one
    :param every_step: whether to decide at every env step, though the training repeated actions
    :param trusted: whether the run may execute code, see ``ZooRun``
    :raises ValueError: this is not a run's folder, or a file in it is damaged or not safe to read
    """
    run = ZooRun(folder, trusted)
    if every_step:
        run.act_at_every_step()
    env = run.make_env(seed=seed, render=render)
    model = run.load_agent(run.best_agent if best else run.last_agent)
    returns: list[float] = []
    rewards = 0.0
    for step in islice(play_steps(model, env, deterministic), timesteps):
        if render:
            env.render("human")
        rewards += float(step.rewards[0])
        for episode in step.episodes.values():
            returns.append(episode.episode_return)
            print(f"Episode {len(returns)}: {episode.episode_return:.2f}")
    env.close()
    if returns:
        print(f"{len(returns)} episodes, mean return {np.mean(returns):.2f} +/- {np.std(returns):.2f}")
    else:
        print(f"No episode ended; return so far {rewards:.2f}")
    return returns
