"""
Published agents: folders in the zoo's layout, such as ``rl-trained-agents/td3x/Pendulum-v1_1``, and ``training.json``
in them with the returns of all seeds of the env.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch as th

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.zoo.play import play_episodes
from sb3_td3x.zoo.register import ALGO
from sb3_td3x.zoo.runs import ZooRun

AGENTS_FOLDER = Path("rl-trained-agents")
TRAINING_FILE = "training.json"
FORMAT = 1
# Packages whose versions are recorded
PACKAGES = ("sb3-td3x", "stable-baselines3", "rl-zoo3", "gymnasium", "Box2D", "torch", "numpy")

# Episode i starts from seed FIRST_SEED + i. Trainings and their evaluations use small seeds, and the tests of studies
# those from 100,000 on, so no training, tuning or selection has seen the start states of the test.
SELECTION_SEED = 500_000
TEST_SEED = 1_000_000
# Copies of the env that are played side by side
N_ENVS = 10
# Most episodes of a candidate in the selection, and those before the worse half drops out
N_SELECTION_EPISODES = 200
FIRST_ROUND = 20
N_TEST_EPISODES = 100
# Envs where luck decides whether an episode succeeds, so that the test needs more episodes
LUCK_ENVS = ("BipedalWalker", "LunarLander")
N_LUCK_TEST_EPISODES = 1000


@dataclass(frozen=True)
class Seed:
    """
    One training, and what its agents reached. Returns are the env's own, of the deterministic policy.

    :param training_seconds: wall-clock time of the training with its evaluations, without the time between an
        interruption and the resumption
    :param machine: processor, system and versions
    :param selection: for each candidate its returns in the selection; candidates that dropped out have fewer
    :param selected: the candidate with the highest mean return, among those with all episodes
    :param selected_timesteps: env steps before that agent was saved
    :param evaluations: env steps (``timesteps``) and ``returns`` of the evaluations during training
    """

    seed: int
    command: str
    timesteps: int
    training_seconds: float
    machine: dict[str, Any]
    selection: dict[str, list[float]]
    selected: str
    selected_timesteps: int
    test_returns: list[float]
    evaluations: dict[str, list[Any]]


@dataclass(frozen=True)
class Training:
    """
    The content of ``training.json``.

    :param published_seed: the seed whose agent is in the same folder: the best one in the selection
    :param seeds: all seeds that were trained with these hyperparameters, the worst too
    :param test_episodes: number of episodes in the test of the published agent
    """

    env: str
    published_seed: int
    seeds: list[Seed]
    test_episodes: int

    @property
    def published(self) -> Seed:
        """The seed whose agent is published"""
        return next(seed for seed in self.seeds if seed.seed == self.published_seed)

    def write(self, folder: Path) -> None:
        """Write ``training.json``."""
        content = {
            "format": FORMAT,
            "algo": ALGO,
            "env": self.env,
            "selection": {"first_seed": SELECTION_SEED},
            "test": {"first_seed": TEST_SEED, "episodes": self.test_episodes},
            "published_seed": self.published_seed,
            "seeds": [asdict(seed) for seed in self.seeds],
        }
        with atomic_write(folder / TRAINING_FILE) as file:
            file.write(to_json(content).encode())

    @classmethod
    def read(cls, folder: Path) -> "Training":
        """
        Read ``training.json``.

        :raises ValueError: the file has another format, or its test has other start states
        """
        path = folder / TRAINING_FILE
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or content["test"]["first_seed"] != TEST_SEED:
            raise ValueError(
                f"{path} has format {content['format']}, test {content['test']}: expected {FORMAT}, {TEST_SEED}"
            )
        seeds = [Seed(**seed) for seed in content["seeds"]]
        return cls(content["env"], content["published_seed"], seeds, content["test"]["episodes"])


def to_json(content: Any) -> str:
    """Format data as JSON, with each list of numbers on one line."""

    def on_one_line(match: re.Match[str]) -> str:
        return "[" + re.sub(r"\n\s*", " ", match[0][1:-1]).strip() + "]"

    return re.sub(r"\[\n[^][{}]*?\]", on_one_line, json.dumps(content, indent=1)) + "\n"


def episodes_of_test(env: str) -> int:
    """
    Return how many episodes the test of an agent has.

    :return: 1,000 where luck decides an episode, else 100
    """
    return N_LUCK_TEST_EPISODES if env.startswith(LUCK_ENVS) else N_TEST_EPISODES


def find_agents(folder: Path) -> list[Path]:
    """Find published agents."""
    return sorted(path.parent for path in folder.glob(f"{ALGO}/*/{TRAINING_FILE}"))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: sums over more threads differ in their last digits, and returns with them."""
    threads = th.get_num_threads()
    th.set_num_threads(1)
    try:
        yield
    finally:
        th.set_num_threads(threads)


@_one_thread()
def play_agent(folder: Path, name: str, n_episodes: int, first_seed: int, n_envs: int = N_ENVS) -> list[float]:
    """
    Play an agent deterministically, each episode in a new copy of the env.

    Some envs keep state over ``reset`` (BipedalWalker keeps Box2D's world), so an episode in a used copy would depend
    on the episodes before it, and not on its seed only.

    :param first_seed: episode i starts from ``first_seed + i``
    :param n_envs: copies of the env that are played side by side; another number changes the last digits of the actions
        (matrix products depend on it), which can decide between a step and a fall
    :return: the env's own returns, neither shaped nor normalized
    """
    run = ZooRun(folder)
    model = run.load_agent(folder / name)
    returns: list[float] = []
    while len(returns) < n_episodes:
        env = run.make_env(n_envs)
        try:
            episodes = play_episodes(model, env, min(n_envs, n_episodes - len(returns)), first_seed + len(returns))
        finally:
            env.close()
        returns += [round(episode.episode_return, 3) for episode in episodes]
    return returns


def best_candidate(selection: dict[str, list[float]]) -> str:
    """
    Return the winner of a selection.

    :return: the candidate with the highest mean, among those with the most episodes; the first of equals
    """
    most = max(len(returns) for returns in selection.values())
    finalists = [name for name, returns in selection.items() if len(returns) == most]
    return max(finalists, key=lambda name: float(np.mean(selection[name])))
