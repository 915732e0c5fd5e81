"""Saved replay buffers: what they contain, and what comes back from them."""

import io
import pathlib
import pickle
import tracemalloc
from typing import Any

import gymnasium as gym
import hostile
import numpy as np
import pytest
from envs import CountingEnv, tiny
from gymnasium import spaces
from replay_buffers import BUFFERS, HER, OPTIMIZED, agent_with, assert_same_state, saved, state_of
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.utils import set_random_seed

from sb3_td3x import TD3X


def samples(replay_buffer: Any) -> Any:
    set_random_seed(0)
    return [np.asarray(it) for it in replay_buffer.sample(20) if it is not None and not isinstance(it, dict)]


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", BUFFERS)
def test_buffer_comes_back_the_same(case: str, tmp_path: pathlib.Path) -> None:
    model = agent_with(case)
    model.save_replay_buffer(tmp_path / "buffer")
    assert not any(name.endswith(".pkl") for name in hostile.members_of((tmp_path / "buffer.pkl").read_bytes()))
    other = agent_with(case, 0)
    for path in (tmp_path / "buffer", str(tmp_path / "buffer.pkl"), io.BytesIO(saved(model))):
        other.load_replay_buffer(path, truncate_last_traj=False)
        assert type(other.replay_buffer) is type(model.replay_buffer)
        assert_same_state(state_of(model.replay_buffer), state_of(other.replay_buffer))
        assert_same_state(dict(enumerate(samples(model.replay_buffer))), dict(enumerate(samples(other.replay_buffer))))
    if isinstance(other.replay_buffer, HerReplayBuffer):
        assert other.replay_buffer.env is other.env
    other.learn(10)


@pytest.mark.parametrize("case", BUFFERS)
def test_empty_buffer_comes_back(case: str) -> None:
    other = agent_with(case)
    other.load_replay_buffer(io.BytesIO(saved(agent_with(case, 0))))
    assert other.replay_buffer.size() == 0
    other.learn(10)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", [case for case in BUFFERS if not case.startswith("packed")])
def test_pickle_of_sb3_is_read_without_running_it(case: str) -> None:
    model = agent_with(case)
    file = io.BytesIO()
    pickle.dump(model.replay_buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
    for trusted in (False, True):
        other = agent_with(case, 0)
        file.seek(0)
        other.load_replay_buffer(file, truncate_last_traj=False, trusted=trusted)
        assert_same_state(state_of(model.replay_buffer), state_of(other.replay_buffer))
        other.learn(10)


def test_last_trajectory_is_truncated_as_in_sb3() -> None:
    for case in ("her", "her, 2 envs, infos", "her, full"):
        model, expected = agent_with(case), agent_with(case)
        # In the middle of an episode
        assert isinstance(expected.replay_buffer, HerReplayBuffer)
        content = saved(model)
        assert_same_state(state_of(model.replay_buffer), state_of(expected.replay_buffer))
        model.load_replay_buffer(io.BytesIO(content), truncate_last_traj=True)
        expected.replay_buffer.truncate_last_trajectory()
        assert_same_state(state_of(expected.replay_buffer), state_of(model.replay_buffer))


def test_arrays_are_numpy_s() -> None:
    model = agent_with("packed")
    arrays = np.load(io.BytesIO(saved(model)))
    np.testing.assert_array_equal(arrays["observations"], model.replay_buffer.observations[:30])
    assert arrays["rewards"].shape == (30, 1)


def test_large_buffer_passes_through_in_small_parts(tmp_path: pathlib.Path) -> None:
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(buffer_size=1_000_000))
    model.replay_buffer.full = True
    size = model.replay_buffer.blocks["rows"].nbytes  # type: ignore[attr-defined]
    assert size > 25e6
    tracemalloc.start()
    model.save_replay_buffer(tmp_path / "buffer")
    _, peak = tracemalloc.get_traced_memory()
    assert peak < 8e6
    model.replay_buffer = None  # type: ignore[assignment]
    model.load_replay_buffer(tmp_path / "buffer")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.3 * size
    assert model.replay_buffer.full


def test_only_what_is_there_is_written(tmp_path: pathlib.Path) -> None:
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(buffer_size=1_000_000)).learn(30)
    assert len(saved(model)) < 10_000


def test_saving_replaces_the_file_as_a_whole(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = agent_with("packed")
    model.save_replay_buffer(tmp_path / "buffer")
    before = (tmp_path / "buffer.pkl").read_bytes()

    def full_disk(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full_disk)
    with pytest.raises(OSError, match="No space"):
        model.learn(5).save_replay_buffer(tmp_path / "buffer")
    assert (tmp_path / "buffer.pkl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["buffer.pkl"]


class OwnBuffer(ReplayBuffer):
    """A user's replay buffer."""


def test_user_s_own_class_needs_trust(tmp_path: pathlib.Path) -> None:
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(replay_buffer_class=OwnBuffer)).learn(20)
    model.save_replay_buffer(tmp_path / "buffer")
    with pytest.raises(ValueError, match=r"buffer.*OwnBuffer.*trusted=True"):
        model.load_replay_buffer(tmp_path / "buffer")
    model.load_replay_buffer(tmp_path / "buffer", trusted=True)
    assert isinstance(model.replay_buffer, OwnBuffer)
    assert model.replay_buffer.pos == 20


class Thing:
    """Something that an info may hold."""


class ThingEnv(BitFlippingEnv):
    """An env with objects in its infos."""

    def step(self, action: Any) -> Any:
        *step, info = super().step(action)
        return (*step, {**info, "thing": Thing()})

    def compute_reward(self, *args: Any) -> Any:
        return super().compute_reward(*args).astype(np.float32)


def test_infos_that_are_not_plain_are_pickled() -> None:
    env = ThingEnv(n_bits=2, continuous=True)
    kwargs = {**HER, "replay_buffer_kwargs": {"copy_info_dict": True}}
    model = TD3X("MultiInputPolicy", env, **tiny(**kwargs)).learn(20)
    content = saved(model)
    with pytest.raises(ValueError, match=r"Thing.*trusted=True"):
        model.load_replay_buffer(io.BytesIO(content))
    model.load_replay_buffer(io.BytesIO(content), trusted=True)
    assert model.replay_buffer.pos == 20


def test_her_needs_an_env() -> None:
    file = io.BytesIO(saved(agent_with("her")))
    model = agent_with("her")
    model.env = None
    with pytest.raises(ValueError, match=r"HerReplayBuffer.*env"):
        model.load_replay_buffer(file)


@pytest.mark.parametrize(("case", "expected_size"), [("packed, full", 20), ("packed", 30)])
def test_agent_with_a_smaller_buffer_size_takes_all_transitions(case: str, expected_size: int) -> None:
    """Rows that are empty in the file take no memory."""
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(buffer_size=5))
    other = agent_with(case)
    model.load_replay_buffer(io.BytesIO(saved(other)))
    assert model.replay_buffer.buffer_size == model.replay_buffer.size() == expected_size
    np.testing.assert_array_equal(model.replay_buffer.rewards, other.replay_buffer.rewards[:expected_size])
    model.learn(10)


def test_agent_with_a_larger_buffer_size_keeps_that_of_the_file() -> None:
    model = agent_with("packed")
    model.load_replay_buffer(io.BytesIO(saved(agent_with("packed, full"))))
    assert model.replay_buffer.buffer_size == 20


def test_agent_and_replay_buffer_of_sb3_continue_together(tmp_path: pathlib.Path) -> None:
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(20)
    sb3.save(tmp_path / "agent")
    sb3.save_replay_buffer(tmp_path / "replay_buffer")
    model = TD3X.load(tmp_path / "agent", env=CountingEnv())
    model.load_replay_buffer(tmp_path / "replay_buffer.pkl")
    assert model.learn(10).replay_buffer.pos == 30


class Ordered(gym.ObservationWrapper):
    """
    Dict observations whose keys have another order, which the comparison of spaces ignores.

    :param order: the keys
    """

    def __init__(self, order: str) -> None:
        super().__init__(CountingEnv())
        self.order = order
        boxes = {key: spaces.Box(-np.inf, np.inf, (2,), np.float32) for key in order}
        self.observation_space = spaces.Dict(boxes)
        self.observation_space.spaces = boxes

    def observation(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        return {key: observation + 1000 * (key == "b") for key in self.order}


@pytest.mark.parametrize("cls", [TD3X, TD3])
def test_dict_observations_in_another_order(cls: Any) -> None:
    model = cls("MultiInputPolicy", Ordered("ab"), **tiny()).learn(20)
    other = TD3X("MultiInputPolicy", Ordered("ba"), **tiny())
    assert list(other.replay_buffer.observations) == ["b", "a"]
    other.load_replay_buffer(io.BytesIO(saved(model)))
    for name in ("observations", "next_observations"):
        assert_same_state(dict(sorted(getattr(model.replay_buffer, name).items())), getattr(other.replay_buffer, name))


def test_hook_and_a_buffer_that_cannot_store_its_terminations() -> None:
    model = TD3("MlpPolicy", CountingEnv(), **tiny(**OPTIMIZED)).learn(7)
    other = TD3X("MlpPolicy", CountingEnv(), **tiny(reward_shaping={"sb3_td3x.shaping.FallPenalty": {}}))
    other.load_replay_buffer(io.BytesIO(saved(model)))
    with pytest.raises(ValueError, match="changes terminations, which is not allowed"):
        other.learn(10)
