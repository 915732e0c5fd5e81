"""The folder of the checkpoints: what stays in it, and what happens if it is damaged."""

from pathlib import Path

import numpy as np
import pytest
from checkpoints import counting_agent, damage, resume_and_train
from envs import counting_vec_env

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import list_checkpoints, newest_whole_checkpoint, read_checkpoint
from sb3_td3x.files.atomic import TEMPORARY_PATTERN


def test_old_checkpoints_and_their_rows_are_deleted(tmp_path: Path) -> None:
    counting_agent(n_envs=2).learn(47, ResumableCheckpoint(tmp_path, 10, keep=3))
    names = ["000003_30_steps.zip", "000004_40_steps.zip", "000005_48_steps.zip"]
    assert [path.name for path in list_checkpoints(tmp_path)] == names
    assert len(list((tmp_path / "replay_buffer").iterdir())) == 5
    assert not list(tmp_path.rglob(TEMPORARY_PATTERN))


def test_folder_stays_small_in_a_long_training(tmp_path: Path) -> None:
    """Rows that were overwritten in the replay buffer are deleted from the disk too."""
    counting_agent(buffer_size=20).learn(200, ResumableCheckpoint(tmp_path, 5, keep=1))
    (checkpoint,) = map(read_checkpoint, list_checkpoints(tmp_path))
    assert {path.name for path in (tmp_path / "replay_buffer").iterdir()} == {*checkpoint.rows.names}
    assert len(checkpoint.rows.names) <= 5


def test_checkpoint_is_an_agent_s_file(run_folder: Path) -> None:
    *_, newest = list_checkpoints(run_folder)
    model = TD3X.load(newest, device="cpu")
    assert model.num_timesteps == 50


@pytest.mark.parametrize("how", ["missing", "cut short", "flipped", "another"])
@pytest.mark.parametrize("part", ["checkpoint", "rows"])
def test_older_checkpoint_is_used_if_the_newest_is_damaged(part: str, how: str, run_folder: Path) -> None:
    older, path = list_checkpoints(run_folder)
    if part == "rows":
        path = run_folder / "replay_buffer" / newest_whole_checkpoint(run_folder).rows.names[-1]
    damage(path, how)
    if (part, how) == ("checkpoint", "missing"):
        model = TD3X.resume(run_folder, counting_vec_env(1), device="cpu")
    else:
        with pytest.warns(UserWarning, match=rf"{path.name}.*Resuming from {older.name}"):
            model = TD3X.resume(run_folder, counting_vec_env(1), device="cpu")
    assert model.num_timesteps == model.replay_buffer.pos == 40


def test_every_flipped_byte_of_a_checkpoint_is_found(run_folder: Path) -> None:
    newest = newest_whole_checkpoint(run_folder)
    rng = np.random.default_rng(0)
    for path in (newest.path, run_folder / "replay_buffer" / newest.rows.names[0]):
        content = path.read_bytes()
        for position in rng.integers(len(content), size=100):
            changed = bytearray(content)
            changed[position] ^= 1 << rng.integers(8)
            path.write_bytes(changed)
            with pytest.raises(ValueError, match=path.name):
                read_checkpoint(newest.path)
        path.write_bytes(content)


def test_damaged_checkpoint_is_replaced(run_folder: Path) -> None:
    older, newest = list_checkpoints(run_folder)
    damage(newest, "flipped")
    with pytest.warns(UserWarning, match="damaged"):
        resume_and_train(run_folder, counting_vec_env(1), 60, save_freq=100)
    assert [path.name for path in list_checkpoints(run_folder)] == [older.name, "000006_60_steps.zip"]
    assert newest_whole_checkpoint(run_folder)


def test_no_checkpoint_is_whole(run_folder: Path) -> None:
    for path in list_checkpoints(run_folder):
        damage(path, "flipped")
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*; .*steps.zip is damaged: .* checksum"):
        TD3X.resume(run_folder, counting_vec_env(1))


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is no whole checkpoint in"):
        TD3X.resume(tmp_path / "nowhere", counting_vec_env(1))
