"""Make the zoo's experiment managers."""

import argparse
from pathlib import Path
from typing import Any

import yaml
from rl_zoo3.exp_manager import ExperimentManager


def make_manager(
    folder: Path,
    defaults: dict[str, Any] | None = None,
    env_id: str = "Pendulum-v1",
    manager_class: Any = ExperimentManager,
    **kwargs: Any,
) -> ExperimentManager:
    """
    Make a manager as the zoo's command line does.

    :param folder: Folder for its logs
    :param defaults: Default hyperparameters; None for those of the package
    :param env_id: The env
    :param manager_class: Class of the manager
    :param kwargs: Further constructor arguments
    :return: The manager
    """
    if defaults is not None:
        (folder / "config.yml").write_text(yaml.safe_dump({"default": defaults}))
        kwargs["config"] = str(folder / "config.yml")
    options: dict[str, Any] = {"algo": "td3x", "eval_freq": -1, "seed": 1, "verbose": 0, "n_timesteps": 100}
    options.update(
        args=argparse.Namespace(algo="td3x", env=env_id, track=False),
        env_id=env_id,
        log_folder=str(folder / "logs"),
    )
    manager: ExperimentManager = manager_class(**{**options, **kwargs})
    return manager
