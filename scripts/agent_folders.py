"""
Published agents: ``rl-trained-agents/td3x/ENV_1/``, the zoo's layout, and in it ``training.json`` with the figures of
all seeds of the environment. What is read here is read without running code from it.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch as th

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.zoo.play import config_folder, load_player, make_env

ALGO = "td3x"
AGENTS_FOLDER = Path(__file__).parent.parent / "rl-trained-agents"
PICTURES = Path(__file__).parent.parent / "docs" / "results"
TRAINING_FILE = "training.json"
# Whose versions are recorded
PACKAGES = ("sb3-td3x", "stable-baselines3", "rl-zoo3", "gymnasium", "Box2D", "torch", "numpy")
FORMAT = 1

# Episode i starts from seed FIRST_SEED + i. Trainings and their evaluations take small seeds, scripts/results.py those
# from 100,000 on: no training, no tuning and no selection has seen the seeds of the test.
SELECTION_SEED = 500_000
N_SELECTION_EPISODES = 50
TEST_SEED = 1_000_000
N_TEST_EPISODES = 100

# What a row of a matrix product gives depends on how many rows there are, in its last digits, and one of these can
# decide between a fall and a step. In groups of one size the first episodes return the same, however many follow.
_GROUP = 10


@dataclass(frozen=True)
class Seed:
    """
    One training, and what its agents reached. Returns are the env's own, of the deterministic policy.

    :param seed: seed of the training
    :param command: what trained it
    :param timesteps: env steps of the whole training
    :param training_seconds: its wall-clock time with its evaluations, until the end of its last episode;
        not counted is what lies between an interruption and its resumption
    :param machine: processor, system and versions
    :param selection: for each candidate, its returns on the selection's seeds; who dropped out has fewer
    :param selected: the candidate with the highest mean of these, among those with all episodes
    :param selected_timesteps: env steps before it was saved
    :param test_returns: its returns on the test's seeds
    :param evaluations: env steps (``timesteps``) and returns of the evaluations while training
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
    What ``training.json`` holds.

    :param env: id of the environment
    :param published_seed: which seed's agent lies beside it: the one that is best on the selection's seeds
    :param seeds: all seeds that were trained with these hyperparameters, the worst too
    """

    env: str
    published_seed: int
    seeds: list[Seed]

    @property
    def published(self) -> Seed:
        """The training whose agent lies beside the file"""
        return next(seed for seed in self.seeds if seed.seed == self.published_seed)

    def write(self, folder: Path) -> None:
        """
        :param folder: the agent's folder
        """
        content = {
            "format": FORMAT,
            "algo": ALGO,
            "selection": {
                "first_seed": SELECTION_SEED,
                "episodes": len(self.published.selection[self.published.selected]),
            },
            "test": {"first_seed": TEST_SEED, "episodes": len(self.published.test_returns)},
            **asdict(self),
        }
        with atomic_write(folder / TRAINING_FILE) as file:
            file.write(_to_json(content).encode())

    @classmethod
    def read(cls, folder: Path) -> "Training":
        """
        :param folder: the agent's folder
        :return: what is known of it
        :raises ValueError: the file is of another format, or its test is of other seeds
        """
        path = folder / TRAINING_FILE
        content = json.loads(path.read_text())
        if content["format"] != FORMAT or content["test"]["first_seed"] != TEST_SEED:
            raise ValueError(
                f"{path} has format {content['format']}, test {content['test']}: expected {FORMAT}, {TEST_SEED}"
            )
        return cls(content["env"], content["published_seed"], [Seed(**seed) for seed in content["seeds"]])


def _to_json(content: Any) -> str:
    """
    :param content: dictionaries, lists, numbers and strings
    :return: them as JSON, lists of numbers on one line each
    """
    lists: list[str] = []

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shorten(entry) for key, entry in value.items()}
        if isinstance(value, list) and not any(isinstance(entry, dict) for entry in value):
            lists.append(json.dumps(value))
            return f"@{len(lists) - 1}@"
        return [shorten(entry) for entry in value] if isinstance(value, list) else value

    text = json.dumps(shorten(content), indent=1)
    for idx, line in enumerate(lists):
        text = text.replace(f'"@{idx}@"', line, 1)
    return text + "\n"


def find_agents(folder: Path = AGENTS_FOLDER) -> list[Path]:
    """
    :param folder: the zoo's log folder of the published agents
    :return: the folders of the agents, by name
    """
    return sorted(path.parent for path in folder.glob(f"{ALGO}/*/{TRAINING_FILE}"))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The sums of more threads differ in their last digits, and returns with them."""
    threads = th.get_num_threads()
    th.set_num_threads(1)
    try:
        yield
    finally:
        th.set_num_threads(threads)


@_one_thread()
def evaluate(folder: Path, zip_name: str, n_episodes: int, first_seed: int) -> list[float]:
    """
    Play deterministically in the env of a zoo's run.

    :param folder: folder of the run
    :param zip_name: which of the agents in it
    :param n_episodes: number of episodes
    :param first_seed: episode i starts from seed ``first_seed + i``
    :return: the env's own returns, neither shaped nor normalized
    """
    model = load_player(folder / zip_name)
    returns: list[float] = []
    while len(returns) < n_episodes:
        env = make_env(config_folder(folder), seed=first_seed + len(returns), n_envs=_GROUP)
        group = np.full(_GROUP, np.nan)
        obs: Any = env.reset()
        while np.isnan(group).any():
            actions, _ = model.predict(obs, deterministic=True)
            obs, _, dones, infos = env.step(actions)
            for idx in np.flatnonzero(dones & np.isnan(group)):
                # Each copy of the env counts once: its next episode would start from no known seed
                group[idx] = infos[idx]["episode"]["r"]
        env.close()
        returns += [round(float(value), 3) for value in group]
    return returns[:n_episodes]


def best_candidate(selection: dict[str, list[float]]) -> str:
    """
    :param selection: of each candidate the returns of its episodes
    :return: the one with the highest mean among those that played the most episodes; of equals the first
    """
    most = max(len(returns) for returns in selection.values())
    finalists = [name for name, returns in selection.items() if len(returns) == most]
    return max(finalists, key=lambda name: float(np.mean(selection[name])))


def half_width(values: Sequence[float] | np.ndarray) -> float:
    """
    :param values: independent measurements
    :return: half of the 95% interval of their mean
    """
    return float(1.96 * np.std(values) / np.sqrt(len(values)))
