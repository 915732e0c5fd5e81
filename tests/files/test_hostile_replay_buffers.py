"""Hostile files of replay buffers: they are refused in one sentence, and nothing in them is run."""

import io
import json
import pathlib
import pickle
import random
import tracemalloc
import zipfile
from collections.abc import Iterator
from typing import Any

import hostile
import numpy as np
import pytest
from replay_buffers import agent_with, saved
from stable_baselines3.common.buffers import ReplayBuffer


def _with_priorities(good: bytes, number: float) -> bytes:
    """Return a replay buffer of 20 rows with another priority in all of them."""
    file = io.BytesIO()
    np.save(file, np.full((10, 2), number, np.float32))
    return hostile.sealed_zip({**hostile.members_of(good), "priorities.npy": file.getvalue()})


def hostile_files(path: str) -> Iterator[tuple[str, bytes]]:
    good = saved(agent_with("packed"))
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
    prioritized = saved(agent_with("packed, prioritized"))
    for name, number in {"NaN": np.nan, "negative": -1.0, "infinite": np.inf, "higher than the highest": 1e30}.items():
        yield f"{name} priority", _with_priorities(prioritized, number)
    yield "missing array", hostile.sealed_zip({name: it for name, it in members.items() if name != "dones.npy"})
    for name, changed in {
        "huge and full": {"buffer_size": 2**50, "full": True},
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
    whole = pickle.dumps(agent_with("packed, full").replay_buffer)
    for part in (0.1, 0.5, 0.99):
        yield f"{part} of a pickle", whole[: int(part * len(whole))]


def test_hostile_file_is_refused(tmp_path: pathlib.Path) -> None:
    sentinel, path, number = tmp_path / "sentinel", tmp_path / "buffer.pkl", 0
    model = agent_with("packed")
    own = model.replay_buffer
    for name, content in hostile_files(str(sentinel)):
        print(name)
        path.write_bytes(content)
        tracemalloc.start()
        message = hostile.refusal(lambda: model.load_replay_buffer(path))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert message is not None
        assert "buffer.pkl" in message
        assert peak < 10e6 + 3 * len(content)
        assert model.replay_buffer is own
        assert not sentinel.exists()
        number += 1
    assert number >= 90


def test_zip_trick_is_refused_or_harmless() -> None:
    model = agent_with("packed")
    good = saved(model)
    with hostile.MemoryCheck():
        for name, content in [*hostile.zip_bombs(good), *hostile.zip_tricks(good)]:
            print(name)
            hostile.refusal(lambda content=content: model.load_replay_buffer(io.BytesIO(content)))  # type: ignore[misc]


@pytest.mark.parametrize("parts", [[hostile.Array(bytes(2**20))] * 700, {"x": hostile.Array(bytes(2**20))}])
def test_arrays_of_a_pickle_that_share_memory_are_refused(parts: Any) -> None:
    """Many columns of the same bytes are small as a pickle, and large as arrays."""
    model = agent_with("SB3's, dict") if isinstance(parts, dict) else agent_with("SB3's")
    if isinstance(parts, dict):
        parts = parts | {str(number): parts["x"] for number in range(700)}
    vars(model.replay_buffer).update(observations=parts, next_observations=parts)
    content = pickle.dumps(model.replay_buffer)
    tracemalloc.start()
    with pytest.raises(ValueError, match="too large: its objects take many times the memory"):
        model.load_replay_buffer(io.BytesIO(content))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 70 * len(content)


def test_infos_of_a_pickle_that_grow_are_refused() -> None:
    model = agent_with("her, 2 envs, infos")
    replay_buffer: Any = model.replay_buffer
    info = dict.fromkeys(map(str, range(10_000)), 1)
    replay_buffer.infos[...] = info
    content = pickle.dumps(replay_buffer)
    with pytest.raises(ValueError, match="too large: its objects take many times the memory"):
        model.load_replay_buffer(io.BytesIO(content))
    # The same small info may be in all rows
    replay_buffer.infos[...] = {"x": 1}
    model.load_replay_buffer(io.BytesIO(pickle.dumps(replay_buffer)))


def test_large_numbers_of_infos_end_soon() -> None:
    model = agent_with("her, 2 envs, infos")
    members = hostile.members_of(saved(model))
    infos = json.dumps([{"x": [{}] * 100_000}, {}]).encode() + b"\n"
    members["infos.jsonl"] = infos * members["infos.jsonl"].count(b"\n")
    members.pop("_sb3_td3x_version")
    content = hostile.plain_zip(members, zipfile.ZIP_DEFLATED)
    assert len(content) < 10**5
    with hostile.MemoryCheck():
        print(hostile.refusal(lambda: model.load_replay_buffer(io.BytesIO(content))))


def test_every_flipped_byte_is_found(tmp_path: pathlib.Path) -> None:
    rng, path = random.Random(0), tmp_path / "buffer.pkl"
    model = agent_with("packed")
    good = saved(model)
    for position in [*range(4), *rng.sample(range(len(good)), 1000)]:
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"buffer\.pkl"):
            model.load_replay_buffer(path)
