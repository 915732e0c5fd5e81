"""
Attributes of agents as plain data, which can be written as JSON and read without running code.

What JSON has stands for itself. All else is an object with the key ``:plain:``, which says what it is: a container, an
array, a class or an object of a class that is listed here, with its attributes. The same objects are made of what
pickles of SB3 say, see ``unpickling``.
"""

import base64
import enum
import json
import math
import pathlib
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import buffers, noise, torch_layers
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from stable_baselines3.td3 import policies as sb3_policies
from torch import nn

from sb3_td3x import policies
from sb3_td3x.buffers import PackedReplayBuffer
from sb3_td3x.files.atomic import FileRefused
from sb3_td3x.files.pickles import Pickled
from sb3_td3x.schedules import SimpleLinearSchedule
from sb3_td3x.shaping import OF_NUMBERS, ActionCost, FallPenalty, RewardClip, RewardOffset, RewardScale, ShapingChain

_TAG = ":plain:"
_MAX_DEPTH = 30
MAX_VALUES = 300_000
# Keys that are not text may all have the same hash, which makes dictionaries slow
_MAX_PAIRS = 1000
# Parts of a pickle may stand in many places, and grow by that
MAX_PARTS = 300_000
MAX_ARRAY_BYTES = 256 * 2**20


class NotPlainError(TypeError):
    """Something that only a pickle can hold."""


def path_of(cls: type) -> str:
    """
    :param cls: a class
    :return: its dotted path
    """
    return f"{cls.__module__}.{cls.__qualname__}"


# Classes that may be named, where they are an argument


_CLASSES: tuple[type, ...] = (
    *(policies.TD3XPolicy, policies.CnnPolicy, policies.MultiInputPolicy),
    *(sb3_policies.TD3Policy, sb3_policies.CnnPolicy, sb3_policies.MultiInputPolicy),
    *(torch_layers.FlattenExtractor, torch_layers.NatureCNN, torch_layers.CombinedExtractor),
    *(buffers.ReplayBuffer, buffers.DictReplayBuffer, buffers.NStepReplayBuffer, HerReplayBuffer, PackedReplayBuffer),
    *(nn.ReLU, nn.Tanh, nn.ELU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.SiLU, nn.CELU, nn.Hardtanh, nn.SELU, nn.Sigmoid),
    *(nn.Identity, nn.Softplus, nn.Softsign, nn.PReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink),
    *(th.optim.Adadelta, th.optim.Adagrad, th.optim.Adam, th.optim.Adamax, th.optim.AdamW, th.optim.NAdam),
    *(th.optim.Adafactor, th.optim.ASGD, th.optim.Rprop),
    *(th.optim.RAdam, th.optim.RMSprop, th.optim.SGD, RMSpropTFLike),
    *(np.float16, np.float32, np.float64, np.uint8, np.int8, np.int16, np.int32, np.int64, np.bool_, float, int),
)
CLASSES: dict[str, type] = {path_of(cls): cls for cls in _CLASSES}


# Objects, by their attributes


@dataclass(frozen=True)
class _Kind:
    """
    How objects of a class are taken apart and put together.

    :param cls: the class
    :param attributes: names of its attributes
    :param build: an object from what there is of them; raises any exception where they do not fit
    :param arguments: the names that pickles give the class's arguments
    """

    cls: type
    attributes: tuple[str, ...]
    build: Callable[[dict[str, Any]], Any]
    arguments: tuple[str, ...] = ()


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{type(value).__name__} is no number")
    return value


def _numbers(value: Any) -> Any:
    """A number, an array of numbers, or a list of them"""
    if isinstance(value, list):
        return [_number(entry) for entry in value]
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" else _number(value)


def _instance(value: Any, cls: Any) -> Any:
    if not isinstance(value, cls):
        raise TypeError(f"{type(value).__name__} is not allowed")
    return value


def _with_generator(space: spaces.Space, state: dict[str, Any]) -> spaces.Space:
    """The space, with the random generator that it had"""
    generator = state.get("_np_random")
    space._np_random = _instance(generator, np.random.Generator | None)
    return space


def _box(state: dict[str, Any]) -> spaces.Space:
    low, high = (_instance(_numbers(state[name]), np.ndarray) for name in ("low", "high"))
    space = spaces.Box(low, high, dtype=np.dtype(state["dtype"]).type)
    for name in ("bounded_below", "bounded_above"):
        # Of integers, which know no infinity, the bounds do not say it
        bounded = _instance(state.get(name, getattr(space, name)), np.ndarray)
        if bounded.shape != low.shape or bounded.dtype != bool:
            raise ValueError(f"{name} does not fit")
        setattr(space, name, bounded)
    for name in ("low_repr", "high_repr"):
        if hasattr(space, name) and name in state:
            setattr(space, name, _instance(state[name], str | None))
    return _with_generator(space, state)


def _discrete(state: dict[str, Any]) -> spaces.Space:
    dtype = np.dtype(state.get("dtype", np.int64))
    # Not every version of Gymnasium has the argument
    kwargs = {} if dtype == np.int64 else {"dtype": dtype}
    return _with_generator(spaces.Discrete(int(state["n"]), start=int(state.get("start", 0)), **kwargs), state)


def _multi_discrete(state: dict[str, Any]) -> spaces.Space:
    kwargs = {"start": state["start"]} if "start" in state else {}
    return _with_generator(spaces.MultiDiscrete(state["nvec"], dtype=np.dtype(state["dtype"]).type, **kwargs), state)


def _dict_space(state: dict[str, Any]) -> spaces.Space:
    entries = {_instance(key, str): _instance(entry, spaces.Space) for key, entry in state["spaces"].items()}
    space = spaces.Dict(entries)
    # In the order of the file, which is that of the networks' inputs
    space.spaces = entries
    if hasattr(space, "sort_keys") and "sort_keys" in state:
        space.sort_keys = _instance(state["sort_keys"], bool)
    return _with_generator(space, state)


def _normal_noise(state: dict[str, Any]) -> noise.ActionNoise:
    dtype = np.dtype(state.get("_dtype", np.float32)).type
    return noise.NormalActionNoise(_numbers(state["_mu"]), _numbers(state["_sigma"]), dtype)


def _ou_noise(state: dict[str, Any]) -> noise.ActionNoise:
    initial_noise = state["initial_noise"]
    made = noise.OrnsteinUhlenbeckActionNoise(
        _numbers(state["_mu"]),
        _numbers(state["_sigma"]),
        _number(state["_theta"]),
        _number(state["_dt"]),
        None if initial_noise is None else _numbers(initial_noise),
        np.dtype(state.get("_dtype", np.float32)).type,
    )
    made.noise_prev = _numbers(state["noise_prev"])
    np.broadcast_shapes(*map(np.shape, (made.noise_prev, made._mu, made._sigma)))
    return made


def _vectorized_noise(state: dict[str, Any]) -> noise.ActionNoise:
    base_noise = _instance(state["_base_noise"], noise.NormalActionNoise | noise.OrnsteinUhlenbeckActionNoise)
    noises = [_instance(each, type(base_noise)) for each in _instance(state["_noises"], list)]
    if not noises or len(noises) != state["n_envs"]:
        raise ValueError("n_envs does not fit")
    made = noise.VectorizedActionNoise(base_noise, 1)
    # Past the setter, which would start new processes
    made.n_envs, made._noises = len(noises), noises
    return made


def _float_schedule(state: dict[str, Any]) -> Any:
    allowed = ConstantSchedule | LinearSchedule | SimpleLinearSchedule
    return FloatSchedule(_instance(state["value_schedule"], allowed))


def _running_mean_std(state: dict[str, Any]) -> RunningMeanStd:
    made = RunningMeanStd()
    made.mean, made.var = (np.asarray(_numbers(state[name]), dtype=np.float64) for name in ("mean", "var"))
    made.count = _number(state["count"])
    if made.mean.shape != made.var.shape:
        raise ValueError("mean and var do not fit")
    return made


def _of_numbers(cls: type, *names: str) -> _Kind:
    """A class whose arguments are its attributes, all of them numbers"""
    return _Kind(cls, names, lambda state: cls(*(_number(state[name]) for name in names)))


def _enum(cls: type[enum.Enum]) -> _Kind:
    return _Kind(cls, ("value",), lambda state: cls(state["value"]), arguments=("value",))


_SPACE = ("_shape", "dtype", "_np_random")
_NOISE = ("_mu", "_sigma", "_dtype")
_ALL_KINDS = (
    _Kind(spaces.Box, (*_SPACE, "low", "high", "bounded_below", "bounded_above", "low_repr", "high_repr"), _box),
    _Kind(spaces.Discrete, (*_SPACE, "n", "start"), _discrete),
    _Kind(spaces.MultiDiscrete, (*_SPACE, "nvec", "start"), _multi_discrete),
    _Kind(spaces.MultiBinary, (*_SPACE, "n"), lambda state: _with_generator(spaces.MultiBinary(state["n"]), state)),
    _Kind(spaces.Dict, (*_SPACE, "spaces", "sort_keys"), _dict_space),
    _Kind(spaces.Tuple, (*_SPACE, "spaces"), lambda state: _with_generator(spaces.Tuple(state["spaces"]), state)),
    _Kind(noise.NormalActionNoise, _NOISE, _normal_noise),
    _Kind(noise.OrnsteinUhlenbeckActionNoise, (*_NOISE, "_theta", "_dt", "initial_noise", "noise_prev"), _ou_noise),
    _Kind(noise.VectorizedActionNoise, ("n_envs", "_base_noise", "_noises"), _vectorized_noise),
    _Kind(FloatSchedule, ("value_schedule",), _float_schedule),
    _of_numbers(ConstantSchedule, "val"),
    _of_numbers(LinearSchedule, "start", "end", "end_fraction"),
    _of_numbers(SimpleLinearSchedule, "initial_value"),
    _of_numbers(FallPenalty, "threshold", "penalty", "initial_penalty", "warmup"),
    _of_numbers(RewardScale, "scale"),
    _of_numbers(RewardOffset, "offset"),
    _of_numbers(RewardClip, "low", "high"),
    _of_numbers(ActionCost, "weight", "warmup"),
    _Kind(
        ShapingChain,
        ("hooks", "changes_terminations"),
        lambda state: ShapingChain([_instance(h, OF_NUMBERS) for h in state["hooks"]]),
    ),
    _Kind(RunningMeanStd, ("mean", "var", "count"), _running_mean_std),
    _Kind(
        TrainFreq,
        ("frequency", "unit"),
        lambda state: TrainFreq(_instance(state["frequency"], int), _instance(state["unit"], TrainFrequencyUnit)),
        arguments=("frequency", "unit"),
    ),
    _enum(TrainFrequencyUnit),
    _enum(GoalSelectionStrategy),
)
_KINDS: dict[str, _Kind] = {path_of(kind.cls): kind for kind in _ALL_KINDS}

# The same by other names: the zoo's class, and Gym's spaces in agents of old versions of SB3
_OTHER_PATHS = {
    "rl_zoo3.utils.SimpleLinearSchedule": path_of(SimpleLinearSchedule),
    **{path.replace("gymnasium.", "gym.", 1): path for path in _KINDS if path.startswith("gymnasium.")},
}


def _build(path: str, state: Any) -> Any:
    """
    :param path: dotted path of a class
    :param state: the attributes of an object of it
    :return: the object
    :raises ValueError: the class is not one of those above, or the attributes do not fit
    """
    path = _OTHER_PATHS.get(path, path)
    if path not in _KINDS:
        raise ValueError(f"{path[:120]!r} is not on the list of classes that are safe to make")
    try:
        return _KINDS[path].build(_instance(state, dict))
    except Exception as error:  # constructors raise all kinds, and a stranger's file decides what they get
        raise ValueError(f"it holds no {path} ({type(error).__name__}: {error})"[:250]) from None


# To plain data


def to_plain(value: Any) -> Any:
    """
    :param value: an attribute
    :return: the same for ``json.dumps``
    :raises NotPlainError: it holds something that only a pickle can
    """
    return _to_plain(value, 0)


def _to_plain(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NotPlainError("nested too deeply")

    def tagged(kind: str, **entries: Any) -> dict[str, Any]:
        return {_TAG: kind, **entries}

    def each(values: Iterable[Any]) -> list[Any]:
        return [_to_plain(entry, depth + 1) for entry in values]

    cls = type(value)
    if value is None or cls in (bool, int, str):
        return value
    if cls is float:
        return value if math.isfinite(value) else tagged("float", value=repr(value))
    if cls is list:
        return each(value)
    if cls is dict and _TAG not in value and all(type(key) is str for key in value):
        return {key: _to_plain(entry, depth + 1) for key, entry in value.items()}
    if cls in (dict, OrderedDict):
        return tagged(cls.__name__, items=[each(pair) for pair in value.items()])
    if cls is tuple:
        return tagged("tuple", items=each(value))
    if cls is deque:
        return tagged("deque", items=each(value), maxlen=value.maxlen)
    if cls is bytes:
        return tagged("bytes", data=_base64(value))
    if isinstance(value, pathlib.Path):
        return tagged("path", value=str(value))
    if cls is np.ndarray and value.dtype.kind in "biufc":
        return tagged("array", dtype=value.dtype.str, shape=list(value.shape), data=_base64(value.tobytes()))
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return tagged("scalar", dtype=value.dtype.str, data=_base64(value.tobytes()))
    if isinstance(value, np.dtype) and value.kind in "biufc":
        return tagged("dtype", value=value.str)
    if cls is th.device:
        return tagged("device", value=str(value))
    if isinstance(value, type) and CLASSES.get(path_of(value)) is value:
        return tagged("class", path=path_of(value))
    if cls is np.random.Generator and type(value.bit_generator) is np.random.PCG64:
        return tagged("generator", state=_to_plain(value.bit_generator.state, depth + 1))
    path = _OTHER_PATHS.get(path_of(cls), path_of(cls))
    if path in _KINDS:
        names = _KINDS[path].attributes
        # An attribute that is not listed would be lost
        if (
            vars(value).keys() <= set(names)
            if hasattr(value, "__dict__") and not isinstance(value, enum.Enum)
            else True
        ):
            state = {name: _to_plain(getattr(value, name), depth + 1) for name in names if hasattr(value, name)}
            return tagged("object", path=path, state=state)
    raise NotPlainError(f"class {path_of(value)}" if isinstance(value, type) else f"{value!r:.100} of {path_of(cls)}")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# From plain data


class JsonReader:
    """
    Reads JSON within a limit.

    :param name: how to name the file in an error
    :param max_values: how many values there may be in all that is read
    """

    def __init__(self, name: str, max_values: int = MAX_VALUES) -> None:
        self._name = name
        self._max_values = max_values
        self._values = 0

    @staticmethod
    def count(text: bytes) -> int:
        """
        :param text: JSON
        :return: how many values it has at most
        """
        return sum(text.count(character) for character in (b",", b"[", b"{"))

    def read(self, text: bytes) -> Any:
        """
        :param text: JSON
        :return: what it holds
        :raises FileRefused: with what was read before it has too many values
        :raises ValueError: it is no JSON
        """
        # Each value takes some hundred bytes of memory
        self._values += self.count(text)
        if self._values > self._max_values:
            raise FileRefused(f"{self._name} is too large: more than {self._max_values} values of JSON")
        return json.loads(text)


def from_plain(value: Any) -> Any:
    """
    The inverse of ``to_plain``.

    :param value: what ``json.loads`` gave
    :return: the attribute
    :raises ValueError: it is not what ``to_plain`` gives
    """
    return _from_plain(value, 0)


def _from_plain(value: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_from_plain(entry, depth + 1) for entry in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _from_plain(entry, depth + 1) for key, entry in value.items()}
    kind = value[_TAG]
    try:
        return _UNTAG[kind](value, lambda part: _from_plain(part, depth + 1))
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it holds no {kind!r:.40} ({type(error).__name__}: {error})"[:250]) from None


_Value = dict[str, Any]
_Convert = Callable[[Any], Any]


def _pairs(value: _Value, convert: _Convert) -> list[tuple[Any, Any]]:
    n_others = sum(type(key) is not str for key, _ in value["items"])
    if n_others > _MAX_PAIRS:
        raise ValueError(f"it holds a dictionary of {n_others} keys that are no text")
    return [
        (_instance(convert(key), str | int | float | bool | tuple | None), convert(it)) for key, it in value["items"]
    ]


def _dtype(name: Any) -> np.dtype:
    """
    :param name: name of a type of numbers, such as ``<f4``
    :return: the type
    """
    if not re.fullmatch("[<>|=]?[biufc][0-9]{1,2}", _instance(name, str)):
        raise ValueError(f"it holds the type {name!r:.40}, which is none of numbers")
    dtype: np.dtype = np.dtype(name)
    return dtype


def _array(dtype: np.dtype, shape: Any, data: bytes | bytearray, order: Any = "C") -> np.ndarray:
    """
    :param dtype: type of the elements
    :param shape: shape of the array
    :param data: the elements
    :param order: their order, ``C`` or ``F``
    :return: the array, with the given memory where it can be written to
    """
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("it holds an array that is not allowed")
    flat: np.ndarray = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    array = flat.reshape(tuple(shape), order=order)
    return array if array.flags.writeable else array.copy(order="K")


def _generator(state: Any) -> np.random.Generator:
    """Of PCG64 alone: the others have positions in arrays, which NumPy does not check"""
    bit_generator = np.random.PCG64(0)
    bit_generator.state = _instance(state, dict)
    return np.random.Generator(bit_generator)


def _decoded(value: _Value) -> bytes:
    return base64.b64decode(_instance(value["data"], str), validate=True)


_UNTAG: dict[str, Callable[[_Value, _Convert], Any]] = {
    "float": lambda value, _: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["value"]],
    "dict": lambda value, convert: dict(_pairs(value, convert)),
    "OrderedDict": lambda value, convert: OrderedDict(_pairs(value, convert)),
    "tuple": lambda value, convert: tuple(convert(item) for item in value["items"]),
    "deque": lambda value, convert: deque([convert(item) for item in value["items"]], value["maxlen"]),
    "bytes": lambda value, _: _decoded(value),
    "path": lambda value, _: pathlib.Path(_instance(value["value"], str)),
    "array": lambda value, _: _array(_dtype(value["dtype"]), value["shape"], _decoded(value)),
    "scalar": lambda value, _: _array(_dtype(value["dtype"]), [1], _decoded(value))[0],
    "dtype": lambda value, _: _dtype(value["value"]),
    "device": lambda value, _: th.device(_instance(value["value"], str)),
    "class": lambda value, _: CLASSES[value["path"]],
    "generator": lambda value, convert: _generator(convert(value["state"])),
    "object": lambda value, convert: _build(_instance(value["path"], str), convert(value["state"])),
}


# From pickles


_NUMPY_FUNCTIONS = ("multiarray._reconstruct", "multiarray.scalar", "numeric._frombuffer")
_GENERATOR = "numpy.random._pickle.__generator_ctor"
_BIT_GENERATOR = "numpy.random._pickle.__bit_generator_ctor"
# Of old spaces; theirs are not needed, and made anew
_OTHER_GENERATORS = ("numpy.random._pickle.__randomstate_ctor", "gym.utils.seeding.RandomNumberGenerator")
PICKLE_PATHS = frozenset(
    {
        *(*CLASSES, *_KINDS, *_OTHER_PATHS),
        *(f"numpy.{core}.{function}" for core in ("core", "_core") for function in _NUMPY_FUNCTIONS),
        *("numpy.ndarray", "numpy.dtype", "collections.deque", "collections.OrderedDict", "torch.device"),
        *(_GENERATOR, _BIT_GENERATOR, *_OTHER_GENERATORS),
        *("numpy.random._pcg64.PCG64", "numpy.random._mt19937.MT19937"),
        # What a generator was seeded with; not needed
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
        *("numpy.random.bit_generator.SeedSequence", "numpy.random._bit_generator.SeedSequence"),
    }
)


def from_pickle(value: Any, reader: "PickleReader | None" = None) -> Any:
    """
    :param value: what ``read_pickle`` gave, with ``PICKLE_PATHS`` allowed
    :param reader: the same for all values whose limits add up; None: for this one alone
    :return: the object
    :raises ValueError: it is not one that ``to_plain`` knows
    """
    return (reader or PickleReader()).convert(value, 0)


class PickleReader:
    """
    Makes objects of what pickles say, within limits.

    :param max_parts: of how many parts all objects together may be
    :param max_array_bytes: how large all arrays together may be
    """

    def __init__(self, max_parts: int = MAX_PARTS, max_array_bytes: int = MAX_ARRAY_BYTES) -> None:
        self._max_parts = max_parts
        self._max_array_bytes = max_array_bytes
        self._parts = 0
        self._array_bytes = 0

    def convert(self, value: Any, depth: int) -> Any:
        """
        :param value: part of a pickle
        :param depth: in how many others it lies
        :return: the object
        """
        self._parts += 1
        if depth > 2 * _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if self._parts > self._max_parts:
            raise ValueError(f"it is too large: more than {self._max_parts} parts")
        if isinstance(value, list | tuple):
            return type(value)(self.convert(entry, depth + 1) for entry in value)
        if isinstance(value, dict):
            return {key: self.convert(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, type):
            return CLASSES[getattr(value, "path", "")]
        if not isinstance(value, Pickled):
            return value
        try:
            return self._object(value, depth + 1)
        except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
            raise ValueError(f"it holds no {value.path} ({type(error).__name__}: {error})"[:250]) from None

    def _object(self, value: Pickled, depth: int) -> Any:
        path, args = value.path, value.args
        if path == "numpy.dtype":
            return self._pickled_dtype(value)
        if path.endswith("._frombuffer"):
            data, dtype, shape, order = args
            return self._array(self._pickled_dtype(dtype), shape, data, order)
        if path.endswith("._reconstruct"):
            _, shape, dtype, fortran_order, data = value.state
            return self._array(self._pickled_dtype(dtype), shape, data, "F" if fortran_order else "C")
        if path.endswith("multiarray.scalar"):
            return self._array(self._pickled_dtype(args[0]), (1,), args[1], "C")[0]
        if path == "collections.deque":
            return deque([self.convert(item, depth) for item in value.items], *args[1:])
        if path == "collections.OrderedDict":
            pairs = [(_instance(key, str | int), self.convert(item, depth)) for key, item in value.items]
            return OrderedDict(pairs)
        if path == "torch.device":
            return th.device(":".join(str(_instance(arg, str | int)) for arg in args))
        if path in _OTHER_GENERATORS:
            return None
        if path == _GENERATOR:
            state = args[0].state
            return _generator(self.convert(state[0] if isinstance(state, tuple) else state, depth))
        kind = _KINDS[_OTHER_PATHS.get(path, path)]
        state = dict(zip(kind.arguments, args, strict=True)) if kind.arguments else value.state
        # Gym's spaces of old had their attributes without the underscore
        state = {{"np_random": "_np_random"}.get(key, key): entry for key, entry in state.items()}
        names = {name for name in state if name in kind.attributes}
        return _build(path, {name: self.convert(state[name], depth) for name in names})

    @staticmethod
    def _pickled_dtype(value: Any) -> np.dtype:
        """
        :param value: a type of arrays' elements: its name without byte order, and the byte order in its state
        :return: the type
        """
        (name, *_), state = value.args, value.state
        dtype = _dtype(name)
        return dtype.newbyteorder(">") if state is not None and state[1] == ">" else dtype

    def _array(self, dtype: np.dtype, shape: Any, data: Any, order: Any) -> np.ndarray:
        data = _instance(data, bytes | bytearray)
        self._array_bytes += len(data)
        if self._array_bytes > self._max_array_bytes:
            raise ValueError(f"its arrays take more than {self._max_array_bytes} bytes")
        return _array(dtype, shape, data, order)
