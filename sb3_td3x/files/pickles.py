"""
Reading pickles from strangers without running them.

A pickle is a program that calls the classes and functions that it names. Here Python's own reader gets a harmless
record in place of each of them, so that nothing is imported and nothing is called. ``from_pickle`` then makes objects
of the records of registered classes.
"""

import pickle
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch as th

from sb3_td3x.files.errors import FileRefused
from sb3_td3x.files.limits import MAX_PICKLE_GROWTH
from sb3_td3x.files.records import (
    CLASSES,
    OBJECTS,
    build_object,
    check_type,
    make_array,
    make_dtype,
    make_generator,
)


class Pickled:
    """What a pickle says about an object. Each class or function that a pickle names becomes a subclass."""

    path: ClassVar[str] = "result of a call"
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any) -> "Pickled":
        """Record a call of the class or function."""
        made = super().__new__(cls)
        made.args = args
        made.state = None
        made.items = []
        return made

    def __call__(self, *args: Any) -> "Pickled":
        """Record a call of the result of a call."""
        return Pickled(*args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """Record an item of a list."""
        self.items.append(item)


class PersistentId(Pickled):
    """A reference to something outside of the pickle."""

    path = "persistent id"


class _Operations(dict[int, Any]):
    """The allowed operations of pickles by their codes."""

    def __missing__(self, code: int) -> Any:
        raise ValueError(f"a pickle uses the operation {bytes([code])!r}, which no agent's pickle has")


_Base: Any = pickle._Unpickler

# All operations that Python, SB3 and PyTorch write for the content of agents
_OPERATIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.MEMOIZE),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPERSID),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD),
)


class _Reader(_Base):  # type: ignore[misc]
    """
    Python's own reader of pickles, limited to the operations above.

    It is the version in Python: the one in C takes as much memory as a pickle asks for.

    :param allowed: module paths of the classes and functions that the pickle may name; None: all
    """

    dispatch = _Operations({code[0]: _Base.dispatch[code[0]] for code in _OPERATIONS})

    def __init__(self, file: BinaryIO, file_name: str, allowed: Collection[str] | None) -> None:
        super().__init__(file)
        self.file_name = file_name
        self.allowed = allowed
        self.named: dict[str, type[Pickled]] = {}

    def find_class(self, module: str, name: str) -> type[Pickled]:
        """Return a record in place of a class or function."""
        path = f"{module}.{name}"
        if self.allowed is not None and path not in self.allowed:
            raise FileRefused(f"{self.file_name} holds a pickle that names {path[:120]!r}, which may run code")
        return self.named.setdefault(path, type("Named", (Pickled,), {"path": path}))

    def persistent_load(self, pid: Any) -> PersistentId:
        """Return a record in place of what is outside."""
        return PersistentId(pid)

    def load_setitems(self) -> None:
        """Set entries of a dictionary."""
        items = self.pop_mark()
        self._set_items(items)

    def load_setitem(self) -> None:
        """Set an entry of a dictionary."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(target, Pickled):
                target.items.append((key, value))
            else:
                # Nested tuples can take forever to hash
                check_type(target, dict)[check_type(key, str | int | float | None)] = value

    def load_bytearray8(self) -> None:
        """Read a ``bytearray``. Unlike Python's method, take memory only for bytes that the file has."""
        (size,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(size)))

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8


def read_pickle(file: BinaryIO, name: str, allowed: Collection[str]) -> Any:
    """
    Read a pickle without running it.

    :param allowed: module paths of the classes and functions that it may name, such as ``allowed_in_pickles()``
    :return: its content. Classes and functions are subclasses of ``Pickled``, and objects are instances of these
    :raises FileRefused: it names another class or function
    """
    return _Reader(file, name, allowed).load()


def names_in_pickle(file: BinaryIO) -> list[str]:
    """
    List what a pickle would import.

    :return: module paths of classes and functions. If the pickle is damaged: up to there, and why
    """
    reader = _Reader(file, "", None)
    try:
        reader.load()
    except Exception as error:  # a stranger's pickle can cause any exception
        return [*sorted(reader.named), f"(unreadable: {error!s:.80})"]
    return sorted(reader.named)


# Making objects

_ARRAYS = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
_GENERATOR = "numpy.random._pickle.__generator_ctor"
_FUNCTIONS = frozenset(
    {
        *(f"numpy.{core}.{function}" for core in ("core", "_core") for function in _ARRAYS),
        *("numpy.ndarray", "numpy.dtype", "collections.deque", "collections.OrderedDict", "torch.device"),
        *(_GENERATOR, "numpy.random._pickle.__bit_generator_ctor", "numpy.random._pcg64.PCG64"),
        # The seed of a generator is not needed: its state follows
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
        *("numpy.random.bit_generator.SeedSequence", "numpy.random._bit_generator.SeedSequence"),
    }
)
# Assumed memory for an object
_OBJECT_BYTES = 64


def allowed_in_pickles() -> frozenset[str]:
    """Return the module paths of all classes and functions that ``from_pickle`` knows."""
    return _FUNCTIONS | CLASSES.keys() | OBJECTS.keys()


# A function that makes an object of what a pickle says about it
Maker = Callable[[Pickled], Any]


def from_pickle(value: Any, pickle_bytes: int, makers: Mapping[str, Maker] | None = None) -> Any:
    """
    Make the objects that a pickle describes.

    :param value: the result of ``read_pickle``, or a part of it
    :param pickle_bytes: size of the pickle, which limits the memory of its objects: a small pickle can refer to one
        part in many places
    :param makers: functions that make objects of further classes and functions, by the module paths of these
    """
    return _Converter(MAX_PICKLE_GROWTH * pickle_bytes, makers or {}).convert(value)


class _Converter:
    """Makes the objects that a pickle describes."""

    def __init__(self, max_bytes: int, makers: Mapping[str, Maker]) -> None:
        self._bytes_left = max_bytes
        self._makers = makers

    def _take(self, n_bytes: int) -> None:
        self._bytes_left -= n_bytes
        if self._bytes_left < 0:
            raise ValueError("it is too large: its objects take many times the memory of the file")

    def convert(self, value: Any) -> Any:
        """Return the object that a part of a pickle describes."""
        self._take(_OBJECT_BYTES)
        if isinstance(value, list | tuple):
            return type(value)(self.convert(entry) for entry in value)
        if isinstance(value, dict):
            return {key: self.convert(entry) for key, entry in value.items()}
        if isinstance(value, type):
            return CLASSES[getattr(value, "path", "")]
        if not isinstance(value, Pickled):
            return value
        try:
            return self._object(value)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"it holds no {value.path} ({type(error).__name__}: {error})"[:250]) from None

    def _object(self, value: Pickled) -> Any:
        path, args = value.path, value.args
        if path in self._makers:
            return self._makers[path](value)
        if path == "numpy.dtype":
            return _dtype(value)
        if path.endswith("._frombuffer"):
            data, dtype, shape, order = args
            return self._array(dtype, shape, data, order)
        if path.endswith("._reconstruct"):
            _, shape, dtype, fortran_order, data = value.state
            return self._array(dtype, shape, data, "F" if fortran_order else "C")
        if path.endswith("multiarray.scalar"):
            return self._array(args[0], (1,), args[1], "C")[0]
        if path == "collections.deque":
            return deque([self.convert(item) for item in value.items], *args[1:])
        if path == "collections.OrderedDict":
            return OrderedDict((check_type(key, str | int), self.convert(item)) for key, item in value.items)
        if path == "torch.device":
            return th.device(":".join(str(check_type(arg, str | int)) for arg in args))
        if path == _GENERATOR:
            state = args[0].state
            return make_generator(self.convert(state[0] if isinstance(state, tuple) else state))
        attributes = OBJECTS[path].attributes
        # Enumerations and named tuples are calls with their attributes
        state = value.state if value.state is not None else dict(zip(attributes, args, strict=True))
        return build_object(path, {key: self.convert(entry) for key, entry in state.items() if key in attributes})

    def _array(self, dtype: Any, shape: Any, data: Any, order: Any) -> np.ndarray:
        self._take(len(check_type(data, bytes | bytearray)))
        return make_array(_dtype(dtype), shape, data, order)


def _dtype(value: Any) -> np.dtype:
    """Return a type of numbers. A pickle has its name without the byte order, and the byte order in its state."""
    (name, *_), state = value.args, value.state
    dtype = make_dtype(name)
    return dtype.newbyteorder(">") if state is not None and state[1] == ">" else dtype
