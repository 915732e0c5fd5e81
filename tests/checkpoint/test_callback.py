"""ResumableCheckpoint: when it writes checkpoints, what it notices, and what it refuses."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from callbacks import At
from checkpoints import (
    assert_same_replay_buffer,
    counting_agent,
    file_size_limit,
    files_in,
    resume_and_train,
    saved_timesteps,
)
from comparing import assert_identical, everything, global_states
from envs import counting_vec_env, tiny
from noises import normal_noise
from processes import held_by_another_process
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer

from sb3_td3x import TD3X
from sb3_td3x.buffers import end_open_episodes
from sb3_td3x.callbacks import tuning
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import list_checkpoints, newest_whole_checkpoint

# When checkpoints are written


def test_checkpoints_change_nothing(tmp_path: Path) -> None:
    results = []
    for callback in (None, ResumableCheckpoint(tmp_path, 10)):
        model = counting_agent(n_envs=2, action_noise=normal_noise()).learn(100, callback)
        results.append((everything(model), global_states()))
    assert_identical(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_second_learn_continues_in_the_same_folder(tmp_path: Path) -> None:
    callback = ResumableCheckpoint(tmp_path, 10)
    model = counting_agent().learn(25, callback)
    model.learn(25, callback, reset_num_timesteps=False)
    assert saved_timesteps(tmp_path) == 50
    assert TD3X.resume(tmp_path, counting_vec_env(1)).replay_buffer.pos == 50


def test_end_of_training_twice_writes_once(tmp_path: Path) -> None:
    """RL Zoo ends a training twice."""
    callback = ResumableCheckpoint(tmp_path, 10)
    counting_agent().learn(25, callback)
    before = files_in(tmp_path)
    callback.on_training_end()
    assert files_in(tmp_path) == before


def test_nothing_is_written_while_tuning(tmp_path: Path) -> None:
    token = tuning.set(True)
    try:
        counting_agent().learn(20, ResumableCheckpoint(tmp_path, 5))
    finally:
        tuning.reset(token)
    assert not any(tmp_path.iterdir())


def test_networks_of_nan_are_not_saved(tmp_path: Path) -> None:
    model = counting_agent()

    def poison() -> None:
        next(model.actor.parameters()).data.fill_(np.nan)

    callbacks = [ResumableCheckpoint(tmp_path, 10), At(25, poison)]
    with (
        pytest.warns(UserWarning, match="the networks hold NaN"),
        pytest.raises(ValueError, match="action of env 0"),
    ):
        model.learn(40, callbacks)
    assert saved_timesteps(tmp_path) == 20


# What is written: the rows that are new


def assert_resumed_replay_buffer_is(expected: ReplayBuffer, folder: Path) -> None:
    """Compare the replay buffer of a resumed training with that at the end of the training."""
    end_open_episodes(expected)
    assert_same_replay_buffer(expected, TD3X.resume(folder, counting_vec_env(1)).replay_buffer)


def test_only_new_rows_are_written(tmp_path: Path) -> None:
    counting_agent().learn(50, ResumableCheckpoint(tmp_path, 10))
    assert newest_whole_checkpoint(tmp_path).rows.ranges == ((0, 10), (10, 20), (20, 30), (30, 40), (40, 50))


def test_another_replay_buffer_is_written_whole(tmp_path: Path) -> None:
    model = counting_agent()

    def replace() -> None:
        # In the middle of a step, whose row is added to the old one
        model.replay_buffer = copy.deepcopy(model.replay_buffer)
        model.replay_buffer.rewards[:20] += 100

    model.learn(35, [ResumableCheckpoint(tmp_path, 10), At(25, replace)])
    assert model.replay_buffer.rewards[0] == 101
    assert_resumed_replay_buffer_is(model.replay_buffer, tmp_path)


@pytest.mark.parametrize("n_rows", [1, 20, 40])
def test_rows_that_are_added_by_hand_are_written(n_rows: int, tmp_path: Path) -> None:
    """Also as many as the replay buffer has, which leave its position where it was."""
    model = counting_agent(buffer_size=20)

    def add() -> None:
        for number in range(n_rows):
            obs = np.full((1, 2), 1000 + number, np.float32)
            model.replay_buffer.add(obs, obs, np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}])

    model.learn(35, [ResumableCheckpoint(tmp_path, 10), At(25, add)])
    assert_resumed_replay_buffer_is(model.replay_buffer, tmp_path)


def test_rewrite_saves_rows_that_were_changed(tmp_path: Path) -> None:
    checkpoint = ResumableCheckpoint(tmp_path, 10)
    model = counting_agent()

    def relabel() -> None:
        model.replay_buffer.rewards[:20] += 100
        checkpoint.rewrite()

    model.learn(35, [checkpoint, At(25, relabel)])
    assert model.replay_buffer.rewards[0] == 101
    assert_resumed_replay_buffer_is(model.replay_buffer, tmp_path)


# Full disk


@pytest.mark.parametrize("size", [0, 100, 3000])
def test_training_continues_on_a_full_disk_and_the_old_checkpoint_stays(size: int, tmp_path: Path) -> None:
    """The disk is full at the rows or at the agent, and has space again at the end."""
    model = counting_agent()
    stack = contextlib.ExitStack()
    before: dict[str, bytes] = {}

    def fill() -> None:
        before.update(files_in(tmp_path))
        stack.enter_context(file_size_limit(size))

    def compare_and_free() -> None:
        after = files_in(tmp_path)
        stack.close()
        assert after == before

    callbacks = [ResumableCheckpoint(tmp_path, 10), At(25, fill), At(45, compare_and_free)]
    with stack, pytest.warns(UserWarning, match="No checkpoint at timestep 30 in .* File too large"):
        model.learn(60, callbacks)
    assert saved_timesteps(tmp_path) == 60
    loaded = TD3X.resume(tmp_path, counting_vec_env(1)).replay_buffer
    np.testing.assert_array_equal(loaded.rewards, model.replay_buffer.rewards)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        counting_agent().learn(10, ResumableCheckpoint(tmp_path / "file", 10))


# What is refused


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"save_freq": 0}, "save_freq=0 is not allowed, expected an integer >= 1"),
        ({"keep": 0}, "keep=0 is not allowed, expected an integer >= 1"),
        ({"exact": 1}, "exact=1 is not allowed, expected True or False"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableCheckpoint("folder", **kwargs)


def test_no_folder_outside_of_the_zoo() -> None:
    with pytest.raises(ValueError, match="save_path=None is not allowed outside of RL Zoo"):
        counting_agent().learn(10, ResumableCheckpoint())


def test_other_algorithms(tmp_path: Path) -> None:
    model = TD3("MlpPolicy", counting_vec_env(1), **tiny())
    with pytest.raises(ValueError, match="is not allowed with ResumableCheckpoint, expected a TD3X"):
        model.learn(10, ResumableCheckpoint(tmp_path))


def test_folder_of_another_training(run_folder: Path) -> None:
    with pytest.raises(ValueError, match="holds checkpoints of another training, expected a folder without any"):
        counting_agent().learn(10, ResumableCheckpoint(run_folder))
    assert saved_timesteps(run_folder) == 50


def test_unknown_replay_buffer(tmp_path: Path) -> None:
    class Prioritized(ReplayBuffer):
        pass

    model = counting_agent(replay_buffer_class=Prioritized)
    with pytest.raises(ValueError, match="replay_buffer_class=Prioritized is not allowed with ResumableCheckpoint"):
        model.learn(10, ResumableCheckpoint(tmp_path))


def test_folder_that_another_process_uses(run_folder: Path) -> None:
    """When the other process is killed, its lock is gone."""
    files = sorted({*run_folder.rglob("*"), run_folder / ".lock"})
    with held_by_another_process(run_folder), pytest.raises(ValueError, match="is in use by another process"):
        resume_and_train(run_folder, counting_vec_env(1), 100, save_freq=5)
    assert sorted(run_folder.rglob("*")) == files
    resume_and_train(run_folder, counting_vec_env(1), 100, save_freq=5)
    assert saved_timesteps(run_folder) == 100
    assert len(list_checkpoints(run_folder)) == 2
