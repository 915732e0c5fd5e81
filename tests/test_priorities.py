"""Prioritized sampling: draws by priority, and the priorities of the transitions in the replay buffer."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import counting_vec_env, tiny
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.priorities import Priorities

CPU = th.device("cpu")
BOX = spaces.Box(-1, 1, (1,))


def add(replay_buffer: PackedReplayBuffer, steps: int) -> None:
    zeros = np.zeros((replay_buffer.n_envs, 1), np.float32)
    for _ in range(steps):
        replay_buffer.add(zeros, zeros, zeros, zeros[:, 0], zeros[:, 0], [{}] * replay_buffer.n_envs)


def make_buffer(size: int = 8, n_envs: int = 1, **kwargs: Any) -> PackedReplayBuffer:
    return PackedReplayBuffer(size, BOX, BOX, "cpu", n_envs, prioritized_replay_alpha=0.5, **kwargs)


def give(replay_buffer: PackedReplayBuffer, td_errors: dict[int, float]) -> None:
    """Change the priorities of some rows as if they had been drawn."""
    replay_buffer.blocks_on_device()
    replay_buffer._drawn_rows = th.tensor([*td_errors])
    replay_buffer.update_priorities(th.tensor([*td_errors.values()]))


def test_draws_are_proportional_to_priorities() -> None:
    """In every level of the tree; the shares of 200,000 draws lie within five standard deviations."""
    values = np.random.default_rng(0).integers(0, 4, 70).astype(np.float32)
    priorities = Priorities(values, 3.0, 1.0, CPU)
    th.manual_seed(0)
    counts = np.bincount(priorities.draw(200_000).numpy(), minlength=70)
    shares = values / values.sum()
    assert (counts[values == 0] == 0).all()
    assert (np.abs(counts - 200_000 * shares) <= 5 * np.sqrt(200_000 * shares)).all()


@settings(max_examples=50, deadline=None)
@given(n_rows=st.integers(1, 130), seed=st.integers(0, 1000))
def test_sums_are_the_same_after_changes_as_in_a_new_tree(n_rows: int, seed: int) -> None:
    """Bit for bit: a training that is resumed makes the same draws."""
    rng = np.random.default_rng(seed)
    priorities = Priorities(np.zeros(n_rows, np.float32), 1.0, 0.4, CPU)
    for _ in range(5):
        rows = th.from_numpy(rng.integers(0, n_rows, 20))
        start = int(rows[0])
        priorities.fill(start, int(rng.integers(start, n_rows)) + 1, priorities.maximum)
        priorities.update(rows, th.from_numpy(rng.normal(0, 30, 20).astype(np.float32)))
        priorities.fill(start, start + 1, 0)
    new = Priorities(priorities.values().astype(np.float32), priorities.maximum.item(), 0.4, CPU)
    for mine, others in zip(priorities.state, new.state, strict=True):
        assert th.equal(mine, others)


def test_priorities_computed_by_hand() -> None:
    replay_buffer = make_buffer()
    add(replay_buffer, 3)
    assert replay_buffer.priorities is not None
    assert replay_buffer.priorities[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    give(replay_buffer, {0: 0.3, 2: -9.0})
    assert replay_buffer.priorities[:4, 0].tolist() == [1, 1, 3, 0]
    # A new transition has the highest priority so far, also once no other has it
    give(replay_buffer, {2: 4.0})
    add(replay_buffer, 2)
    assert replay_buffer.priorities[:, 0].tolist() == [1, 1, 2, 3, 3, 0, 0, 0]
    add(replay_buffer, 4)
    assert replay_buffer.priorities[:, 0].tolist() == [3, 1, 2, 3, 3, 3, 3, 3]
    assert replay_buffer.max_priority == 3


def test_each_env_has_rows_of_its_own() -> None:
    replay_buffer = make_buffer(size=6, n_envs=2)
    add(replay_buffer, 2)
    give(replay_buffer, {1: 16.0})
    add(replay_buffer, 2)
    assert replay_buffer.priorities is not None
    assert replay_buffer.priorities.tolist() == [[4, 4], [1, 1], [4, 4]]


def test_row_with_the_last_observation_is_never_drawn() -> None:
    """With ``optimize_memory_usage`` the oldest row holds the observation after the newest transition."""
    replay_buffer = make_buffer(size=4, optimize_memory_usage=True, handle_timeout_termination=False)
    for n_new in (1, 3, 1, 6):
        add(replay_buffer, n_new)
        replay_buffer.blocks_on_device()
        drawn = set(replay_buffer.draw_by_priority(300).tolist())
        assert drawn == set(range(replay_buffer.size())) - ({replay_buffer.pos} if replay_buffer.full else set())


def test_uniform_replay_buffer_has_no_priorities() -> None:
    replay_buffer = PackedReplayBuffer(4, BOX, BOX, "cpu")
    assert replay_buffer.priorities is None
    assert replay_buffer.max_priority is None


def test_nan_in_td_errors_does_not_break_sampling() -> None:
    """Whoever looks for the cause needs the training to go on."""
    replay_buffer = make_buffer()
    add(replay_buffer, 3)
    give(replay_buffer, {1: float("nan")})
    assert len(replay_buffer.sample(50).rewards) == 50


def agent(**kwargs: Any) -> TD3X:
    return TD3X("MlpPolicy", counting_vec_env(2), **tiny(**{"prioritized_replay_alpha": 0.5, **kwargs}))


def test_training_changes_priorities_of_what_it_draws() -> None:
    model = agent(learning_starts=20, gradient_steps=1, batch_size=4).learn(20)
    before = model.replay_buffer.priorities.copy()  # type: ignore[attr-defined]
    # The counter that is the observation makes TD errors of some hundreds
    model.train(gradient_steps=1, batch_size=4)
    after = model.replay_buffer.priorities  # type: ignore[attr-defined]
    changed = np.flatnonzero(before != after)
    assert set(changed) <= set(model.replay_buffer._drawn_rows.tolist())  # type: ignore[attr-defined]
    assert len(changed) > 0


def test_replay_buffer_of_another_exponent_is_refused(tmp_path: Path) -> None:
    model = agent()
    model.learn(20, ResumableCheckpoint(tmp_path, 10, verbose=0))
    file = io.BytesIO()
    model.save_replay_buffer(file)
    file.seek(0)
    with pytest.raises(ValueError, match=r"has prioritized_replay_alpha=0.5, expected 0.0"):
        agent(prioritized_replay_alpha=0).load_replay_buffer(file)
    for alpha in (0, 0.4):
        with pytest.raises(ValueError, match=rf"has prioritized_replay_alpha=0.5, expected {alpha}"):
            TD3X.resume(tmp_path, counting_vec_env(2), prioritized_replay_alpha=alpha)
