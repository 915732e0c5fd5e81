"""
Published agents: folders in the zoo's layout, such as ``rl-trained-agents/td3x/Pendulum-v1_1``, and ``training.json``
in them with the returns of all seeds of the env.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x.files.atomic import atomic_write
from sb3_td3x.studies.results import Evaluations
from sb3_td3x.zoo.register import ALGO

AGENTS_FOLDER = Path("rl-trained-agents")
TRAINING_FILE = "training.json"
FORMAT = 1

# Episode i starts from seed FIRST_SEED + i. Trainings and their evaluations use small seeds, and the tests of studies
# those from 100,000 on, so no training, tuning or selection has seen the start states of the test.
SELECTION_SEED = 500_000
TEST_SEED = 1_000_000


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
    evaluations: Evaluations


@dataclass(frozen=True)
class Training:
    """
    The content of ``training.json``.

    :param published_seed: the seed whose agent is in the same folder: the best one in the selection
    :param seeds: all seeds that were trained with these hyperparameters, the worst too
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


def find_agents(folder: Path) -> list[Path]:
    """Find published agents."""
    return sorted(path.parent for path in folder.glob(f"{ALGO}/*/{TRAINING_FILE}"))


def best_candidate(selection: dict[str, list[float]]) -> str:
    """Return the candidate with the highest mean return, among those with the most episodes."""
    most = max(len(returns) for returns in selection.values())
    finalists = [name for name, returns in selection.items() if len(returns) == most]
    return max(finalists, key=lambda name: float(np.mean(selection[name])))
