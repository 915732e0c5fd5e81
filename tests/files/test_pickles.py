"""Pickles are read as data: what they describe comes back, and nothing that they name is called or imported."""

import io
import pickle
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import cloudpickle
import hostile
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise, VectorizedActionNoise
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import FloatSchedule, LinearSchedule
from torch import nn

from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.pickles import allowed_in_pickles, from_pickle, names_in_pickle, read_pickle


def read(content: bytes) -> Any:
    """Read a pickle as the readers of agents do."""
    with refusing("agent.zip"):
        return from_pickle(read_pickle(io.BytesIO(content), "agent.zip", allowed_in_pickles()), len(content))


VALUES: list[Any] = [
    *(None, True, 1, -(2**70), 0.5, "text", b"bytes", [1, (2, 3)], {"a": {1: None}}),
    *(deque([1, 2], maxlen=3), OrderedDict(b=1, a=2), th.device("cuda", 1)),
    *(np.arange(6).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), np.zeros((0, 2)), np.arange(3, dtype=">i4")),
    *(np.float32(0.5), np.dtype(np.float32), nn.Tanh, np.float32, spaces.Box(-2, 1, (3,))),
    *(spaces.Dict({"a": spaces.Box(0, 1)}), FloatSchedule(LinearSchedule(1.0, 0.0, 1.0))),
    VectorizedActionNoise(OrnsteinUhlenbeckActionNoise(np.zeros(1), np.ones(1)), 2),
    *(TrainFreq(2, TrainFrequencyUnit.EPISODE),),
]


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {value!r:.40}")
def test_value_comes_back_the_same(value: Any, protocol: int) -> None:
    loaded = read(cloudpickle.dumps(value, protocol))
    assert type(loaded) is type(value)
    assert repr(loaded) == repr(value)
    if isinstance(value, np.ndarray):
        assert loaded.dtype == value.dtype
        assert loaded.flags.writeable
        assert loaded.flags.f_contiguous == value.flags.f_contiguous


def test_generator_comes_back() -> None:
    generator = np.random.default_rng(3)
    assert read(pickle.dumps(generator)).random() == generator.random()


def test_gadgets_do_nothing(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    before = {*sys.modules}
    for name, gadget in hostile.GADGETS.items():
        content = gadget(str(sentinel))
        with pytest.raises(ValueError, match=r"agent\.zip"):
            read(content)
        names_in_pickle(io.BytesIO(content))
        assert not sentinel.exists(), name
    assert {*sys.modules} == before


def test_gadgets_are_real(tmp_path: Path) -> None:
    """Python runs them. Otherwise the test above would prove nothing."""
    ran = 0
    for number, gadget in enumerate(hostile.GADGETS.values()):
        sentinel = tmp_path / str(number)
        try:
            pickle.loads(gadget(str(sentinel)))
        except Exception as error:  # some stop after they have run
            print(error)
        ran += sentinel.exists()
    assert ran >= 10


def test_names_that_are_not_allowed_are_in_the_error() -> None:
    with pytest.raises(FileRefused, match=r"agent\.zip holds a pickle that names 'posix\.mkdir', which may run code"):
        read(hostile.GADGETS["os.mkdir"]("x"))


def test_names_in_a_pickle() -> None:
    gadget = hostile.GADGETS["in a noise"]("x")
    names = names_in_pickle(io.BytesIO(gadget))
    assert {"posix.mkdir", "stable_baselines3.common.noise.NormalActionNoise"} <= {*names}
    assert any("unreadable" in name for name in names_in_pickle(io.BytesIO(gadget[:-5])))


MEMORY_EATERS = {
    "memo of two billion entries": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "bytearray that is not there": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "large bytearray that is not there": b"\x80\x05\x96\x00\x00\x00\x00\x10\x00\x00\x00.",
    "bytes that are not there": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "number that is not there": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "frame that is not there": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    "number of a million digits": b"L" + b"9" * 10**6 + b"L\n.",
    "same part in many places": pickle.dumps(hostile.nested([0], 12, 10)),
    "same array in many places": pickle.dumps([hostile.Array(bytes(2**20))] * 10_000),
    "many operations": b"\x80\x04" + b"N0" * 500_000 + b"N.",
    "many lists": b"\x80\x04(" + b"]" * 200_000 + b"t.",
    "keys of one hash": pickle.dumps([dict.fromkeys([number * (2**61 - 1)]) for number in range(20_000)]),
}


@pytest.mark.parametrize("name", MEMORY_EATERS)
def test_little_time_and_memory_is_taken(name: str) -> None:
    with hostile.MemoryCheck():
        hostile.refusal(lambda: read(MEMORY_EATERS[name]))


def test_tuples_within_tuples_as_a_key() -> None:
    """Hashing them would take forever."""
    content = b"\x80\x04}K\x00" + b"".join(b"\x94h" + bytes([depth]) + b"\x86" for depth in range(60)) + b"Ns."
    with pytest.raises(FileRefused, match="tuple is not allowed"):
        read(content)


def test_damaged_pickle_is_refused_in_one_sentence() -> None:
    content = pickle.dumps([np.arange(10), {"a": FloatSchedule(1.0)}])
    for length in range(len(content)):
        with pytest.raises(FileRefused, match=r"^agent\.zip"):
            read(content[:length])


@pytest.mark.parametrize("value", [b"]", b"}", b"N", b"K\x01", b")"])
@pytest.mark.parametrize("operation", [b"b", b"e", b"s", b"R"])
def test_operations_on_wrong_values(value: bytes, operation: bytes) -> None:
    with pytest.raises(FileRefused, match=r"agent\.zip is damaged"):
        read(b"\x80\x04" + value + b"K\x02" + operation + b".")
