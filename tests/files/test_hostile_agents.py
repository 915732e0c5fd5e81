"""Hostile files of agents: they are refused in one sentence, or are harmless, and nothing in them is run."""

import base64
import io
import json
import math
import pathlib
import pickle
import random
from collections.abc import Iterator
from typing import Any

import hostile
import numpy as np
import pytest
import torch as th
from envs import CountingEnv, tiny, tiny_agent, zip_of
from gymnasium import spaces
from noises import normal_noise
from stable_baselines3 import TD3

from sb3_td3x import TD3X
from sb3_td3x.files.agent import open_agent
from sb3_td3x.files.inspect import describe_agent
from sb3_td3x.files.records import to_record


@pytest.fixture(scope="module")
def good() -> bytes:
    """Return the file of a tiny agent."""
    return zip_of(tiny_agent(action_noise=normal_noise()).learn(20)).getvalue()


@pytest.fixture(scope="module")
def good_sb3() -> bytes:
    """Return the file of the same agent of SB3."""
    return zip_of(TD3("MlpPolicy", CountingEnv(), **tiny(action_noise=normal_noise())).learn(20)).getvalue()


def assert_refused(content: bytes, path: pathlib.Path, *readers: Any) -> None:
    """Check that each reader refuses the file in one sentence that names it."""
    path.write_bytes(content)
    for read in readers or (TD3X.load, tiny_agent().set_parameters):
        message = hostile.refusal(lambda read=read: read(path))  # type: ignore[misc]
        assert message is not None
        assert str(path) in message


@pytest.mark.parametrize("attribute", ["action_noise", "policy_class", "_last_obs", "policy_kwargs", "anything"])
def test_gadget_that_sb3_would_run_is_refused(attribute: str, good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    path, sentinel = tmp_path / "agent.zip", tmp_path / "sentinel"
    for name, gadget in hostile.GADGETS.items():
        content = hostile.with_pickle(good_sb3, attribute, gadget(str(sentinel)))
        assert_refused(content, path, TD3X.load)
        describe_agent(path)
        tiny_agent().set_parameters(path)
        assert not sentinel.exists(), name


def test_gadgets_are_real(good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    """SB3 runs them. Otherwise the test above would prove nothing."""
    ran = 0
    for name, gadget in hostile.GADGETS.items():
        sentinel = tmp_path / "".join(filter(str.isalpha, name))
        content = hostile.with_pickle(good_sb3, "anything", gadget(str(sentinel)))
        try:
            TD3.load(io.BytesIO(content), device="cpu")
        except Exception as error:  # some stop after they have run
            print(name, error)
        ran += sentinel.exists()
    assert ran >= 10


def test_gadget_in_an_attribute_that_is_not_read_does_nothing(good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    sentinel = tmp_path / "sentinel"
    for attribute in ("lr_schedule", "actor_batch_norm_stats"):
        TD3X.load(io.BytesIO(hostile.with_pickle(good_sb3, attribute, hostile.GADGETS["exec"](str(sentinel)))))
    assert not sentinel.exists()


def test_gadget_in_a_member_of_its_own_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    path, sentinel = tmp_path / "agent.zip", tmp_path / "sentinel"
    for gadget in hostile.GADGETS.values():
        content = hostile.with_data(good, action_noise={"__type__": "pickle", "reason": "a noise"})
        content = hostile.with_members(content, pickled__action_noise__pkl=gadget(str(sentinel)))
        assert_refused(content, path, TD3X.load)
        describe_agent(path)
        assert not sentinel.exists()


def hostile_states(content: bytes, path: str) -> Iterator[tuple[str, bytes]]:
    """Yield state dictionaries that no agent has."""
    for name in ("os.mkdir", "eval", "in a list", "old opcodes", "extension code"):
        pickled = hostile.GADGETS[name](path)
        yield f"{name} in a state", hostile.torch_with_pickle(content, pickled)
        yield f"{name} instead of a state", pickled
    yield "nothing", b""
    yield "nested gadget", hostile.torch_file({"state": {0: {"step": hostile.Call(print, path)}}, "param_groups": []})
    yield "huge tensor", hostile.torch_file({"actor.mu.0.weight": hostile.HugeTensor((2**20, 2**20), (0, 0))})
    yield "a list", hostile.torch_file([th.zeros(3)])
    yield "a tensor", hostile.torch_file(th.zeros(3))
    yield "no tensors", hostile.torch_file({"a": 1})
    yield "truncated", content[: len(content) // 2]
    yield "large", hostile.torch_file({"state": {0: {"exp_avg": th.zeros(2000)}}, "param_groups": [{"params": [0]}]})
    yield "many groups", hostile.torch_file({"state": {}, "param_groups": [{"params": []}] * 3})
    yield "many parameters", hostile.torch_file({"state": {}, "param_groups": [{"params": list(range(200_000))}]})
    yield from hostile.zip_bombs(content)


def test_hostile_state_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    sentinel, members = tmp_path / "sentinel", hostile.members_of(good)
    with hostile.MemoryCheck():
        for member in ("policy.pth", "actor.optimizer.pth", "critic.optimizer.pth", "pytorch_variables.pth"):
            for name, content in hostile_states(members[member], str(sentinel)):
                print(member, name)
                assert_refused(hostile.sealed_zip({**members, member: content}), tmp_path / "agent.zip")
                assert not sentinel.exists()


@pytest.mark.parametrize("entry", [{"nothing": th.zeros(3)}, {"step": "many"}, {"step": None}], ids=str)
def test_optimizer_s_state_that_pytorch_does_not_know_is_refused(
    good: bytes, tmp_path: pathlib.Path, entry: Any
) -> None:
    groups = tiny_agent().get_parameters()["actor.optimizer"]["param_groups"]
    state = hostile.torch_file({"state": {0: entry}, "param_groups": groups})
    assert_refused(hostile.with_members(good, actor__optimizer__pth=state), tmp_path / "agent.zip")


def hostile_data(good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield files with attributes that no agent has."""
    array = {"__type__": "array", "dtype": "<f4", "shape": [2], "data": base64.b64encode(bytes(8)).decode()}
    box = json.loads(hostile.members_of(good)["data"])["observation_space"]
    for name, changed in {
        "class that is not registered": {"policy_class": {"__type__": "class", "name": "subprocess.Popen"}},
        "class of another kind": {"policy_class": {"__type__": "class", "name": "torch.optim.adam.Adam"}},
        "object that is not registered": {"action_noise": {"__type__": "object", "name": "os.mkdir", "attributes": {}}},
        "object of another kind": {"observation_space": {"__type__": "array", "dtype": "<f4", "shape": [], "data": ""}},
        "object of nothing": {"action_noise": {**box, "name": "stable_baselines3.common.noise.NormalActionNoise"}},
        "unknown type": {"action_noise": {"__type__": "nonsense", "data": ""}},
        "array larger than its data": {"_last_obs": {**array, "shape": [2**40]}},
        "array of structures": {"_last_obs": {**array, "dtype": "V" + "9" * 12}},
        "wide layers": {"policy_kwargs": {"net_arch": [2**40]}},
        "layers that are too wide for PyTorch": {"policy_kwargs": {"net_arch": [2**70]}},
        "wide layers that could be made": {"policy_kwargs": {"net_arch": [2**20, 2**20]}},
        "many layers": {"policy_kwargs": {"net_arch": [8] * 101}},
        "many layers of the actor": {"policy_kwargs": {"net_arch": {"pi": [1] * 10**6, "qf": [1]}}},
        "negative layer": {"policy_kwargs": {"net_arch": [-8]}},
        "no layers": {"policy_kwargs": {"net_arch": "big"}},
        "many critics": {"policy_kwargs": {"net_arch": [8], "n_critics": 10**9}},
        "many critics without layers": {"policy_kwargs": {"net_arch": [], "n_critics": 10**9}},
        "many layers of many critics": {"policy_kwargs": {"net_arch": [1] * 100, "n_critics": 1000}},
        "other layers": {"policy_kwargs": {"net_arch": [9]}},
        "unknown argument": {"policy_kwargs": {"net_arch": [8], "nonsense": 1}},
        "optimizer as an activation": {
            "policy_kwargs": {"activation_fn": {"__type__": "class", "name": "torch.optim.adam.Adam"}}
        },
        "no policy_kwargs": {"policy_kwargs": None},
        "huge space": {
            "observation_space": {**box, "attributes": {**box["attributes"], "low": {**array, "shape": [2**50]}}}
        },
        "other space": {"action_space": box},
        "negative number of envs": {"n_envs": -1},
        "text as a counter": {"num_timesteps": "many"},
        "unknown argument of the optimizer": {"policy_kwargs": {"net_arch": [8], "optimizer_kwargs": {"nonsense": 1}}},
        "pickle that is not there": {"action_noise": {"__type__": "pickle", "reason": "nothing"}},
        "pickle that is no base64": {"action_noise": {":serialized:": 1}},
    }.items():
        yield name, hostile.with_data(good, **changed)
    yield "deep", hostile.with_members(good, data=b'{"policy_class":' + b"[" * 100_000)
    text = json.dumps({**json.loads(hostile.members_of(good)["data"]), "a": 1})
    for name, value in {"deep lists": "[" * 5000 + "]" * 5000, "huge number": "9" * 10_000}.items():
        yield name, hostile.with_members(good, data=text.replace('"a": 1', f'"a": {value}').encode())


def test_hostile_attribute_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    with hostile.MemoryCheck():
        for name, content in hostile_data(good):
            print(name)
            assert_refused(content, tmp_path / "agent.zip", TD3X.load)


def test_attributes_that_take_long_elsewhere_are_refused_or_harmless(good: bytes, good_sb3: bytes) -> None:
    images = {str(key): spaces.Box(0, 255, (1, 36, 36), np.uint8) for key in range(101)}
    multi_input = {"__type__": "class", "name": "sb3_td3x.MultiInputPolicy"}
    keys = [number * (2**61 - 1) for number in range(8_000)]
    contents = [
        hostile.with_data(good, **{"predict": 1, "action_noise_scale": 1, "__class__": 1, "a b": 1}),
        hostile.with_data(good, observation_space=to_record(spaces.Dict(images)), policy_class=multi_input),
        hostile.with_data(good, ep_info_buffer=[0] * 1_000_000),
        hostile.with_data(good, note=[{}] * 1_000_000),
        hostile.with_members(good, data=b" " * (16 * 2**20 + 1)),
        hostile.with_pickle(good_sb3, "note", pickle.dumps(dict.fromkeys(keys))),
        hostile.with_pickle(good_sb3, "note", pickle.dumps(hostile.nested([0.0], 12, 10))),
        hostile.with_pickle(good_sb3, "policy_kwargs", pickle.dumps({"net_arch": hostile.nested([8], 12, 10)})),
        hostile.with_pickle(good_sb3, "note", pickle.dumps([hostile.Array(bytes(2**20))] * 10_000)),
        hostile.with_pickle(good_sb3, "note", b"\x80\x04" + b"N0" * 300_000 + b"N."),
    ]
    with hostile.MemoryCheck():
        for content in contents:
            for read in (TD3X.load, describe_agent):
                print(hostile.refusal(lambda read=read, content=content: read(io.BytesIO(content))))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("gamma", "high"), ("gamma", 10**400), ("tau", math.inf), ("train_freq", []), ("seed", 0.5)),
        ("learning_rate", "lin_" + "1" * 2**15 + "x"),
    ],
    ids=lambda value: f"{value!s:.10}",
)
def test_hostile_argument_is_refused_by_its_name(good: bytes, name: str, value: Any) -> None:
    content = hostile.with_data(good, **{name: to_record(value)})
    with pytest.raises(ValueError, match=rf"^{name}="):
        TD3X.load(io.BytesIO(content))


def test_zip_bomb_is_refused(good: bytes, tmp_path: pathlib.Path) -> None:
    with hostile.MemoryCheck():
        for name, content in hostile.zip_bombs(good):
            print(name)
            assert_refused(content, tmp_path / "agent.zip")


def test_zip_trick_is_refused_or_harmless(good: bytes) -> None:
    with hostile.MemoryCheck():
        for name, content in hostile.zip_tricks(good):
            print(name)
            hostile.refusal(lambda content=content: TD3X.load(io.BytesIO(content)))  # type: ignore[misc]


def test_flipped_bits_are_found(good: bytes, tmp_path: pathlib.Path) -> None:
    rng, path = random.Random(0), tmp_path / "agent.zip"
    for position in rng.sample(range(len(good)), 500):
        damaged = bytearray(good)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"agent\.zip is .*(damaged|zip file)") as error:
            open_agent(path)
        assert "\n" not in str(error.value)


def test_file_cut_anywhere_is_refused(good: bytes, good_sb3: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "agent.zip"
    for content in (good, good_sb3):
        for length in range(0, len(content), max(1, len(content) // 100)):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=r"agent\.zip is .*(zip file|damaged)"):
                open_agent(path)
