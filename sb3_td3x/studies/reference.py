"""What RL Zoo has published about the envs in its benchmark: learning curves and scores to compare with."""

import functools
import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class Reference:
    """
    Published figures of an env.

    :param published_as: id of the version of the env that the zoo's agents were trained in
    :param curves: for each algorithm, timesteps and mean returns of the evaluations, one training seed each
    :param random_score: mean return of random actions
    :param zoo_score: mean return of the zoo's best agent
    """

    published_as: str
    curves: dict[str, tuple[list[int], list[float]]]
    random_score: float
    zoo_score: float
    zoo_algo: str


@functools.cache
def references() -> dict[str, Reference]:
    """Read the published figures by env; the file names their sources."""
    text = resources.files("sb3_td3x.studies").joinpath("data/zoo_curves.json").read_text(encoding="utf-8")
    return {
        env: Reference(
            published_as=entry["published_as"],
            curves={algo: (curve["timesteps"], curve["returns"]) for algo, curve in entry["curves"].items()},
            random_score=entry["scores"]["random"],
            zoo_score=entry["scores"]["zoo"],
            zoo_algo=entry["scores"]["zoo_algo"],
        )
        for env, entry in json.loads(text)["envs"].items()
    }
