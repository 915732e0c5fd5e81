"""
State dictionaries in PyTorch's files.

The pickle in such a file names the tensors, with their shapes. Here it is read without running it. The tensors are
views of the file's bytes, so that they take no more memory than the file, whatever shapes it claims.
"""

import functools
import io
import math
import sys
from typing import Any

import torch as th

from sb3_td3x.files.errors import FileRefused, refusing
from sb3_td3x.files.pickles import Maker, PersistentId, from_pickle, read_pickle
from sb3_td3x.files.records import check_type
from sb3_td3x.files.sealed_zip import CheckedZip

_DTYPES = {
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
_ALLOWED = frozenset({*_DTYPES, _REBUILD_TENSOR, _REBUILD_PARAMETER, "collections.OrderedDict"})
# PyTorch's own limit
_MAX_DIMENSIONS = 64


def read_state(content: bytes, name: str) -> Any:
    """
    Read what ``torch.save`` wrote.

    :return: dictionaries and lists of tensors and plain data, on the CPU
    :raises FileRefused: it is damaged, or holds anything else
    """
    with refusing(name):
        archive = CheckedZip(io.BytesIO(content), name)
        (folder,) = (member[: -len("/data.pkl")] for member in archive.members if member.endswith("/data.pkl"))
        order = f"{folder}/byteorder"
        if order in archive.members and archive.read(order).decode() != sys.byteorder:
            raise FileRefused(f"{name} was written on a machine with another byte order")

        @functools.cache
        def memory(key: str) -> bytearray:
            return bytearray(archive.read(f"{folder}/data/{key}"))

        def rebuild(storage: Any, offset: Any, shape: tuple[Any, ...], stride: tuple[Any, ...], *_: Any) -> th.Tensor:
            _, storage_type, key, _, n_elements = check_type(storage, PersistentId).args[0]
            dtype = _DTYPES[storage_type.path]
            _check_shape(n_elements, offset, shape, stride)
            content = memory(check_type(key, str))
            if n_elements * dtype.itemsize != len(content):
                raise ValueError(f"it has {len(content)} bytes for {n_elements} elements of {dtype}")
            if math.prod(shape) == 0:
                return th.empty(shape, dtype=dtype)
            return th.frombuffer(content, dtype=dtype).as_strided(shape, stride, offset)

        pickled = archive.read(f"{folder}/data.pkl")
        makers: dict[str, Maker] = {
            _REBUILD_TENSOR: lambda call: rebuild(*call.args),
            _REBUILD_PARAMETER: lambda call: rebuild(*call.args[0].args),
        }
        return from_pickle(read_pickle(io.BytesIO(pickled), name, _ALLOWED), len(pickled), makers)


def _check_shape(n_elements: Any, offset: Any, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> None:
    """Check that a tensor lies within its memory, and is not larger because its elements share memory."""
    sizes = (n_elements, offset, *shape, *stride)
    if len(shape) > _MAX_DIMENSIONS or not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError("it holds a tensor of an impossible shape")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) > 0 and (last >= n_elements or math.prod(shape) > n_elements):
        raise ValueError(f"it holds a tensor of shape {shape}, for which it has too little memory")
