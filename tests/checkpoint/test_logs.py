"""Log files of a resumed training."""

import shutil
from pathlib import Path

import pytest
from callbacks import At
from checkpoints import counting_agent, fail, files_in
from envs import counting_vec_env
from stable_baselines3.common.utils import configure_logger

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint

pytest.importorskip("tensorboard")


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """Return the folder of checkpoints of a training that logged values after the last one."""
    folder = tmp_path / "checkpoints"
    model = counting_agent(tensorboard_log=str(tmp_path / "tensorboard"))
    with pytest.raises(LookupError):
        model.learn(90, [ResumableCheckpoint(folder, 25, exact=True), At(70, fail)], log_interval=1)
    return folder


def test_tensorboard_continues_without_gaps_or_repeats(interrupted: Path, tmp_path: Path) -> None:
    """Another training has logged in the meantime."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    counting_agent(tensorboard_log=str(tmp_path / "tensorboard")).learn(10, log_interval=1)
    model = TD3X.resume(interrupted, counting_vec_env(1), device="cpu")
    model.learn(40, ResumableCheckpoint(interrupted, 25, exact=True), log_interval=1, reset_num_timesteps=False)

    events = EventAccumulator(str(tmp_path / "tensorboard/TD3X_1")).Reload()
    steps = [event.step for event in events.Scalars("rollout/ep_rew_mean")]
    assert steps == sorted(set(steps))
    assert len(steps) == model._episode_num


def test_tensorboard_is_cut_only_where_the_training_continues(interrupted: Path, tmp_path: Path) -> None:
    """Not if the user has set a logger, or resumes from a copy of the checkpoints."""
    before = files_in(tmp_path / "tensorboard")
    shutil.copytree(interrupted, tmp_path / "copy")

    with_own_logger = TD3X.resume(interrupted, counting_vec_env(1), device="cpu")
    with_own_logger.set_logger(configure_logger())
    with_own_logger.learn(5, ResumableCheckpoint(interrupted), reset_num_timesteps=False)
    copy = TD3X.resume(tmp_path / "copy", counting_vec_env(1), device="cpu")
    copy.learn(5, ResumableCheckpoint(tmp_path / "copy"), reset_num_timesteps=False)
    # SB3 writes another file into the newest folder
    assert before.items() <= files_in(tmp_path / "tensorboard").items()
