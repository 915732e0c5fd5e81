"""What a training with TD3X logs."""

import csv
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from envs import counting_vec_env, tiny_agent
from noises import normal_noise
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import LinearSchedule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("n_envs", [1, 4])
def test_tensorboard(tmp_path: pathlib.Path, n_envs: int) -> None:
    model = tiny_agent(
        counting_vec_env(n_envs),
        tensorboard_log=str(tmp_path),
        learning_rate=LinearSchedule(1e-2, 0.0, 1.0),
        qf_learning_rate="lin_1e-3",
        action_noise=normal_noise(),
        action_noise_decay=0.99,
        reward_shaping=[{"sb3_td3x.shaping.RewardScale": {"scale": 2.0}}],
    )
    model.learn(80, log_interval=2)
    (folder,) = tmp_path.iterdir()
    assert folder.name == "TD3X_1"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {
        *("train/actor_loss", "train/critic_loss", "train/q_mean", "train/learning_rate", "train/qf_learning_rate"),
        *("train/updates_per_env_step", "rollout/action_noise_scale", "rollout/shaped_reward_mean"),
        *("rollout/ep_rew_mean", "rollout/ep_len_mean", "rollout/saturated_actions", "time/fps"),
    } == set(events.Tags()["scalars"])
    last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert last["train/updates_per_env_step"] == pytest.approx(1 / n_envs)
    assert last["train/learning_rate"] == pytest.approx(10 * last["train/qf_learning_rate"], rel=1e-4)
    step = events.Scalars("rollout/action_noise_scale")[-1].step
    assert last["rollout/action_noise_scale"] == pytest.approx(0.99 ** (step - (5 if n_envs == 1 else 8)), rel=1e-4)
    assert all(np.isfinite(value) for value in last.values())


def test_tensorboard_run_names(tmp_path: pathlib.Path) -> None:
    model = tiny_agent(tensorboard_log=str(tmp_path))
    model.learn(8)
    model.learn(8, tb_log_name="mine")
    model.learn(8, tb_log_name="mine", reset_num_timesteps=False)
    model.learn(8, tb_log_name="mine")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["TD3X_1", "mine_1", "mine_2"]


@pytest.mark.lowest_sb3
def test_a_users_logger(tmp_path: pathlib.Path) -> None:
    model = tiny_agent(action_noise=normal_noise())
    model.set_logger(configure(str(tmp_path), ["csv", "json"]))
    model.learn(40, log_interval=1)
    header = (tmp_path / "progress.csv").read_text().splitlines()[0]
    assert "train/n_updates" in header
    assert "train/q_mean" in header
    assert "shaped" not in header


def test_options_that_are_off_are_not_logged() -> None:
    model = tiny_agent().learn(20, log_interval=None)
    assert not [name for name in model.logger.name_to_value if "noise" in name or "shaped" in name]


def test_no_actor_loss_without_an_update_of_the_actor() -> None:
    model = tiny_agent(policy_delay=100, gradient_steps=3).learn(20, log_interval=None)
    logged = model.logger.name_to_value
    assert "train/actor_loss" not in logged
    assert logged["train/n_updates"] == model._n_updates == 45
    assert logged["train/learning_rate"] == logged["train/qf_learning_rate"] == 1e-3


def test_table_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_agent(verbose=1).learn(30, log_interval=1)
    output = capsys.readouterr().out
    for name in ("ep_rew_mean", "actor_loss", "critic_loss", "q_mean", "updates_per_env_step"):
        assert name in output


# Losses are read only when something may write the log, so that no update waits for a GPU

LOSSES = ("train/critic_loss", "train/actor_loss", "train/q_mean")


class EagerTD3X(TD3X):
    """An agent that reads the losses after each ``train``, as SB3 does."""

    def train(self, *args: Any, **kwargs: Any) -> None:
        super().train(*args, **kwargs)
        assert self.logger


def logged_rows(folder: pathlib.Path, cls: type[TD3X], callback: BaseCallback | None) -> list[dict[str, Any]]:
    """Return the rows that a training logs as CSV, after comparing them with its JSON and TensorBoard logs."""
    # Some dumps follow an update without the actor
    model = tiny_agent(cls=cls, policy_delay=2)
    model.set_logger(configure(str(folder), ["csv", "json", "tensorboard", "stdout"]))
    model.learn(60, callback, log_interval=1)
    model.logger.close()
    with (folder / "progress.csv").open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    records = [json.loads(line) for line in (folder / "progress.json").read_text().splitlines()]
    events = EventAccumulator(str(folder))
    events.Reload()
    for name in LOSSES:
        written = [float(row[name]) for row in rows if row[name]]
        assert [record[name] for record in records if name in record] == written
        assert [event.value for event in events.Scalars(name)] == pytest.approx(written)
    return rows


@pytest.mark.parametrize("with_evaluations", [False, True])
def test_losses_read_late_are_logged_the_same(tmp_path: pathlib.Path, with_evaluations: bool, capsys: Any) -> None:
    """``EvalCallback`` writes the log, too."""
    found = []
    for cls in (TD3X, EagerTD3X):
        callback = EvalCallback(counting_vec_env(1), eval_freq=7, verbose=0) if with_evaluations else None
        rows = logged_rows(tmp_path / cls.__name__, cls, callback)
        found.append([{name: row[name] for name in LOSSES} for row in rows])
        assert "critic_loss" in capsys.readouterr().out
    assert found[0] == found[1]
    assert sum(bool(row[LOSSES[0]]) for row in found[0]) >= 5


def test_losses_read_late_go_to_a_new_logger(tmp_path: pathlib.Path) -> None:
    model = tiny_agent(policy_delay=1).learn(20)
    first = model._logger
    model.train(1, 4)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    assert set(LOSSES) <= model.logger.name_to_value.keys()
    assert first is not model.logger


def test_checkpoints_contain_losses_read_late(tmp_path: pathlib.Path) -> None:
    model = tiny_agent(policy_delay=1)
    model.learn(23, ResumableCheckpoint(tmp_path, 10), log_interval=1000)
    resumed = TD3X.resume(tmp_path, counting_vec_env(1), device="cpu")
    resumed.learn(0, ResumableCheckpoint(tmp_path, 10), reset_num_timesteps=False)
    for name in LOSSES:
        assert resumed.logger.name_to_value[name] == pytest.approx(model.logger.name_to_value[name])
