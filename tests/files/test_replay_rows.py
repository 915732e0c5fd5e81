"""Rows of replay buffers in checkpoints: several files hold all rows together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import contents, goal_env
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x.buffers import PackedReplayBuffer, end_open_episodes
from sb3_td3x.files.records import from_record, to_record
from sb3_td3x.files.replay import RowFiles, describe, late_columns, read_rows, restore_position, write_new_rows

BOX = spaces.Box(-1, 1, (2,), np.float32)
DICT = spaces.Dict({"file": BOX, "a/b": BOX})
WITHOUT_TIMEOUTS = {"optimize_memory_usage": True, "handle_timeout_termination": False}
KINDS: dict[str, tuple[type[ReplayBuffer], spaces.Space, dict[str, Any]]] = {
    "packed": (PackedReplayBuffer, BOX, {}),
    "packed, optimized": (PackedReplayBuffer, BOX, WITHOUT_TIMEOUTS),
    "packed, dict": (PackedReplayBuffer, DICT, {}),
    "SB3's": (ReplayBuffer, BOX, {}),
    "SB3's, n-step": (NStepReplayBuffer, BOX, {}),
    "SB3's, optimized": (ReplayBuffer, BOX, WITHOUT_TIMEOUTS),
    "SB3's, dict": (DictReplayBuffer, DICT, {}),
}


def make(kind: str, size: int, n_envs: int = 1) -> ReplayBuffer:
    """Make an empty replay buffer."""
    if kind == "her":
        env = DummyVecEnv([goal_env] * n_envs)
        return HerReplayBuffer(
            size, env.observation_space, env.action_space, env=env, n_envs=n_envs, device="cpu", copy_info_dict=True
        )
    cls, space, kwargs = KINDS[kind]
    return cls(size, space, BOX, n_envs=n_envs, device="cpu", **kwargs)


def add_random(replay_buffer: ReplayBuffer, rng: np.random.Generator) -> None:
    """Add a random transition of each env."""

    def draw(space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: draw(value) for key, value in space.spaces.items()}
        return rng.random((replay_buffer.n_envs, *(space.shape or ())), dtype=np.float32)

    dones = rng.random(replay_buffer.n_envs) < 0.2
    infos = [{"TimeLimit.truncated": bool(rng.random() < 0.5), "x": rng.random(2), "n": 1} for _ in dones]
    space = replay_buffer.observation_space
    replay_buffer.add(
        draw(space), draw(space), draw(replay_buffer.action_space), draw(spaces.Box(-1, 1, ())), dones, infos
    )


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("size", [1, 2, 7, 30])
@pytest.mark.parametrize("kind", [*KINDS, "her"])
def test_rows_come_back_after_any_number_of_files(kind: str, size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    replay_buffer, written = make(kind, size), None
    for n_new in (0, 3, 1, 5, 11, 7, 40, 2):
        for _ in range(n_new):
            add_random(replay_buffer, rng)
        written = write_new_rows(tmp_path, replay_buffer, written, n_new)
        for path in tmp_path.iterdir():
            if path.name not in written.names:
                path.unlink()
        description = from_record(to_record(describe(replay_buffer)))
        loaded = make(kind, size)
        read_rows(tmp_path, loaded, written)
        for name, array in late_columns(replay_buffer).items():
            late_columns(loaded)[name][...] = array
        restore_position(loaded, description, replay_buffer.size(), "the file")
        np.testing.assert_equal(contents(loaded), contents(replay_buffer))
        # Only what is new was written
        assert sum(last - first for first, last in written.ranges) <= 2 * size


def test_too_many_files_are_replaced_by_one(tmp_path: Path) -> None:
    replay_buffer, written = make("packed", 1000), None
    rng = np.random.default_rng(0)
    for _ in range(502):
        add_random(replay_buffer, rng)
        written = write_new_rows(tmp_path, replay_buffer, written, 1)
    assert isinstance(written, RowFiles)
    assert written.ranges == ((0, 501), (501, 502))


def test_infos_with_objects_are_refused(tmp_path: Path) -> None:
    replay_buffer = make("her", 5)
    add_random(replay_buffer, np.random.default_rng(0))
    assert isinstance(replay_buffer, HerReplayBuffer)
    replay_buffer.infos[0, 0] = {"thing": object()}
    with pytest.raises(ValueError, match=r"infos with .* of builtins.object are not allowed in a checkpoint"):
        write_new_rows(tmp_path, replay_buffer, None, None)


def test_open_episodes_of_hindsight_can_be_sampled() -> None:
    replay_buffer = make("her", 50, 2)
    assert isinstance(replay_buffer, HerReplayBuffer)
    rng = np.random.default_rng(0)
    for _ in range(5):
        add_random(replay_buffer, rng)
    end_open_episodes(replay_buffer)
    assert (replay_buffer.ep_length[:5] > 0).all()
    assert replay_buffer._current_ep_start.tolist() == [5, 5]
    assert replay_buffer.dones[4].all()


@pytest.mark.parametrize("kind", ["packed, optimized", "SB3's, optimized"])
def test_open_episodes_are_terminal_where_time_outs_are_unknown(kind: str) -> None:
    """The next episode overwrites the next observation, so no value can be computed from it."""
    replay_buffer = make(kind, 50, 2)
    add_random(replay_buffer, np.random.default_rng(0))
    replay_buffer.dones[0] = 0
    end_open_episodes(replay_buffer)
    assert replay_buffer.dones[0].all()
    assert not replay_buffer.timeouts.any()
