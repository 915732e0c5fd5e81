"""State dictionaries in PyTorch's files: what tensors they hold, known before any memory is taken for them."""

import io
import math
from dataclasses import dataclass
from typing import Any

import torch as th

from sb3_td3x.files import FileRefused, refusing
from sb3_td3x.unpickling import PersistentId, Pickled, read_pickle
from sb3_td3x.zips import CheckedZip

_STORAGES = {
    "torch.FloatStorage": th.float32,
    "torch.DoubleStorage": th.float64,
    "torch.HalfStorage": th.float16,
    "torch.BFloat16Storage": th.bfloat16,
    "torch.LongStorage": th.int64,
    "torch.IntStorage": th.int32,
    "torch.ShortStorage": th.int16,
    "torch.CharStorage": th.int8,
    "torch.ByteStorage": th.uint8,
    "torch.BoolStorage": th.bool,
}
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_ALLOWED = frozenset({*_STORAGES, _REBUILD_TENSOR, _REBUILD_PARAMETER, "collections.OrderedDict"})

# Of what holds no tensors
_MAX_PICKLE_SIZE = 64 * 2**20
_MAX_DEPTH = 20


@dataclass(frozen=True)
class TensorInfo:
    """
    A tensor that has not been read.

    :param shape: its shape
    :param dtype: type of its elements
    """

    shape: tuple[int, ...]
    dtype: th.dtype


def describe_state(content: bytes, name: str) -> Any:
    """
    :param content: what ``torch.save`` wrote
    :param name: how to name it in an error
    :return: the same dictionaries and lists that ``torch.load`` would give, with a ``TensorInfo`` for each tensor
    :raises FileRefused: it is damaged, or holds anything but tensors and plain data
    """
    with refusing(name):
        archive = CheckedZip(io.BytesIO(content), name, folders=True)
        if any(info.file_size != info.compress_size for info in archive.members.values()):
            raise FileRefused(f"{name} has compressed tensors, which PyTorch does not write")
        (pickle_member,) = (member for member in archive.members if member.endswith("/data.pkl"))
        folder = pickle_member.removesuffix("data.pkl")
        state = read_pickle(io.BytesIO(archive.read(pickle_member, _MAX_PICKLE_SIZE)), name, _ALLOWED)
        sizes = {
            member.removeprefix(f"{folder}data/"): info.file_size
            for member, info in archive.members.items()
            if member.startswith(f"{folder}data/")
        }
        return _describe(state, sizes, name, 0)


def load_state(content: bytes, device: th.device | str, name: str) -> Any:
    """
    :param content: what ``torch.save`` wrote and ``describe_state`` found in order
    :param device: Device on which the tensors should be
    :param name: how to name it in an error
    :return: dictionaries and lists of tensors and plain data
    :raises FileRefused: it is damaged
    """
    with refusing(name):
        return th.load(io.BytesIO(content), map_location=device, weights_only=True)


def _describe(value: Any, sizes: dict[str, int], name: str, depth: int) -> Any:
    """
    :param value: part of a pickle
    :param sizes: sizes of the storages in bytes, by their keys
    :param name: how to name the file in an error
    :param depth: in how many dictionaries and lists it lies
    :return: the same with ``TensorInfo``
    """
    if depth > _MAX_DEPTH:
        raise FileRefused(f"{name} is nested too deeply")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_describe(entry, sizes, name, depth + 1) for entry in value)
    if isinstance(value, dict):
        return {key: _describe(entry, sizes, name, depth + 1) for key, entry in value.items()}
    if isinstance(value, Pickled):
        if value.path == "collections.OrderedDict" and not value.args:
            return {str(key): _describe(entry, sizes, name, depth + 1) for key, entry in value.items}
        if value.path == _REBUILD_PARAMETER:
            return _describe(value.args[0], sizes, name, depth + 1)
        if value.path == _REBUILD_TENSOR:
            return _describe_tensor(value, sizes, name)
    raise FileRefused(f"{name} holds {getattr(value, 'path', type(value).__name__)} where a tensor should be")


def _describe_tensor(value: Pickled, sizes: dict[str, int], name: str) -> TensorInfo:
    """
    :param value: the call that makes a tensor
    :param sizes: sizes of the storages in bytes, by their keys
    :param name: how to name the file in an error
    :return: what it would make
    """
    storage, offset, shape, strides, *_ = value.args
    if not isinstance(storage, PersistentId):
        raise FileRefused(f"{name} holds a tensor without memory")
    _, storage_type, key, _, number = storage.args[0]
    dtype = _STORAGES[storage_type.path]
    numbers = (number, offset, *shape, *strides)
    if len(shape) != len(strides) or not all(type(it) is int and it >= 0 for it in numbers):
        raise FileRefused(f"{name} holds a tensor of an impossible shape")
    last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    fits = math.prod(shape) == 0 or last < number
    # Elements that share memory would take more than the file has
    if not fits or math.prod(shape) > number or number * dtype.itemsize != sizes.get(key):
        raise FileRefused(f"{name} holds a tensor of shape {shape}, for which it has not the memory")
    return TensorInfo(tuple(shape), dtype)
