"""On a GPU losses are read when somebody may write the log. Here reading at the end of each ``train`` is left out."""

import csv
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from envs import counting_vec_env, tiny
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import configure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint

NAMES = ("train/critic_loss", "train/actor_loss", "train/q_mean")


class Lazy(TD3X):
    """Reads no losses in ``train``, as on a GPU."""

    def train(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(TD3X, "_record_losses"):
            super().train(*args, **kwargs)


def make(cls: type[TD3X] = Lazy, **kwargs: Any) -> TD3X:
    return cls("MlpPolicy", counting_vec_env(1), **tiny(policy_delay=1, **kwargs))


def logged(folder: Path, cls: type[TD3X], callback: BaseCallback | None = None) -> list[dict[str, Any]]:
    """What a training writes, by CSV; JSON and TensorBoard have the same."""
    model = make(cls)
    model.set_logger(configure(str(folder), ["csv", "json", "tensorboard", "stdout"]))
    model.learn(60, callback, log_interval=2)
    model.logger.close()
    with (folder / "progress.csv").open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    records = [json.loads(line) for line in (folder / "progress.json").read_text().splitlines()]
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in NAMES:
        written = [float(row[name]) for row in rows if row[name]]
        assert [record[name] for record in records if name in record] == written
        assert [event.value for event in events.Scalars(name)] == pytest.approx(written)
    return rows


@pytest.mark.parametrize("with_evaluations", [False, True])
def test_same_logs_as_when_read_at_once(tmp_path: Path, with_evaluations: bool, capsys: Any) -> None:
    """``EvalCallback`` writes the log, too."""
    found = []
    for cls in (TD3X, Lazy):
        callback = EvalCallback(counting_vec_env(1), eval_freq=7, verbose=0) if with_evaluations else None
        rows = logged(tmp_path / cls.__name__, cls, callback)
        found.append([{name: row[name] for name in NAMES} for row in rows])
        assert "critic_loss" in capsys.readouterr().out
    assert found[0] == found[1]
    assert sum(bool(row[NAMES[0]]) for row in found[0]) >= 5


def test_loggers_that_are_exchanged_on_the_way(tmp_path: Path) -> None:
    model = make().learn(20)
    first = model._logger
    model.train(1, 4)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    assert set(NAMES) <= model.logger.name_to_value.keys()
    assert first is not model.logger


def test_checkpoints_hold_numbers(tmp_path: Path) -> None:
    model = make()
    callback = ResumableCheckpoint(tmp_path, 10)
    model.learn(23, callback, log_interval=1000)
    resumed = TD3X.resume(tmp_path, counting_vec_env(1), device="cpu")
    resumed.learn(0, ResumableCheckpoint(tmp_path, 10), reset_num_timesteps=False)
    for name in NAMES:
        assert resumed.logger.name_to_value[name] == pytest.approx(model.logger.name_to_value[name])
