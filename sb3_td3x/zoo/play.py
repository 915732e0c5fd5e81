"""Playing the agent of a run's folder, without running code from the folder."""

from itertools import islice
from pathlib import Path

import numpy as np

from sb3_td3x.zoo.runs import ZooRun, play_steps


def play(
    folder: Path,
    timesteps: int = 1000,
    render: bool = False,
    seed: int = 0,
    deterministic: bool = True,
    best: bool = False,
    trusted: bool = False,
) -> list[float]:
    """
    Play the agent of a run of RL Zoo, and print the returns of its episodes.

    :param folder: the run's folder, such as ``logs/td3x/Pendulum-v1_1``
    :param timesteps: number of decisions
    :param render: whether to show the env on the screen
    :param seed: seed of the env
    :param deterministic: whether a stochastic policy takes its mean
    :param best: whether to play the best agent of the evaluations instead of the last one
    :param trusted: whether the run may execute code, see ``ZooRun``
    :return: the returns of the finished episodes, raw as the env gives them
    :raises ValueError: this is not a run's folder, or a file in it is damaged or not safe to read
    """
    run = ZooRun(folder, trusted)
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
