"""Files that strangers may send: pickles that run code, and zip files that lie. Each is built here, none is stored."""

import base64
import importlib
import io
import json
import marshal
import os
import pickle
import resource
import stat
import struct
import time
import zipfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import torch as th
from stable_baselines3.common.noise import NormalActionNoise

from sb3_td3x.files.sealed_zip import VERSION_MEMBER, write_sealed_zip

# Time of the processor in seconds, and memory in bytes, that any file may take
TIME_LIMIT = 5
MEMORY_LIMIT = 10**9

# Gadgets: pickles that make a folder where they are run


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function = function
        self.args = args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args

    def __call__(self) -> None:
        """Do nothing: pickle checks that what is called is callable."""


class State:
    """An object whose pickle restores a state, gadgets included."""

    def __init__(self, cls: type, **state: Any) -> None:
        self.cls = cls
        self.state = state

    def __reduce__(self) -> Any:
        return self.cls.__new__, (self.cls,), self.state


class Array:
    """
    An object whose pickle is that of an array of bytes, which it shares with others that are made of the same bytes.

    :param data: the bytes
    """

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> Any:
        function, args, _ = np.zeros(1).__reduce__()  # type: ignore[misc]
        return function, args, (1, (len(self.data),), np.dtype("u1"), False, self.data)


class Items:
    """
    An object whose pickle is that of an ``OrderedDict``, with any key.

    :param key: the key
    :param value: the value
    """

    def __init__(self, key: Any, value: Any) -> None:
        self.items = [(key, value)]

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items)


def nested(value: Any, depth: int, width: int = 100) -> Any:
    """
    Return a list or tuple of the same object many times, which is a list of the same object many times, and so on.

    :param value: the innermost list or tuple
    :param depth: number of lists
    :param width: number of objects in each
    """
    for _ in range(depth):
        value = type(value)([value] * width)
    return value


def by_value(path: str) -> bytes:
    """Return what cloudpickle makes of a function: its code."""
    return cloudpickle.dumps(Call(lambda: os.mkdir(path)))


def by_marshal(path: str) -> bytes:
    """Return code that is read by marshal."""
    code = marshal.dumps(compile(f"import os; os.mkdir({path!r})", "gadget", "exec"))
    return pickle.dumps(Call(exec, Call(marshal.loads, code)))


def by_old_opcodes(path: str) -> bytes:
    """Return a pickle of protocol 0."""
    return b"(S" + repr(path).encode() + b"\nios\nmkdir\n."


def by_object_opcode(path: str) -> bytes:
    """Return a pickle with OBJ, which calls what lies below its arguments."""
    return b"\x80\x04(cos\nmkdir\n\x8c" + bytes([len(path)]) + path.encode() + b"o."


def by_extension_code(path: str) -> bytes:
    """Return a pickle with EXT1, which reads the registry of copyreg."""
    return b"\x80\x04\x82\x01)R."


GADGETS: dict[str, Callable[[str], bytes]] = {
    "os.mkdir": lambda path: pickle.dumps(Call(os.mkdir, path)),
    "os.system": lambda path: pickle.dumps(Call(os.system, f"mkdir {path}")),
    "eval": lambda path: pickle.dumps(Call(eval, f"__import__('os').mkdir({path!r})")),
    "exec": lambda path: pickle.dumps(Call(exec, f"import os; os.mkdir({path!r})")),
    "getattr": lambda path: pickle.dumps(Call(Call(getattr, Call(importlib.import_module, "os"), "mkdir"), path)),
    "pickle in a pickle": lambda path: pickle.dumps(Call(pickle.loads, pickle.dumps(Call(os.mkdir, path)))),
    "cloudpickle": by_value,
    "marshal": by_marshal,
    "old opcodes": by_old_opcodes,
    "object opcode": by_object_opcode,
    "extension code": by_extension_code,
    "in a list": lambda path: pickle.dumps([1, {"two": Call(os.mkdir, path)}]),
    "in a deque": lambda path: pickle.dumps(deque([Call(os.mkdir, path)])),
    "in an array": lambda path: pickle.dumps(np.array([Call(os.mkdir, path)], dtype=object)),
    "in a noise": lambda path: pickle.dumps(
        State(NormalActionNoise, _mu=Call(os.mkdir, path), _sigma=np.ones(1), _dtype=np.float32)
    ),
    "torch.load": lambda path: pickle.dumps(Call(th.load, path)),
    "numpy.load": lambda path: pickle.dumps(Call(np.load, path, None, True)),
    "unfinished": lambda path: pickle.dumps(Call(os.mkdir, path))[:-1],
}


# What readers may do with hostile files


def refusal(read: Callable[[], Any]) -> str | None:
    """
    Read a hostile file. It must be read or refused by one sentence, and take little time and memory.

    :param read: reads the file
    :return: the sentence; None if the file was read
    """
    start, refused = time.process_time(), None
    try:
        read()
    except ValueError as error:
        refused = error
    assert time.process_time() - start < TIME_LIMIT
    if refused is None:
        return None
    assert "\n" not in str(refused)
    assert len(str(refused)) < 1000
    assert refused.__cause__ is None
    assert refused.__context__ is None or refused.__suppress_context__
    return str(refused)


class MemoryCheck:
    """Context that checks that the process never took much more memory than at its start."""

    def __enter__(self) -> None:
        self.before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def __exit__(self, *_: Any) -> None:
        # In units of 1024 bytes
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self.before < MEMORY_LIMIT // 1024


# Changing zip files


def members_of(content: bytes) -> dict[str, bytes]:
    """Return the members of a zip file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def plain_zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip file without a checksum."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def sealed_zip(members: dict[str, bytes]) -> bytes:
    """Return a zip file with the right checksum."""
    file = io.BytesIO()
    with write_sealed_zip(file, "zip") as archive:
        for name, content in members.items():
            if name != VERSION_MEMBER:
                archive.writestr(name, content)
    return file.getvalue()


def with_members(content: bytes, **changed: bytes) -> bytes:
    """
    Replace or add members of a zip file with a checksum.

    :param content: the zip file
    :param changed: the members, with ``__`` for a dot in the name
    :return: the zip file with the right checksum
    """
    return sealed_zip({**members_of(content), **{name.replace("__", "."): it for name, it in changed.items()}})


def with_data(content: bytes, **changed: Any) -> bytes:
    """
    Replace or add attributes of an agent's file.

    :param content: the file
    :param changed: the attributes as they are written
    :return: the file with the right checksum
    """
    data = json.loads(members_of(content)["data"])
    return with_members(content, data=json.dumps({**data, **changed}).encode())


def with_pickle(content: bytes, name: str, pickled: bytes) -> bytes:
    """
    Replace or add an attribute of an agent's file by a pickle, as in a file of SB3.

    :param content: the file
    :param name: name of the attribute
    :param pickled: the pickle
    :return: the file without a checksum
    """
    members = members_of(content)
    data = json.loads(members["data"])
    data[name] = {":type:": "<class 'object'>", ":serialized:": base64.b64encode(pickled).decode()}
    members = {member: it for member, it in members.items() if member != VERSION_MEMBER}
    return plain_zip({**members, "data": json.dumps(data).encode()})


def torch_with_pickle(content: bytes, pickled: bytes) -> bytes:
    """Return a file of PyTorch with another pickle."""
    members = members_of(content)
    (name,) = (member for member in members if member.endswith("data.pkl"))
    return plain_zip({**members, name: pickled})


def torch_file(value: Any) -> bytes:
    """Return what ``torch.save`` makes of an object."""
    file = io.BytesIO()
    th.save(value, file)
    return file.getvalue()


def torch_pickle(value: Any, key: Any = "0") -> bytes:
    """
    Return the pickle in what ``torch.save`` makes of an object.

    :param value: the object
    :param key: key of the memory of its tensors
    """

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> Any:
            is_storage = isinstance(part, th.storage.TypedStorage)
            return ("storage", th.FloatStorage, key, "cpu", part._size()) if is_storage else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump(value)
    return file.getvalue()


class HugeTensor:
    """A tensor that claims more elements than it has memory for."""

    def __init__(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
        self.shape, self.stride = shape, stride

    def __reduce__(self) -> Any:
        storage = th.zeros(4).untyped_storage()
        typed = th.storage.TypedStorage(wrap_storage=storage, dtype=th.float32, _internal=True)
        return th._utils._rebuild_tensor_v2, (typed, 0, self.shape, self.stride, False, {})


class ReshapedTensor(HugeTensor):
    """A tensor of four elements, whose state then gives it another shape."""

    def __reduce__(self) -> Any:
        function, (typed, *rest) = super().__reduce__()
        small = (typed, 0, (4,), (1,), *rest[3:])
        return function, small, (typed, 0, self.shape, self.stride)


def zip_bombs(good: bytes) -> Iterator[tuple[str, bytes]]:
    """
    Yield zip files that claim, or would take, much more memory than their size.

    :param good: an agent's file, or another zip file
    :return: names and contents of the files
    """
    members = _without_version(good)
    first = next(iter(members))
    yield "bomb", plain_zip({**members, "bomb.pth": bytes(2**27)}, zipfile.ZIP_DEFLATED)
    yield "bomb as data", plain_zip({**members, first: b" " * 2**27}, zipfile.ZIP_DEFLATED)
    yield "claims more than it has", _with_claimed_size(plain_zip(members), 2**40)


def zip_tricks(good: bytes) -> Iterator[tuple[str, bytes]]:
    """
    Yield zip files that are not what they seem.

    :param good: an agent's file, or another zip file with a checksum
    :return: names and contents of the files
    """
    # As SB3 writes them: a missing checksum would be noticed first
    members = _without_version(good)

    def edited(change: Callable[[zipfile.ZipInfo], None], name: str = "extra.pth", content: bytes = b"x") -> bytes:
        file = io.BytesIO(plain_zip(members))
        with zipfile.ZipFile(file, "a") as archive:
            info = zipfile.ZipInfo(name)
            change(info)
            archive.writestr(info, content)
        return file.getvalue()

    for name in ("../evil.pth", "/etc/evil.pth", "a/../../evil.pth", "C:evil.pth", "a\\evil.pth", "folder/"):
        yield f"member {name}", edited(lambda info: None, name)
    yield "link", edited(lambda info: setattr(info, "external_attr", (stat.S_IFLNK | 0o777) << 16), content=b"/etc")
    yield "device", edited(lambda info: setattr(info, "external_attr", (stat.S_IFCHR | 0o777) << 16))
    yield "two of a name", _doubled(members, next(iter(members)))
    yield "encrypted", _with_flag(plain_zip(members), 0x1)
    yield "lzma", plain_zip(members, zipfile.ZIP_LZMA)
    yield "bzip2", plain_zip(members, zipfile.ZIP_BZIP2)
    yield "many members", plain_zip({**members, **{f"{number}.txt": b"" for number in range(10_001)}})
    yield "claims less than it has", _with_claimed_size(plain_zip(members), 3)
    yield "overlapping", _overlapping(plain_zip(members))
    yield "something behind it", plain_zip(members) + b"behind"
    yield "another archive behind it", plain_zip(members) + plain_zip({"a": b""})
    yield "only the end of an archive", struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0)
    yield "end with a directory that is not there", struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 9, 9, 2**31, 2**31, 0)


def _without_version(content: bytes) -> dict[str, bytes]:
    return {name: it for name, it in members_of(content).items() if name != VERSION_MEMBER}


def _doubled(members: dict[str, bytes], name: str) -> bytes:
    # By two names of the same length, because zipfile warns of one name twice
    other = "#" * len(name)
    return plain_zip({**members, other: members[name]}).replace(other.encode(), name.encode())


def _directory_entries(content: bytearray) -> Iterator[int]:
    start = content.find(b"PK\1\2", int.from_bytes(content[-6:-2], "little"))
    while content[start : start + 4] == b"PK\1\2":
        yield start
        lengths = struct.unpack("<3H", content[start + 28 : start + 34])
        start += 46 + sum(lengths)


def _with_flag(content: bytes, flag: int) -> bytes:
    changed = bytearray(content)
    for start in _directory_entries(changed):
        changed[start + 8] |= flag
    return bytes(changed)


def _with_claimed_size(content: bytes, size: int) -> bytes:
    changed = bytearray(content)
    for start in _directory_entries(changed):
        changed[start + 20 : start + 28] = struct.pack("<2L", min(size, 2**32 - 2), min(size, 2**32 - 2))
    return bytes(changed)


def _overlapping(content: bytes) -> bytes:
    changed = bytearray(content)
    offsets = [changed[start + 42 : start + 46] for start in _directory_entries(changed)]
    for start in _directory_entries(changed):
        changed[start + 42 : start + 46] = offsets[0]
    return bytes(changed)
