"""State dictionaries in PyTorch's files: what tensors they hold, known before any memory is taken for them."""

import io
import math
from dataclasses import dataclass
from typing import Any

import torch as th

from sb3_td3x.files.atomic import FileRefused, refusing
from sb3_td3x.files.pickles import PersistentId, Pickled, read_pickle
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

# Of what holds no tensors
_MAX_PICKLE_SIZE = 64 * 2**20
_MAX_DEPTH = 20
# A list may stand in many places
_MAX_PARTS = 300_000
_MAX_DIMENSIONS = 64


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
        (pickle_member,) = (member for member in archive.members if member.lower().endswith("/data.pkl"))
        folder = pickle_member[: -len("data.pkl")]
        _check_is_pytorch_s(content, archive, folder)
        state = read_pickle(io.BytesIO(archive.read(pickle_member, _MAX_PICKLE_SIZE)), name, _ALLOWED)
        sizes = {
            member.removeprefix(f"{folder}data/"): info.file_size
            for member, info in archive.members.items()
            if member.startswith(f"{folder}data/")
        }
        return _StateReader(sizes, name).describe(state, 0)


def _check_is_pytorch_s(content: bytes, archive: CheckedZip, folder: str) -> None:
    """
    PyTorch reads zip files in its own way: from the start, without regard to the case of names, and by offsets that
    Python does not look at.

    :param content: a zip file
    :param archive: the same
    :param folder: where its members should lie
    :raises FileRefused: it is none that PyTorch writes, and PyTorch may read something else than Python
    """
    locator = content[-42:-22]
    is_one_file = (
        content.startswith(b"PK\3\4")
        and content[-22:-18] == b"PK\5\6"
        and min(member.header_offset for member in archive.members.values()) == 0
        # Of the zip64 format, whose end stands right before it
        and (locator[:4] != b"PK\6\7" or int.from_bytes(locator[8:16], "little") == len(content) - 98)
    )
    is_one_folder = folder.count("/") == 1 and all(member.startswith(folder) for member in archive.members)
    if not (is_one_file and is_one_folder and len({it.lower() for it in archive.members}) == len(archive.members)):
        raise FileRefused(f"{archive.name} is no zip file that PyTorch writes")


def load_state(content: bytes, device: th.device | str, name: str, description: Any) -> Any:
    """
    :param content: what ``torch.save`` wrote
    :param device: Device on which the tensors should be
    :param name: how to name it in an error
    :param description: what ``describe_state`` returned
    :return: dictionaries and lists of tensors and plain data
    :raises FileRefused: it is damaged, or is not what was described
    """
    with refusing(name):
        state = th.load(io.BytesIO(content), map_location=device, weights_only=True)
        if not _is_described(state, description):
            raise FileRefused(f"{name} holds other tensors than it says")
    return state


def _is_described(value: Any, description: Any) -> bool:
    """
    :param value: a state dictionary, or a part of it
    :param description: what ``describe_state`` returned of it
    :return: whether it is that
    """
    if isinstance(description, TensorInfo):
        return th.is_tensor(value) and (tuple(value.shape), value.dtype) == (description.shape, description.dtype)
    if isinstance(description, dict):
        # Names may have been numbers
        entries = {key if key in description else str(key): entry for key, entry in value.items()}
        return entries.keys() == description.keys() and all(
            _is_described(entry, description[key]) for key, entry in entries.items()
        )
    if isinstance(description, list | tuple):
        return len(value) == len(description) and all(map(_is_described, value, description))
    return type(value) is type(description)


class _StateReader:
    """
    Tells what tensors a state dictionary holds.

    :param sizes: sizes of the storages in bytes, by their keys
    :param name: how to name the file in an error
    """

    def __init__(self, sizes: dict[str, int], name: str) -> None:
        self._sizes = sizes
        self._name = name
        self._parts = 0

    def describe(self, value: Any, depth: int) -> Any:
        """
        :param value: part of a pickle
        :param depth: in how many dictionaries and lists it lies
        :return: the same with ``TensorInfo``
        """
        self._parts += 1
        if depth > _MAX_DEPTH:
            raise FileRefused(f"{self._name} is nested too deeply")
        if self._parts > _MAX_PARTS:
            raise FileRefused(f"{self._name} is too large: more than {_MAX_PARTS} parts")
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return type(value)(self.describe(entry, depth + 1) for entry in value)
        if isinstance(value, dict):
            return {key: self.describe(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, Pickled):
            self._check_rest(value, depth)
            if value.path == "collections.OrderedDict" and not value.args:
                return {self._key(key): self.describe(entry, depth + 1) for key, entry in value.items}
            if value.path == _REBUILD_PARAMETER:
                return self.describe(value.args[0], depth + 1)
            if value.path == _REBUILD_TENSOR:
                return self._tensor(value)
        raise FileRefused(f"{self._name} holds {getattr(value, 'path', type(value).__name__)} where a tensor should be")

    def _check_rest(self, value: Pickled, depth: int) -> None:
        """
        :param value: part of a pickle, whose content is looked at elsewhere
        :param depth: in how many dictionaries and lists it lies
        :raises FileRefused: there is more to it, such as a state that would change a tensor's shape
        """
        state, items, args = value.state, value.items, value.args
        if value.path == "collections.OrderedDict":
            # PyTorch's versions of the modules
            if isinstance(state, dict) and state.keys() == {"_metadata"} and isinstance(state["_metadata"], Pickled):
                self.describe(state["_metadata"], depth + 1)
                state = None
            items = []
        first = 4 if value.path == _REBUILD_TENSOR else 1
        for arg in args[first:]:
            self.describe(arg, depth + 1)
        if state is not None or items:
            raise FileRefused(f"{self._name} holds {value.path} with more to it than PyTorch writes")

    def _key(self, key: Any) -> str:
        """
        :param key: a key of an ``OrderedDict``
        :return: the same as text
        """
        if not isinstance(key, str | int):
            raise FileRefused(f"{self._name} holds {type(key).__name__} where a name should be")
        return str(key)

    def _tensor(self, value: Pickled) -> TensorInfo:
        """
        :param value: the call that makes a tensor
        :return: what it would make
        """
        storage, offset, shape, strides, *_ = value.args
        if not isinstance(storage, PersistentId):
            raise FileRefused(f"{self._name} holds a tensor without memory")
        _, storage_type, key, location, number = storage.args[0]
        if not (isinstance(storage_type, type) and issubclass(storage_type, Pickled) and isinstance(location, str)):
            raise FileRefused(f"{self._name} holds a tensor of unknown memory")
        dtype = _STORAGES[storage_type.path]
        is_possible = len(shape) == len(strides) <= _MAX_DIMENSIONS and isinstance(key, str)
        if not is_possible or not all(type(it) is int and 0 <= it < 2**63 for it in (number, offset, *shape, *strides)):
            raise FileRefused(f"{self._name} holds a tensor of an impossible shape")
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        fits = math.prod(shape) == 0 or last < number
        # Elements that share memory would take more than the file has
        if not fits or math.prod(shape) > number or number * dtype.itemsize != self._sizes.get(key):
            raise FileRefused(f"{self._name} holds a tensor of shape {shape}, for which it has not the memory")
        return TensorInfo(tuple(shape), dtype)
