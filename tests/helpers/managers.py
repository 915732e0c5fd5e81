"""The zoo's managers."""

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
    """A manager as the zoo's command line makes it, by default with the package's own hyperparameters."""
    if defaults is not None:
        (folder / "config.yml").write_text(yaml.safe_dump({"default": defaults}))
        kwargs["config"] = str(folder / "config.yml")
    options: dict[str, Any] = {"algo": "td3x", "eval_freq": -1, "seed": 1, "verbose": 0, "n_timesteps": 100}
    options.update(
        args=argparse.Namespace(algo="td3x", env=env_id, track=False),
        env_id=env_id,
        log_folder=str(folder / "logs"),
        device="cpu",
    )
    manager: ExperimentManager = manager_class(**{**options, **kwargs})
    return manager
