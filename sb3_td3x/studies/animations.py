"""Animations of each arm's best agent."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sb3_td3x.animation import record_episode
from sb3_td3x.studies.measure import TrainedRun
from sb3_td3x.studies.records import RunRecord
from sb3_td3x.zoo.play import make_env

# All arms are shown from the same start, which no one has chosen for its looks
_SEED = 100_000
_WIDTH = 240
# Ten arms in two envs shall stay a few MB together
_MAX_FRAMES = 60


@dataclass(frozen=True)
class Animation:
    """
    An episode of an arm's best agent.

    :param arm: name of the arm
    :param run: the run of the agent
    :param is_best: whether it is the best agent of the run's evaluations; else the last
    :param score: its mean return over the episodes of the final test
    :param episode_return: return of the episode that is shown
    :param path: the GIF
    """

    arm: str
    run: RunRecord
    is_best: bool
    score: float
    episode_return: float
    path: Path


def best_run(runs: Sequence[RunRecord]) -> tuple[RunRecord, bool, float]:
    """
    :param runs: finished runs of an arm in an env
    :return: the run with the best agent in the final test, whether that is its best agent of the evaluations and not
        its last one, and its mean return
    """
    candidates = [(run, False, float(np.mean(run.final_returns))) for run in runs]
    candidates += [(run, True, float(np.mean(run.best_returns))) for run in runs if run.best_returns]
    return max(candidates, key=lambda candidate: candidate[2])


def animate(study: Path, runs: Sequence[RunRecord], path: Path, gym_packages: Sequence[str] = ()) -> Animation:
    """
    Play an episode of the best agent of some runs, and keep it as a GIF with its actions and rewards.

    :param study: folder of the study
    :param runs: finished runs of an arm in an env
    :param path: the GIF
    :param gym_packages: modules to import that register envs
    :return: what it shows
    """
    for package in gym_packages:
        importlib.import_module(package)
    record, is_best, score = best_run(runs)
    run = TrainedRun(record.folder(study), record.algo, record.env)
    # Unlike the zoo's, it can be asked for pictures
    env = make_env(run.settings_folder, seed=_SEED)
    try:
        model = run.load(run.best_agent if is_best else run.last_agent, env)
        recording = record_episode(model, env, seed=_SEED, width=_WIDTH)
    finally:
        env.close()
    recording.save_gif(path, every=-(-len(recording) // _MAX_FRAMES), width=_WIDTH)
    return Animation(record.arm, record, is_best, score, recording.episode_return, path)
