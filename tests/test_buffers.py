"""The packed replay buffer against SB3's."""

import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch as th
from envs import CountingEnv, tiny
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer

ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
SMALL_MEMORY = {"optimize_memory_usage": True, "handle_timeout_termination": False}
OBS, ACTION = spaces.Box(-1, 1, (5,)), spaces.Box(-1, 1, (2,))


def make(cls: type[ReplayBuffer], size: int = 20, n_envs: int = 1, **kwargs: Any) -> ReplayBuffer:
    return cls(size, OBS, ACTION, "cpu", n_envs, **kwargs)


def fill(buffer: ReplayBuffer, steps: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(steps):
        obs, next_obs = rng.normal(size=(2, buffer.n_envs, 5))
        infos = [{"TimeLimit.truncated": True} if rng.random() < 0.5 else {} for _ in range(buffer.n_envs)]
        action, reward = rng.uniform(-1, 1, (buffer.n_envs, 2)), rng.normal(size=buffer.n_envs)
        buffer.add(obs, next_obs, action, reward, rng.random(buffer.n_envs) < 0.5, infos)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [4, 20, 33])
@pytest.mark.parametrize("kwargs", [{}, {"handle_timeout_termination": False}, SMALL_MEMORY])
def test_same_contents_and_batches_as_sb3(n_envs: int, steps: int, kwargs: dict[str, Any]) -> None:
    """Half full, full, and overwriting the oldest; a seed draws the same batches."""
    sb3, packed = (
        make(ReplayBuffer, 20 * n_envs, n_envs, **kwargs),
        make(PackedReplayBuffer, 20 * n_envs, n_envs, **kwargs),
    )
    batches = []
    for buffer in (sb3, packed):
        fill(buffer, steps)
        set_random_seed(0)
        batches.append([buffer.sample(16) for _ in range(3)])
    assert (packed.pos, packed.full, packed.size()) == (sb3.pos, sb3.full, sb3.size())
    for name in ARRAYS:
        assert hasattr(packed, name) == hasattr(sb3, name)
        if hasattr(sb3, name):
            np.testing.assert_array_equal(getattr(packed, name), getattr(sb3, name), err_msg=name)
    for expected, actual in zip(*batches, strict=True):
        for name, value in expected._asdict().items():
            if value is not None:
                assert th.equal(getattr(actual, name), value), name


@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
def test_same_batches_as_sb3_with_vec_normalize(kwargs: dict[str, Any]) -> None:
    env = VecNormalize(DummyVecEnv([CountingEnv]))
    env.obs_rms.mean[:] = 3
    batches = []
    for cls in (ReplayBuffer, PackedReplayBuffer):
        buffer = cls(20, env.observation_space, env.action_space, "cpu", **kwargs)
        for step in range(9):
            obs = np.full((1, 2), step, np.float32)
            buffer.add(obs, obs + 1, np.zeros((1, 1)), np.ones(1), np.zeros(1), [{}])
        set_random_seed(0)
        batches.append(buffer.sample(8, env=env))
    for expected, actual in zip(*batches, strict=True):
        assert expected is actual is None or th.equal(actual, expected)


@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
def test_memory_is_sb3_s(kwargs: dict[str, Any]) -> None:
    packed, sb3 = make(PackedReplayBuffer, 1000, **kwargs), make(ReplayBuffer, 1000, **kwargs)
    assert packed._rows.nbytes == sum(getattr(sb3, name).nbytes for name in ARRAYS if hasattr(sb3, name))


@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
def test_copy_on_a_device_follows(kwargs: dict[str, Any]) -> None:
    """What is added between two batches, across the end of the memory and more than once around it, and assigned."""
    buffer = make(PackedReplayBuffer, 12, 2, **kwargs)
    assert isinstance(buffer, PackedReplayBuffer)
    # As on a GPU: a copy
    buffer._device_rows = th.zeros_like(buffer._host_rows)
    for steps in (1, 0, 4, 3, 5, 20, 2):
        fill(buffer, steps)
        rows = buffer.rows_on_device()
        assert rows is buffer._device_rows
        assert th.equal(rows, buffer._host_rows)
    buffer.rewards = np.full((6, 2), 3.0)
    assert (buffer.sample(4).rewards == 3).all()
    assert pickle.loads(pickle.dumps(buffer))._device_rows is None


@pytest.mark.parametrize("kwargs", [{}, SMALL_MEMORY])
@pytest.mark.parametrize("steps", [1, 6, 9])
def test_copy_on_a_device_has_the_marks_of_episodes_that_were_cut_short(kwargs: dict[str, Any], steps: int) -> None:
    """As SB3 and checkpoints mark them before the next episode begins: in the arrays, after the step was sent."""
    buffer = make(PackedReplayBuffer, 12, 2, **kwargs)
    assert isinstance(buffer, PackedReplayBuffer)
    buffer._device_rows = th.zeros_like(buffer._host_rows)
    fill(buffer, steps)
    buffer.rows_on_device()
    buffer.dones[buffer.pos - 1] = True
    fill(buffer, 1)
    assert th.equal(buffer.rows_on_device(), buffer._host_rows)


def test_stays_in_the_computer_s_memory_where_the_device_has_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise th.cuda.OutOfMemoryError

    buffer = make(PackedReplayBuffer)
    fill(buffer, 6)
    expected = buffer.sample(4)
    buffer.device = th.device("meta")
    monkeypatch.setattr(th, "zeros_like", fail)
    with pytest.warns(UserWarning, match="does not fit into the memory of meta"):
        batch = buffer.sample(4)
    assert [(part.shape, part.device.type) for part in batch[:5]] == [(part.shape, "meta") for part in expected[:5]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.sample(4)


def test_warns_of_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.warns(UserWarning, match=r"will take 0\.00 GB of memory"):
        make(PackedReplayBuffer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(PackedReplayBuffer, 5)


def test_time_outs_cannot_be_told_where_observations_are_stored_once() -> None:
    with pytest.raises(ValueError, match=r"handle_timeout_termination=True is not allowed"):
        make(PackedReplayBuffer, optimize_memory_usage=True)


def test_arrays_stay_views_of_the_rows() -> None:
    """Written to, assigned, copied and unpickled, as SB3's own arrays may be."""
    buffer = make(PackedReplayBuffer)
    fill(buffer, 4)
    buffer.rewards[0] = 7
    buffer.observations = np.full((20, 1, 5), 2.0)
    loaded = pickle.loads(pickle.dumps(buffer))
    assert len(pickle.dumps(buffer)) < 1.5 * buffer._rows.nbytes + 5000
    for each in (buffer, loaded):
        batch = each.sample(64)
        assert (batch.observations == 2).all()
        assert 7 in batch.rewards
    loaded.rewards[:] = 9
    assert (loaded.sample(4).rewards == 9).all()
    assert buffer.rewards[0] == 7


def test_default_where_it_applies() -> None:
    assert isinstance(TD3X("MlpPolicy", CountingEnv(), **tiny()).replay_buffer, PackedReplayBuffer)
    for kwargs in ({"n_steps": 2}, {"replay_buffer_class": ReplayBuffer}):
        assert not isinstance(TD3X("MlpPolicy", CountingEnv(), **tiny(**kwargs)).replay_buffer, PackedReplayBuffer)
    small_memory = {"optimize_memory_usage": True, "replay_buffer_kwargs": {"handle_timeout_termination": False}}
    buffer = TD3X("MlpPolicy", CountingEnv(), **tiny(**small_memory)).replay_buffer
    assert isinstance(buffer, PackedReplayBuffer)
    assert buffer.optimize_memory_usage
    assert type(TD3("MlpPolicy", CountingEnv(), **tiny()).replay_buffer) is ReplayBuffer
