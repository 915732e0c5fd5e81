"""State dictionaries: what tensors they hold is known before memory is taken, and nothing in them is run."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch as th
from torch import nn

from sb3_td3x.files.errors import FileRefused
from sb3_td3x.files.tensors import read_state

DTYPES = (th.float32, th.float64, th.float16, th.bfloat16, th.int64, th.int32, th.int16, th.int8, th.uint8, th.bool)


def loaded(content: bytes) -> Any:
    return read_state(content, "policy.pth")


def assert_same(expected: Any, actual: Any) -> None:
    """Compare nested dictionaries, lists and tuples of tensors and numbers."""
    if isinstance(expected, dict):
        assert list(expected) == list(actual)
        for key in expected:
            assert_same(expected[key], actual[key])
    elif isinstance(expected, list | tuple):
        assert type(expected) is type(actual)
        assert len(expected) == len(actual)
        for pair in zip(expected, actual, strict=True):
            assert_same(*pair)
    elif th.is_tensor(expected):
        assert expected.dtype == actual.dtype
        assert th.equal(expected, actual)
    else:
        assert expected == actual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back(dtype: th.dtype) -> None:
    whole = th.arange(24).reshape(2, 3, 4).to(dtype)
    state = {"whole": whole, "part": whole[1, :, 1:], "transposed": whole.mT, "scalar": whole[0, 0, 1]}
    state["empty"] = whole[:0]
    assert_same(state, loaded(hostile.torch_file(state)))


def test_state_dictionaries_come_back() -> None:
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = th.optim.Adam(network.parameters(), betas=(0.8, 0.9))
    network(th.ones(5, 3)).sum().backward()
    optimizer.step()
    for state in (network.state_dict(), optimizer.state_dict(), {"log_alpha": nn.Parameter(th.ones(1)), "none": None}):
        assert_same(dict(state), loaded(hostile.torch_file(state)))


def test_tensors_that_share_memory_are_independent_of_the_file() -> None:
    content = hostile.torch_file({"a": (memory := th.arange(3.0)), "b": memory[1:]})
    state = loaded(content)
    state["a"][0] = 7
    assert loaded(content)["a"].tolist() == [0, 1, 2]


def test_tensors_take_no_more_memory_than_the_file() -> None:
    memory = th.zeros(1000)
    state = loaded(hostile.torch_file([memory[start:] for start in range(1000)]))
    assert len({tensor.untyped_storage().data_ptr() for tensor in state}) == 1


def attacks(path: str) -> Iterator[tuple[str, bytes]]:
    """State dictionaries that must be refused."""
    content = hostile.torch_file({"weight": th.zeros(3)})
    for name, gadget in hostile.GADGETS.items():
        yield f"{name} in a state", hostile.torch_with_pickle(content, gadget(path))
        yield f"{name} instead of a state", gadget(path)
    yield "nothing", b""
    yield "text", b"nothing"
    yield "nested gadget", hostile.torch_file({"state": {0: {"step": hostile.Call(print, path)}}, "param_groups": []})
    yield "huge tensor", hostile.torch_file({"a": hostile.HugeTensor((2**20, 2**20), (0, 0))})
    yield "tensor outside of its memory", hostile.torch_file({"a": hostile.HugeTensor((2, 4), (2**30, 1))})
    yield "negative shape", hostile.torch_file({"a": hostile.HugeTensor((-1,), (1,))})
    yield "negative stride", hostile.torch_file({"a": hostile.HugeTensor((2,), (-1,))})
    yield "stride for another shape", hostile.torch_file({"a": hostile.HugeTensor((2,), (1, 1))})
    yield "other key", hostile.torch_with_pickle(content, hostile.torch_pickle({"a": th.zeros(4)}, "x"))
    yield "key that is no text", hostile.torch_with_pickle(content, hostile.torch_pickle({"a": th.zeros(4)}, ("0",)))
    yield "truncated", content[: len(content) // 2]
    members = hostile.members_of(content)
    for missing in members:
        if missing.endswith(("data.pkl", "data/0")):
            yield f"without {missing}", hostile.plain_zip({name: it for name, it in members.items() if name != missing})
    (folder, *_) = (name.partition("/")[0] for name in members)
    yield "other byte order", hostile.plain_zip({**members, f"{folder}/byteorder": b"big"})
    yield "two pickles", hostile.plain_zip({**members, "x/data.pkl": members[f"{folder}/data.pkl"]})
    yield from hostile.zip_bombs(content)
    old_format = io.BytesIO()
    th.save({"a": th.zeros(3)}, old_format, _use_new_zipfile_serialization=False)
    yield "format of old versions of PyTorch", old_format.getvalue()


def test_attack_is_refused(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    with hostile.MemoryCheck():
        for name, content in attacks(str(sentinel)):
            print(name)
            assert hostile.refusal(lambda content=content: loaded(content))  # type: ignore[misc]
            assert not sentinel.exists()


def test_what_takes_long_elsewhere_is_refused_or_harmless() -> None:
    huge, ones = int.from_bytes(bytes([7]) * 2_000_000, "big"), (1,) * 100_000
    content = hostile.torch_file({"a": th.zeros(4)})
    with hostile.MemoryCheck():
        for value, key in (
            (hostile.nested([0], 15), "0"),
            (hostile.Items(hostile.nested([0], 15), 1), "0"),
            (hostile.Items("a", hostile.nested([0], 15)), "0"),
            (th.zeros(4), hostile.nested((0,), 15)),
            ({"a": hostile.HugeTensor((huge, huge), (huge, huge))}, "0"),
            ([hostile.HugeTensor(ones, ones) for _ in range(2000)], "0"),
        ):
            changed = hostile.torch_with_pickle(content, hostile.torch_pickle(value, key))
            hostile.refusal(lambda changed=changed: loaded(changed))  # type: ignore[misc]
        for name, trick in hostile.zip_tricks(content):
            print(name)
            hostile.refusal(lambda trick=trick: loaded(trick))  # type: ignore[misc]


def test_state_of_a_tensor_does_not_change_its_shape() -> None:
    pickled = hostile.torch_pickle({"a": hostile.ReshapedTensor((2**10, 2**10), (0, 0))})
    content = hostile.torch_with_pickle(hostile.torch_file({"a": th.zeros(4)}), pickled)
    assert read_state(content, "policy.pth")["a"].shape == (4,)


def test_versions_of_modules_are_not_needed() -> None:
    for metadata in (5, "text", hostile.ReshapedTensor((2**10, 2**10), (0, 0))):
        state = nn.Linear(1, 1).state_dict()
        vars(state)["_metadata"] = metadata
        assert_same(dict(state), loaded(hostile.torch_file(state)))


def test_error_names_the_file() -> None:
    with pytest.raises(FileRefused, match=r"^policy\.pth in agent\.zip is damaged"):
        read_state(hostile.torch_file({"a": hostile.HugeTensor((2**20, 2**20), (0, 0))}), "policy.pth in agent.zip")
