"""What the guide to experiment trackers shows: values reach other programs through SB3's logger."""

from pathlib import Path
from typing import Any

import pytest
from envs import tiny_agent
from stable_baselines3.common.logger import Logger

GUIDE = Path(__file__).parents[1] / "docs/guides/trackers.md"
NAMES = {"rollout/ep_rew_mean", "rollout/saturated_actions", "train/critic_loss", "train/actor_loss", "train/n_updates"}


def guides_tracker() -> Any:
    """Return the class that the guide defines."""
    code = GUIDE.read_text(encoding="utf-8").rpartition("```python\n")[2].partition("\nlog_metric = ")[0]
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["Tracker"]


def train(log_metric: Any) -> None:
    """Train a tiny agent and log twice or more."""
    model = tiny_agent()
    model.set_logger(Logger(folder=None, output_formats=[guides_tracker()(log_metric)]))
    model.learn(80, log_interval=2)


def test_any_function() -> None:
    logged: dict[str, list[int]] = {}
    train(lambda name, value, step: logged.setdefault(name, []).append(step))
    assert logged.keys() >= NAMES
    for name in NAMES:
        assert len(logged[name]) > 1
        assert logged[name] == sorted(set(logged[name]))


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("test", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("test")
    with mlflow.start_run() as run:
        train(mlflow.log_metric)
    assert mlflow.get_run(run.info.run_id).data.metrics.keys() >= NAMES
