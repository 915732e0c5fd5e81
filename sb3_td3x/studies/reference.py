"""What RL Zoo has published about the envs in its benchmark: learning curves and scores to compare with."""

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def references() -> dict[str, dict[str, Any]]:
    """
    Read the published figures; the file names their sources.

    :return: for each env ``published_as``, the id of the version that the zoo's agents were trained in; ``curves`` by
        algorithm, with ``timesteps`` and mean ``returns`` of the evaluations of one training; and ``scores``, the mean
        returns of ``random`` actions and of the ``zoo``'s best agent, which is of ``zoo_algo``
    """
    text = resources.files("sb3_td3x.studies").joinpath("data/zoo_curves.json").read_text(encoding="utf-8")
    envs: dict[str, dict[str, Any]] = json.loads(text)["envs"]
    return envs
