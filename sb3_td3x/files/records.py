"""
Attributes of agents as records: data that JSON can hold, read without running code.

Numbers, strings, lists, and dictionaries with strings as keys stand for themselves. Everything else is a dictionary
with the key ``__type__``: ``{"__type__": "tuple", "items": [1, 2]}``.

A file can name a class, or hold an object of it, only if the class is registered. Its name in files never changes:

- Our classes are registered where they are defined, by ``@register_class`` or ``@register_object``, as ``sb3_td3x.``
  and the name of the class: ``sb3_td3x.FallPenalty``.
- Classes of SB3, PyTorch and Gymnasium are registered here, by the module path that SB3's own files name.
"""

import base64
import enum
import math
import pathlib
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import buffers, noise, torch_layers
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.utils import ConstantSchedule, LinearSchedule
from stable_baselines3.her.goal_selection_strategy import GoalSelectionStrategy
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer
from stable_baselines3.td3 import policies as sb3_policies
from torch import nn

_TYPE = "__type__"

Number = int | float | np.integer | np.floating

State = dict[str, Any]
AnyClass = TypeVar("AnyClass", bound=type)


class NotARecordError(TypeError):
    """Only a pickle can hold this object."""


# The registry


@dataclass(frozen=True)
class ObjectType:
    """
    How to take objects of a class apart and how to make them again.

    :param build: makes an object from those attributes that the file has; raises any exception if they do not fit.
        None: they are the arguments of the constructor, and all of them are numbers
    """

    cls: type
    attributes: tuple[str, ...]
    build: Callable[[State], Any] | None


# By their names in files
CLASSES: dict[str, type] = {}
OBJECTS: dict[str, ObjectType] = {}


def path_of(cls: type) -> str:
    """Return the module path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def name_in_files(cls: type) -> str:
    """Return the name of a class in files."""
    return f"sb3_td3x.{cls.__name__}" if cls.__module__.startswith("sb3_td3x.") else path_of(cls)


def register_class(cls: AnyClass) -> AnyClass:
    """Allow files to name a class. A decorator."""
    CLASSES[name_in_files(cls)] = cls
    return cls


def register_object(
    *attributes: str, build: Callable[[State], Any] | None = None, aliases: tuple[str, ...] = ()
) -> Callable[[AnyClass], AnyClass]:
    """
    Allow files to hold objects of a class. A decorator.

    :param build: makes an object from a dictionary of attributes, which come from a file and must be checked. None: the
        attributes are the arguments of the constructor, and all of them are numbers
    :param aliases: further names in files
    """

    def register(cls: AnyClass) -> AnyClass:
        for name in (name_in_files(cls), *aliases):
            OBJECTS[name] = ObjectType(cls, attributes, build)
        return cls

    return register


def is_registered_class(cls: type) -> bool:
    """Return whether files can name a class."""
    return CLASSES.get(name_in_files(cls)) is cls


def is_made_of_numbers(cls: type) -> bool:
    """Return whether files can hold objects of a class, and all arguments of its constructor are numbers."""
    entry = OBJECTS.get(name_in_files(cls))
    return entry is not None and entry.build is None


def build_object(name: str, state: Any) -> Any:
    """Make an object of a registered class."""
    if name not in OBJECTS:
        raise ValueError(f"{name[:120]!r} is not on the list of classes that are safe to make")
    entry = OBJECTS[name]
    try:
        if entry.build is not None:
            return entry.build(check_type(state, dict))
        return entry.cls(**{attribute: check_number(state[attribute]) for attribute in entry.attributes})
    except Exception as error:  # constructors raise any exception if their arguments are wrong
        raise ValueError(f"it holds no {name} ({type(error).__name__}: {error})"[:250]) from None


def check_type(value: Any, kind: Any) -> Any:
    """Return a value from a file if it has the expected type."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} is not allowed")
    return value


def check_number(value: Any) -> Any:
    """Return a value from a file if it is a number."""
    if isinstance(value, bool) or not isinstance(value, Number):
        raise TypeError(f"{type(value).__name__} is no number")
    return value


def _numbers(value: Any) -> Any:
    """Return a value from a file if it is a number, an array of numbers or a list of numbers."""
    if isinstance(value, list):
        return [check_number(entry) for entry in value]
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" else check_number(value)


# Classes of SB3, PyTorch, NumPy and Gymnasium

for _named in (
    *(sb3_policies.TD3Policy, sb3_policies.CnnPolicy, sb3_policies.MultiInputPolicy),
    *(torch_layers.FlattenExtractor, torch_layers.NatureCNN, torch_layers.CombinedExtractor),
    *(buffers.ReplayBuffer, buffers.DictReplayBuffer, buffers.NStepReplayBuffer, HerReplayBuffer),
    *(nn.ReLU, nn.Tanh, nn.ELU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.SiLU, nn.CELU, nn.Hardtanh, nn.SELU, nn.Sigmoid),
    *(nn.Identity, nn.Softplus, nn.Softsign, nn.PReLU, nn.ReLU6, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink),
    *(th.optim.Adadelta, th.optim.Adagrad, th.optim.Adam, th.optim.Adamax, th.optim.AdamW, th.optim.NAdam),
    *(th.optim.Adafactor, th.optim.ASGD, th.optim.Rprop),
    *(th.optim.RAdam, th.optim.RMSprop, th.optim.SGD, RMSpropTFLike),
    *(np.float16, np.float32, np.float64, np.uint8, np.int8, np.int16, np.int32, np.int64, np.bool_, float, int),
):
    register_class(_named)


def _with_generator(space: spaces.Space, state: State) -> spaces.Space:
    """Give a space the random generator that it had."""
    space._np_random = check_type(state.get("_np_random"), np.random.Generator | None)
    return space


def _box(state: State) -> spaces.Space:
    low, high = (check_type(_numbers(state[name]), np.ndarray) for name in ("low", "high"))
    space = spaces.Box(low, high, dtype=np.dtype(state["dtype"]).type)
    for name in ("bounded_below", "bounded_above"):
        # Integers cannot express an infinite bound
        bounded = check_type(state.get(name, getattr(space, name)), np.ndarray)
        if bounded.shape != low.shape or bounded.dtype != bool:
            raise ValueError(f"{name} does not fit")
        setattr(space, name, bounded)
    for name in ("low_repr", "high_repr"):
        if hasattr(space, name) and name in state:
            setattr(space, name, check_type(state[name], str | None))
    return _with_generator(space, state)


def _discrete(state: State) -> spaces.Space:
    dtype = np.dtype(state.get("dtype", np.int64))
    # Some versions of Gymnasium lack this argument
    kwargs: Any = {} if dtype == np.int64 else {"dtype": dtype}
    return _with_generator(spaces.Discrete(int(state["n"]), start=int(state.get("start", 0)), **kwargs), state)


def _multi_discrete(state: State) -> spaces.Space:
    kwargs = {"start": state["start"]} if "start" in state else {}
    return _with_generator(spaces.MultiDiscrete(state["nvec"], dtype=np.dtype(state["dtype"]).type, **kwargs), state)


def _dict_space(state: State) -> spaces.Space:
    entries = {check_type(key, str): check_type(entry, spaces.Space) for key, entry in state["spaces"].items()}
    space = spaces.Dict(entries)
    # Gymnasium may sort the keys; the networks' inputs have the order in the file
    space.spaces = entries
    if hasattr(space, "sort_keys") and "sort_keys" in state:
        space.sort_keys = check_type(state["sort_keys"], bool)
    return _with_generator(space, state)


def _normal_noise(state: State) -> noise.ActionNoise:
    dtype = np.dtype(state.get("_dtype", np.float32)).type
    return noise.NormalActionNoise(_numbers(state["_mu"]), _numbers(state["_sigma"]), dtype)


def _ou_noise(state: State) -> noise.ActionNoise:
    initial_noise = state["initial_noise"]
    made = noise.OrnsteinUhlenbeckActionNoise(
        _numbers(state["_mu"]),
        _numbers(state["_sigma"]),
        check_number(state["_theta"]),
        check_number(state["_dt"]),
        None if initial_noise is None else _numbers(initial_noise),
        np.dtype(state.get("_dtype", np.float32)).type,
    )
    made.noise_prev = _numbers(state["noise_prev"])
    np.broadcast_shapes(*map(np.shape, (made.noise_prev, made._mu, made._sigma)))
    return made


def _vectorized_noise(state: State) -> noise.ActionNoise:
    base_noise = check_type(state["_base_noise"], noise.NormalActionNoise | noise.OrnsteinUhlenbeckActionNoise)
    noises = [check_type(each, type(base_noise)) for each in check_type(state["_noises"], list)]
    if not noises or len(noises) != state["n_envs"]:
        raise ValueError("n_envs does not fit")
    made = noise.VectorizedActionNoise(base_noise, 1)
    # The setters would start new noise processes
    made.n_envs, made._noises = len(noises), noises
    return made


def _running_mean_std(state: State) -> RunningMeanStd:
    made = RunningMeanStd()
    made.mean, made.var = (np.asarray(_numbers(state[name]), dtype=np.float64) for name in ("mean", "var"))
    made.count = check_number(state["count"])
    if made.mean.shape != made.var.shape:
        raise ValueError("mean and var do not fit")
    return made


def _train_freq(state: State) -> TrainFreq:
    return TrainFreq(check_type(state["frequency"], int), check_type(state["unit"], TrainFrequencyUnit))


_SPACE = ("_shape", "dtype", "_np_random")
_BOX = ("low", "high", "bounded_below", "bounded_above", "low_repr", "high_repr")
_NOISE = ("_mu", "_sigma", "_dtype")
_OBJECTS: tuple[tuple[type, tuple[str, ...], Callable[[State], Any] | None], ...] = (
    (spaces.Box, (*_SPACE, *_BOX), _box),
    (spaces.Discrete, (*_SPACE, "n", "start"), _discrete),
    (spaces.MultiDiscrete, (*_SPACE, "nvec", "start"), _multi_discrete),
    (spaces.MultiBinary, (*_SPACE, "n"), lambda state: _with_generator(spaces.MultiBinary(state["n"]), state)),
    (spaces.Dict, (*_SPACE, "spaces", "sort_keys"), _dict_space),
    (noise.NormalActionNoise, _NOISE, _normal_noise),
    (noise.OrnsteinUhlenbeckActionNoise, (*_NOISE, "_theta", "_dt", "initial_noise", "noise_prev"), _ou_noise),
    (noise.VectorizedActionNoise, ("n_envs", "_base_noise", "_noises"), _vectorized_noise),
    (ConstantSchedule, ("val",), None),
    (LinearSchedule, ("start", "end", "end_fraction"), None),
    (RunningMeanStd, ("mean", "var", "count"), _running_mean_std),
    (TrainFreq, ("frequency", "unit"), _train_freq),
    (TrainFrequencyUnit, ("value",), lambda state: TrainFrequencyUnit(state["value"])),
    (GoalSelectionStrategy, ("value",), lambda state: GoalSelectionStrategy(state["value"])),
)
for _cls, _attributes, _build in _OBJECTS:
    # Agents of SB3 before version 2 have spaces of Gym
    _gym_path = path_of(_cls).replace("gymnasium.", "gym.", 1)
    register_object(*_attributes, build=_build, aliases=(_gym_path,))(_cls)


# Objects to records


def to_record(value: Any) -> Any:
    """
    Convert a value to data that ``json.dumps`` accepts.

    :raises NotARecordError: the value holds something that only a pickle can hold
    :raises RecursionError: the value is nested too deeply, or holds itself
    """

    def typed(kind: str, **entries: Any) -> State:
        return {_TYPE: kind, **entries}

    cls = type(value)
    if value is None or cls in (bool, int, str):
        return value
    if cls is float:
        return value if math.isfinite(value) else typed("float", value=repr(value))
    if cls is list:
        return [to_record(entry) for entry in value]
    if cls is dict and _TYPE not in value and all(type(key) is str for key in value):
        return {key: to_record(entry) for key, entry in value.items()}
    if cls is OrderedDict:
        return typed("OrderedDict", entries=to_record(dict(value)))
    if cls is tuple:
        return typed("tuple", items=[to_record(entry) for entry in value])
    if cls is deque:
        return typed("deque", items=[to_record(entry) for entry in value], maxlen=value.maxlen)
    if isinstance(value, pathlib.Path):
        return typed("path", value=str(value))
    if cls is np.ndarray and value.dtype.kind in "biufc":
        return typed("array", dtype=value.dtype.str, shape=list(value.shape), data=_base64(value.tobytes()))
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return typed("scalar", dtype=value.dtype.str, data=_base64(value.tobytes()))
    if isinstance(value, np.dtype) and value.kind in "biufc":
        return typed("dtype", value=value.str)
    if isinstance(value, type) and is_registered_class(value):
        return typed("class", name=name_in_files(value))
    if cls is np.random.Generator and type(value.bit_generator) is np.random.PCG64:
        return typed("generator", state=to_record(value.bit_generator.state))
    # The zoo's schedule has the name of ours as an alias
    entry = OBJECTS.get(name_in_files(cls))
    if entry is not None and (isinstance(value, enum.Enum) or {*getattr(value, "__dict__", ())} <= {*entry.attributes}):
        state = {name: to_record(getattr(value, name)) for name in entry.attributes if hasattr(value, name)}
        return typed("object", name=name_in_files(entry.cls), attributes=state)
    raise NotARecordError(f"class {path_of(value)}" if isinstance(value, type) else f"{value!r:.100} of {path_of(cls)}")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Records to objects


def from_record(record: Any) -> Any:
    """Convert a record, maybe from a stranger's file, back to the value that ``to_record`` was given."""
    if isinstance(record, list):
        return [from_record(entry) for entry in record]
    if not isinstance(record, dict):
        return record
    if _TYPE not in record:
        return {key: from_record(entry) for key, entry in record.items()}
    kind = record[_TYPE]
    try:
        return _READERS[kind](record)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"it holds no {kind!r:.40} ({type(error).__name__}: {error})"[:250]) from None


def make_dtype(name: Any) -> np.dtype:
    """Return a type of numbers by its name in NumPy, such as ``<f4``."""
    if not re.fullmatch("[<>|=]?[biufc][0-9]{1,2}", check_type(name, str)):
        raise ValueError(f"it holds the type {name!r:.40}, which is not a type of numbers")
    dtype: np.dtype = np.dtype(name)
    return dtype


def make_array(dtype: np.dtype, shape: Any, data: bytes | bytearray, order: Any = "C") -> np.ndarray:
    """
    Return an array that can be written to.

    :param data: the elements; a ``bytearray`` becomes the memory of the array
    """
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("it holds an array that is not allowed")
    flat: np.ndarray = np.frombuffer(data, dtype) if data else np.empty(0, dtype)
    array = flat.reshape(tuple(shape), order=order)
    return array if array.flags.writeable else array.copy(order="K")


def make_generator(state: Any) -> np.random.Generator:
    """Return a random generator of the type that Gymnasium uses, from its state."""
    # Others have positions in arrays, which NumPy does not check
    bit_generator = np.random.PCG64(0)
    bit_generator.state = check_type(state, dict)
    return np.random.Generator(bit_generator)


def _decoded(record: State) -> bytes:
    return base64.b64decode(check_type(record["data"], str), validate=True)


_READERS: dict[str, Callable[[State], Any]] = {
    "float": lambda record: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[record["value"]],
    "OrderedDict": lambda record: OrderedDict(from_record(check_type(record["entries"], dict))),
    "tuple": lambda record: tuple(from_record(item) for item in record["items"]),
    "deque": lambda record: deque([from_record(item) for item in record["items"]], record["maxlen"]),
    "path": lambda record: pathlib.Path(check_type(record["value"], str)),
    "array": lambda record: make_array(make_dtype(record["dtype"]), record["shape"], _decoded(record)),
    "scalar": lambda record: make_array(make_dtype(record["dtype"]), [1], _decoded(record))[0],
    "dtype": lambda record: make_dtype(record["value"]),
    "class": lambda record: CLASSES[record["name"]],
    "generator": lambda record: make_generator(from_record(record["state"])),
    "object": lambda record: build_object(check_type(record["name"], str), from_record(record["attributes"])),
}
