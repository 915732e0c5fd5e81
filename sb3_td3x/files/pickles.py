"""
Reading pickles without running them.

A pickle is a program that calls what it names. Here nothing is called and nothing imported: each class or function that
a pickle names becomes a record of its name, arguments and state, and ``plain`` makes objects of the records it knows.
"""

import io
import itertools
import pickletools
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, ClassVar

from sb3_td3x.files.atomic import FileRefused

# Of attributes of an agent; a pickle that is all operations takes a second to read
MAX_OPERATIONS = 500_000
# Larger integers may have the same hash, which makes dictionaries slow
_MAX_KEY = 2**60


class Pickled:
    """
    What a pickle says of an object.

    :param args: the positional arguments that its class or function would have been called with
    """

    path: ClassVar[str]

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None
        self.items: list[Any] = []


class PersistentId(Pickled):
    """What a pickle refers to outside of itself; its only argument is how."""

    path = "persistent id"


class _Reader:
    """
    The stack machine that pickles are programs for.

    :param name: how to name the file in an error
    :param allowed: dotted paths of the classes and functions that may be named; None: all
    """

    def __init__(self, name: str, allowed: Collection[str] | None) -> None:
        self.name = name
        self.allowed = allowed
        self.classes: dict[str, type[Pickled]] = {}
        self._stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def step(self, operation: str, arg: Any) -> None:
        """
        :param operation: name of the operation
        :param arg: what stands behind it in the pickle
        """
        stack = self._stack
        if operation in _PUSHED_ARGUMENTS:
            stack.append(arg)
        elif operation in _CONSTANTS:
            stack.append(_CONSTANTS[operation])
        elif operation in ("PROTO", "FRAME"):
            pass
        elif operation in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self._memo[len(self._memo) if operation == "MEMOIZE" else arg] = stack[-1]
        elif operation in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[arg])
        elif operation == "MARK":
            self._below_marks.append(stack)
            self._stack = []
        elif operation in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if operation == "EMPTY_LIST" else {})
        elif operation in ("TUPLE1", "TUPLE2", "TUPLE3"):
            length = int(operation[-1])
            stack[-length:] = [tuple(self._last(length))]
        elif operation == "TUPLE":
            items = self._pop_mark()
            self._stack.append(tuple(items))
        elif operation in ("APPEND", "APPENDS"):
            items = [stack.pop()] if operation == "APPEND" else self._pop_mark()
            target = self._stack[-1]
            (target.items if isinstance(target, Pickled) else _checked(target, list)).extend(items)
        elif operation in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if operation == "SETITEM" else self._pop_mark()
            pairs = list(zip(items[::2], items[1::2], strict=True))
            target = self._stack[-1]
            if isinstance(target, Pickled):
                target.items.extend(pairs)
            else:
                _checked(target, dict).update((_key(key), value) for key, value in pairs)
        elif operation == "GLOBAL":
            stack.append(self._named(*arg.split(" ", 1)))
        elif operation == "STACK_GLOBAL":
            stack[-2:] = [self._named(*self._last(2))]
        elif operation in ("REDUCE", "NEWOBJ"):
            target, args = self._last(2)
            if self.allowed is None and isinstance(target, Pickled):
                # The result of a call is called: of interest only for what else is named
                target = Pickled
            if not (isinstance(target, type) and issubclass(target, Pickled)):
                raise TypeError(f"calls {type(target).__name__}")
            stack[-2:] = [target(*_checked(args, tuple))]
        elif operation == "BUILD":
            state = stack.pop()
            _checked(stack[-1], Pickled).state = state
        elif operation == "BINPERSID":
            stack.append(PersistentId(stack.pop()))
        elif operation == "POP":
            stack.pop()
        elif operation == "STOP":
            (self.result,) = stack
        else:
            raise FileRefused(f"{self.name} holds a pickle with {operation}, which no agent's has")

    def _last(self, number: int) -> list[Any]:
        if len(self._stack) < number:
            raise IndexError("stack is empty")
        return self._stack[-number:]

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below_marks.pop()
        return items

    def _named(self, module: str, name: str) -> type[Pickled]:
        path = f"{_checked(module, str)}.{_checked(name, str)}"
        if self.allowed is not None and path not in self.allowed:
            raise FileRefused(f"{self.name} holds a pickle that names {path[:120]!r}, which may run code")
        if path not in self.classes:
            self.classes[path] = type(name, (Pickled,), {"path": path})
        return self.classes[path]


_PUSHED_ARGUMENTS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


class _Bounded:
    """
    A file that gives no more than it has, whatever it is asked for: memory is taken for what is asked.

    :param file: the file
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.tell = file.tell
        start = file.tell()
        self._end = file.seek(0, io.SEEK_END)
        file.seek(start)

    def read(self, size: int) -> bytes:
        """
        :param size: number of bytes
        :return: so many bytes, or what is left
        """
        return self._file.read(min(size, self._end - self._file.tell()))

    def readline(self) -> bytes:
        """
        :return: a line, of 1000 bytes at most
        """
        return self._file.readline(1000)


def read_pickle(
    file: BinaryIO,
    name: str,
    allowed: Collection[str] | None,
    max_operations: int = MAX_OPERATIONS,
    numbers: Iterator[int] | None = None,
) -> Any:
    """
    :param file: the pickle
    :param name: how to name the file in an error
    :param allowed: dotted paths of the classes and functions that it may name; None: all
    :param max_operations: how long the pickle may be
    :param numbers: of the operations; where it goes on from pickle to pickle, they may be so long together
    :return: what it holds; classes and functions are subclasses of ``Pickled``, objects are instances of these
    :raises FileRefused: it names another class or function, or is too long
    :raises Exception: it is damaged
    """
    reader = _Reader(name, allowed)
    _run(reader, file, max_operations, numbers or itertools.count())
    return reader.result


def named_in_pickle(file: BinaryIO, name: str, numbers: Iterator[int] | None = None) -> list[str]:
    """
    :param file: a pickle
    :param name: how to name the file in an error
    :param numbers: of the operations, see ``read_pickle``
    :return: dotted paths of the classes and functions that it names; if it is damaged, up to there, and why
    """
    reader = _Reader(name, None)
    try:
        _run(reader, file, MAX_OPERATIONS, numbers or itertools.count())
    except Exception as error:  # a stranger's pickle decides which
        return [*sorted(reader.classes), f"(unreadable: {error!s:.80})"]
    return sorted(reader.classes)


def _run(reader: _Reader, file: BinaryIO, max_operations: int, numbers: Iterator[int]) -> None:
    """
    :param reader: the machine
    :param file: the pickle
    :param max_operations: how long it may be
    :param numbers: of the operations
    """
    operations = pickletools.genops(_Bounded(file))  # type: ignore[arg-type]
    for number, (operation, arg, _) in zip(numbers, operations, strict=False):
        if number >= max_operations:
            raise FileRefused(f"{reader.name} holds a pickle of more than {max_operations} operations")
        reader.step(operation.name, arg)


def _key(value: Any) -> Any:
    """
    :param value: a key of a dictionary
    :return: the same
    """
    if isinstance(value, int) and abs(value) >= _MAX_KEY:
        raise ValueError(f"uses the number {value!s:.40} as key")
    return _checked(value, str | int | float | None)


def _checked(value: Any, kind: Any) -> Any:
    """
    :param value: something on the stack
    :param kind: what it should be
    :return: the same
    """
    if not isinstance(value, kind):
        raise TypeError(f"uses {type(value).__name__} as {kind}")
    return value
