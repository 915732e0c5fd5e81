"""Replay buffers' files: what comes back from them, and that nothing in them is run."""

import io
import json
import pathlib
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import gymnasium as gym
import hostile
import numpy as np
import pytest
from envs import CountingEnv, DictObs, counting_vec_env, tiny
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_td3x import TD3X
from sb3_td3x.buffers import REBUILT, PackedReplayBuffer


def goal_env() -> BitFlippingEnv:
    return BitFlippingEnv(n_bits=2, continuous=True)


def goal_envs() -> DummyVecEnv:
    return DummyVecEnv([goal_env, goal_env])


def image_env() -> FakeImageEnv:
    return FakeImageEnv(screen_height=36, screen_width=36, n_channels=1, discrete=False)


HER: dict[str, Any] = {"replay_buffer_class": HerReplayBuffer, "buffer_size": 50}
NO_TIMEOUTS = {"handle_timeout_termination": False}
OPTIMIZED: dict[str, Any] = {"optimize_memory_usage": True, "replay_buffer_kwargs": NO_TIMEOUTS}
SMALL_CNN = {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}}
# Class, policy, env, arguments
BUFFERS: dict[str, tuple[type[ReplayBuffer], str, Callable[[], Any], dict[str, Any]]] = {
    "packed": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {}),
    "packed, 3 envs": (PackedReplayBuffer, "MlpPolicy", lambda: counting_vec_env(3), {}),
    "packed, full": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {"buffer_size": 20}),
    "packed, last row": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {"buffer_size": 31}),
    "SB3's": (ReplayBuffer, "MlpPolicy", CountingEnv, {"replay_buffer_class": ReplayBuffer}),
    "without time-outs": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {"replay_buffer_kwargs": NO_TIMEOUTS}),
    "images": (ReplayBuffer, "CnnPolicy", image_env, {"policy_kwargs": SMALL_CNN, "buffer_size": 60}),
    "optimized": (PackedReplayBuffer, "MlpPolicy", CountingEnv, OPTIMIZED),
    "optimized, full": (PackedReplayBuffer, "MlpPolicy", CountingEnv, {**OPTIMIZED, "buffer_size": 20}),
    "optimized, SB3's": (
        ReplayBuffer,
        "MlpPolicy",
        CountingEnv,
        {**OPTIMIZED, "replay_buffer_class": ReplayBuffer, "buffer_size": 20},
    ),
    "n-step": (NStepReplayBuffer, "MlpPolicy", lambda: counting_vec_env(2), {"n_steps": 3}),
    "dict": (DictReplayBuffer, "MultiInputPolicy", lambda: DictObs(CountingEnv()), {}),
    "her": (HerReplayBuffer, "MultiInputPolicy", goal_env, HER),
    "her, 2 envs, infos": (
        HerReplayBuffer,
        "MultiInputPolicy",
        goal_envs,
        {**HER, "replay_buffer_kwargs": {"copy_info_dict": True, "goal_selection_strategy": "episode"}},
    ),
    "her, full": (HerReplayBuffer, "MultiInputPolicy", goal_env, {**HER, "buffer_size": 11}),
}


def agent(case: str, steps: int = 30) -> TD3X:
    """An agent that has taken some steps."""
    cls, policy, env, kwargs = BUFFERS[case]
    model = TD3X(policy, env(), **tiny(**deepcopy(kwargs)))
    assert type(model.replay_buffer) is cls
    return model.learn(steps) if steps else model


def contents(replay_buffer: Any) -> dict[str, Any]:
    """All that a replay buffer holds, but its env."""
    state = pickle.loads(pickle.dumps(replay_buffer)).__dict__
    return {name: value for name, value in state.items() if name not in ("env", "device", *REBUILT)}


def assert_same(expected: Any, actual: Any, where: str = "") -> None:
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), where
        for key in expected:
            assert_same(expected[key], actual[key], f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(actual), where
        for number, pair in enumerate(zip(expected, actual, strict=True)):
            assert_same(*pair, f"{where}/{number}")
    elif isinstance(expected, np.ndarray) and expected.dtype == object:
        assert expected.shape == actual.shape
        assert_same(expected.tolist(), actual.tolist(), where)
    elif isinstance(expected, np.ndarray):
        assert expected.dtype == actual.dtype, where
        np.testing.assert_array_equal(actual, expected, where)
    else:
        assert expected == actual, where
        assert type(expected) is type(actual), where


def saved(model: Any) -> bytes:
    """What ``save_replay_buffer`` writes."""
    file = io.BytesIO()
    model.save_replay_buffer(file)
    return file.getvalue()


def samples(replay_buffer: Any) -> Any:
    np.random.seed(0)  # noqa: NPY002 - what SB3's buffers draw from
    return [np.asarray(it) for it in replay_buffer.sample(20) if it is not None and not isinstance(it, dict)]


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", BUFFERS)
def test_buffer_comes_back_the_same(case: str, tmp_path: pathlib.Path) -> None:
    model = agent(case)
    model.save_replay_buffer(tmp_path / "buffer")
    assert not any(name.endswith(".pkl") for name in hostile.members_of((tmp_path / "buffer.pkl").read_bytes()))
    other = agent(case, 0)
    for path in (tmp_path / "buffer", str(tmp_path / "buffer.pkl"), io.BytesIO(saved(model))):
        other.load_replay_buffer(path, truncate_last_traj=False)
        assert type(other.replay_buffer) is type(model.replay_buffer)
        assert_same(contents(model.replay_buffer), contents(other.replay_buffer))
        assert_same(dict(enumerate(samples(model.replay_buffer))), dict(enumerate(samples(other.replay_buffer))))
    if isinstance(other.replay_buffer, HerReplayBuffer):
        assert other.replay_buffer.env is other.env
    other.learn(10)


@pytest.mark.parametrize("case", BUFFERS)
def test_empty_buffer_comes_back(case: str) -> None:
    other = agent(case)
    other.load_replay_buffer(io.BytesIO(saved(agent(case, 0))))
    assert other.replay_buffer.size() == 0
    other.learn(10)


@pytest.mark.lowest_sb3
@pytest.mark.parametrize("case", BUFFERS)
def test_pickle_is_read_without_running_it(case: str) -> None:
    """Of SB3, and of earlier versions of this package."""
    model = agent(case)
    file = io.BytesIO()
    pickle.dump(model.replay_buffer, file, protocol=pickle.HIGHEST_PROTOCOL)
    for trusted in (False, True):
        other = agent(case, 0)
        file.seek(0)
        other.load_replay_buffer(file, truncate_last_traj=False, trusted=trusted)
        assert_same(contents(model.replay_buffer), contents(other.replay_buffer))
        other.learn(10)


def test_last_trajectory_is_truncated_as_in_sb3() -> None:
    for case in ("her", "her, 2 envs, infos", "her, full"):
        model, expected = agent(case), agent(case)
        # In the middle of an episode
        assert isinstance(expected.replay_buffer, HerReplayBuffer)
        content = saved(model)
        assert_same(contents(model.replay_buffer), contents(expected.replay_buffer))
        model.load_replay_buffer(io.BytesIO(content), truncate_last_traj=True)
        expected.replay_buffer.truncate_last_trajectory()
        assert_same(contents(expected.replay_buffer), contents(model.replay_buffer))


def test_arrays_are_numpy_s() -> None:
    model = agent("packed")
    arrays = np.load(io.BytesIO(saved(model)))
    np.testing.assert_array_equal(arrays["observations"], model.replay_buffer.observations[:30])
    assert arrays["rewards"].shape == (30, 1)


def test_large_buffer_passes_through_in_small_parts(tmp_path: pathlib.Path) -> None:
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(buffer_size=1_000_000))
    model.replay_buffer.full = True
    size = model.replay_buffer._rows.nbytes  # type: ignore[attr-defined]
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
    model = agent("packed")
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
    """What an info of an env may hold."""


class ThingEnv(BitFlippingEnv):
    """Its infos hold things."""

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
    file = io.BytesIO(saved(agent("her")))
    model = agent("her")
    model.env = None
    with pytest.raises(ValueError, match=r"HerReplayBuffer.*env"):
        model.load_replay_buffer(file)


def test_smaller_agent_takes_a_full_buffer_but_no_empty_one() -> None:
    full, empty = agent("packed, full"), agent("packed")
    model = TD3X("MlpPolicy", CountingEnv(), **tiny(buffer_size=5))
    model.load_replay_buffer(io.BytesIO(saved(full)))
    assert model.replay_buffer.buffer_size == 20
    with pytest.raises(ValueError, match=r"buffer_size=1000, more than the agent's buffer_size=5"):
        model.load_replay_buffer(io.BytesIO(saved(empty)))
    assert model.replay_buffer.buffer_size == 20


# Hostile files


def hostile_files(path: str) -> Iterator[tuple[str, bytes]]:
    good = saved(agent("packed"))
    members = hostile.members_of(good)
    attributes = json.loads(members["replay_buffer"])
    for name, gadget in hostile.GADGETS.items():
        yield f"gadget {name}", gadget(path)
        yield f"attributes {name}", hostile.sealed_zip({**members, "replay_buffer": gadget(path)})
        yield f"array {name}", hostile.sealed_zip({**members, "rewards.npy": gadget(path)})
    pickled = io.BytesIO()
    np.save(pickled, np.array([[hostile.Call(print, path)]], dtype=object), allow_pickle=True)
    yield "array of objects", hostile.sealed_zip({**members, "rewards.npy": pickled.getvalue()})
    for name, array in {
        "other type": np.zeros((30, 1), np.float64),
        "other shape": np.zeros((30, 1, 1), np.float32),
        "fewer rows": np.zeros((29, 1), np.float32),
        "more rows": np.zeros((10_000, 1), np.float32),
        "Fortran": np.asfortranarray(np.zeros((30, 1, 2), np.float32))[..., 0],
    }.items():
        file = io.BytesIO()
        np.save(file, array)
        key = "observations.npy" if name == "Fortran" else "rewards.npy"
        yield name, hostile.sealed_zip({**members, key: file.getvalue()})
    for name, content in {
        "no array": b"",
        "other header": b"\x93NUMPY\x03\x00" + bytes(300),
        "header that calls": members["rewards.npy"].replace(b"'descr': '<f4'", b"'descr': exit()"),
    }.items():
        yield name, hostile.sealed_zip({**members, "rewards.npy": content})
    yield "missing array", hostile.sealed_zip({name: it for name, it in members.items() if name != "dones.npy"})
    for name, changed in {
        "huge": {"buffer_size": 2**50},
        "negative size": {"buffer_size": -1},
        "zero size": {"buffer_size": 0},
        "size of text": {"buffer_size": "1"},
        "position outside": {"pos": 10**6},
        "negative position": {"pos": -1},
        "position of truth": {"pos": True},
        "full of text": {"full": "no"},
        "full but is not": {"full": True},
        "other class": {"class": "os.system"},
        "class of nothing": {"class": None},
        "class of a list": {"class": []},
        "other number of envs": {"n_envs": 2},
        "other space": {"action_space": attributes["observation_space"]},
        "no space": {"observation_space": 1},
        "n-step": {"class": "stable_baselines3.common.buffers.NStepReplayBuffer", "n_steps": 1, "gamma": "x"},
        "her": {"class": "stable_baselines3.her.her_replay_buffer.HerReplayBuffer"},
        "dict": {"class": "stable_baselines3.common.buffers.DictReplayBuffer"},
        "optimized": {
            "class": "stable_baselines3.common.buffers.ReplayBuffer",
            "optimize_memory_usage": True,
        },
        "unknown kind": {"pos": {":plain:": "pickle"}},
    }.items():
        changed_attributes = json.dumps({**attributes, **changed}).encode()
        yield name, hostile.sealed_zip({**members, "replay_buffer": changed_attributes})
    for missing in ("class", "pos", "n_envs", "observation_space", "buffer_size"):
        left = json.dumps({name: it for name, it in attributes.items() if name != missing}).encode()
        yield f"without {missing}", hostile.sealed_zip({**members, "replay_buffer": left})
    yield "a list", hostile.sealed_zip({**members, "replay_buffer": b"[]"})
    yield "nothing", b""
    yield "text", b"nothing"
    yield "a number", pickle.dumps(1)
    yield "a class", pickle.dumps(ReplayBuffer)
    yield "another object", pickle.dumps(np.zeros(3))
    whole = pickle.dumps(agent("packed, full").replay_buffer)
    for part in (0.1, 0.5, 0.99):
        yield f"{part} of a pickle", whole[: int(part * len(whole))]
    yield from hostile.zip_tricks(good)


def test_hostile_file_is_refused(tmp_path: pathlib.Path) -> None:
    sentinel, path, number = tmp_path / "sentinel", tmp_path / "buffer.pkl", 0
    model = agent("packed")
    own = model.replay_buffer
    for name, content in hostile_files(str(sentinel)):
        print(name)
        path.write_bytes(content)
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"buffer\.pkl") as error:
            model.load_replay_buffer(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10e6 + 3 * len(content)
        assert "\n" not in str(error.value)
        assert error.value.__cause__ is None
        assert model.replay_buffer is own
        assert not sentinel.exists()
        number += 1
    assert number >= 100


@pytest.mark.parametrize("parts", [[hostile.Array(bytes(2**20))] * 700, {"x": hostile.Array(bytes(2**20))}])
def test_arrays_of_a_pickle_that_share_memory_are_refused(parts: Any) -> None:
    """Many columns would be of the same bytes: small as a pickle, large as arrays."""
    model = agent("dict") if isinstance(parts, dict) else agent("SB3's")
    if isinstance(parts, dict):
        parts = parts | {str(number): parts["x"] for number in range(700)}
    vars(model.replay_buffer).update(observations=parts, next_observations=parts)
    content = pickle.dumps(model.replay_buffer)
    tracemalloc.start()
    with pytest.raises(ValueError, match="arrays take more than"):
        model.load_replay_buffer(io.BytesIO(content))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * len(content)


def test_infos_of_a_pickle_that_grow_are_refused() -> None:
    model = agent("her, 2 envs, infos")
    replay_buffer: Any = model.replay_buffer
    info = dict.fromkeys(map(str, range(10_000)), 1)
    replay_buffer.infos[...] = info
    content = pickle.dumps(replay_buffer)
    with pytest.raises(ValueError, match="too large: more than 300000 parts"):
        model.load_replay_buffer(io.BytesIO(content))
    # One info in all of them is none that grows
    replay_buffer.infos[...] = {"x": 1}
    model.load_replay_buffer(io.BytesIO(pickle.dumps(replay_buffer)))


def test_values_of_a_zip_file_are_counted() -> None:
    model = agent("packed")
    members = hostile.members_of(saved(model))
    for number, is_read in ((290_000, True), (300_001, False)):
        attributes = json.dumps({**json.loads(members["replay_buffer"]), "x": [0] * number}).encode()
        content = io.BytesIO(hostile.sealed_zip({**members, "replay_buffer": attributes}))
        if is_read:
            model.load_replay_buffer(content)
            continue
        with pytest.raises(ValueError, match="too large: more than 300000 values"):
            model.load_replay_buffer(content)


def test_values_of_infos_are_counted_together() -> None:
    model = agent("her, 2 envs, infos")
    members = hostile.members_of(saved(model))
    number_of_rows = members["infos.jsonl"].count(b"\n")
    infos = json.dumps([{"x": [0] * 20_000}, {}]).encode() + b"\n"
    members["infos.jsonl"] = infos * number_of_rows
    members.pop("_sb3_td3x_version")
    # As large as the file is
    model.load_replay_buffer(io.BytesIO(hostile.plain_zip(members)))
    assert model.replay_buffer.infos[0, 0] == {"x": [0] * 20_000}
    with pytest.raises(ValueError, match="too large: more than 300000 values"):
        model.load_replay_buffer(io.BytesIO(hostile.plain_zip(members, zipfile.ZIP_DEFLATED)))


def test_every_flipped_byte_is_found(tmp_path: pathlib.Path) -> None:
    rng, path = random.Random(0), tmp_path / "buffer.pkl"
    model = agent("packed")
    good = saved(model)
    for position in [*range(4), *rng.sample(range(len(good)), 1000)]:
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"buffer\.pkl"):
            model.load_replay_buffer(path)


def test_sb3_s_agent_and_buffer_go_on_together(tmp_path: pathlib.Path) -> None:
    sb3 = TD3("MlpPolicy", CountingEnv(), **tiny()).learn(20)
    sb3.save(tmp_path / "agent")
    sb3.save_replay_buffer(tmp_path / "replay_buffer")
    model = TD3X.load(tmp_path / "agent", env=CountingEnv())
    model.load_replay_buffer(tmp_path / "replay_buffer.pkl")
    assert model.learn(10).replay_buffer.pos == 30


class Ordered(gym.ObservationWrapper):
    """
    Dict observations whose keys are in an order of their own, which spaces do not look at.

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
        assert_same(dict(sorted(getattr(model.replay_buffer, name).items())), getattr(other.replay_buffer, name))


def test_hook_and_a_buffer_that_cannot_store_its_terminations() -> None:
    model = TD3("MlpPolicy", CountingEnv(), **tiny(**OPTIMIZED)).learn(7)
    other = TD3X("MlpPolicy", CountingEnv(), **tiny(reward_shaping={"sb3_td3x.shaping.FallPenalty": {}}))
    other.load_replay_buffer(io.BytesIO(saved(model)))
    with pytest.raises(ValueError, match="changes terminations, which is not allowed"):
        other.learn(10)
