"""
State dictionaries in PyTorch's files.

The pickle in such a file names the tensors, with their shapes. Here it is read without running it, and the tensors take
memory only after the reader has compared the shapes with those that it expects.
"""

import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch as th

from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.pickles import Maker, PersistentId, from_pickle, read_pickle
from sb3_td3x.files.records import check_type
from sb3_td3x.files.sealed_zip import CheckedZip

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
# PyTorch's own limit
_MAX_DIMENSIONS = 64


class _Storages(dict[str, bytearray]):
    """The memory of tensors by its key, read at the first use."""

    def __init__(self, archive: CheckedZip, folder: str) -> None:
        super().__init__()
        self._archive = archive
        self._folder = folder

    def size(self, key: str) -> int:
        """Return the number of bytes."""
        return self._archive.members[f"{self._folder}/data/{key}"].file_size

    def __missing__(self, key: str) -> bytearray:
        self[key] = bytearray(self._archive.read(f"{self._folder}/data/{key}"))
        return self[key]


@dataclass(frozen=True)
class StoredTensor:
    """
    A tensor in a file.

    :param shape: its shape
    :param stride: distance between neighbours in each dimension, in elements
    :param offset: position of the first element in the memory
    """

    shape: tuple[int, ...]
    dtype: th.dtype
    stride: tuple[int, ...]
    offset: int
    key: str
    storages: Mapping[str, bytearray]

    def load(self, device: th.device) -> th.Tensor:
        """Return the tensor."""
        if math.prod(self.shape) == 0:
            return th.empty(self.shape, dtype=self.dtype, device=device)
        memory = th.frombuffer(self.storages[self.key], dtype=self.dtype)
        return memory.as_strided(self.shape, self.stride, self.offset).to(device)


def read_state(content: bytes, name: str) -> Any:
    """
    Read what ``torch.save`` wrote, without the tensors' numbers.

    :param content: PyTorch's file
    :return: dictionaries and lists of ``StoredTensor`` and plain data
    :raises FileRefused: it is damaged, or holds anything else
    """
    with refusing(name):
        archive = CheckedZip(io.BytesIO(content), name)
        (folder,) = (member[: -len("/data.pkl")] for member in archive.members if member.endswith("/data.pkl"))
        order = f"{folder}/byteorder"
        if order in archive.members and archive.read(order).decode() != sys.byteorder:
            raise FileRefused(f"{name} was written on a machine with another byte order")
        pickled = archive.read(f"{folder}/data.pkl")
        storages = _Storages(archive, folder)
        makers: dict[str, Maker] = {
            _REBUILD_TENSOR: lambda call: _tensor(storages, *call.args),
            _REBUILD_PARAMETER: lambda call: _tensor(storages, *call.args[0].args),
        }
        return from_pickle(read_pickle(io.BytesIO(pickled), name, _ALLOWED), len(pickled), makers)


def load_tensors(value: Any, device: th.device) -> Any:
    """
    Return a state dictionary with its tensors in memory.

    :param value: the result of ``read_state``
    """
    if isinstance(value, StoredTensor):
        return value.load(device)
    if isinstance(value, dict):
        return {key: load_tensors(entry, device) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(load_tensors(entry, device) for entry in value)
    return value


def _tensor(
    storages: _Storages, storage: Any, offset: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], *_: Any
) -> StoredTensor:
    """Return the tensor that a call of PyTorch's ``_rebuild_tensor_v2`` would make."""
    if not isinstance(storage, PersistentId):
        raise TypeError("it holds a tensor without memory")
    _, storage_type, key, _, n_elements = storage.args[0]
    dtype = _STORAGES[storage_type.path]
    sizes = (n_elements, offset, *shape, *stride)
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError("it holds a tensor of an impossible shape")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # Elements that share memory would take more than the file has
    fits = last < n_elements and math.prod(shape) <= n_elements
    if n_elements * dtype.itemsize != storages.size(check_type(key, str)) or not (fits or math.prod(shape) == 0):
        raise ValueError(f"it holds a tensor of shape {shape}, for which it has too little memory")
    return StoredTensor(shape, dtype, stride, offset, key, storages)
