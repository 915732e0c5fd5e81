"""
Saved agents: writing them, and reading them, those of SB3's TD3 and DDPG too, without running what is in them.

The file is a zip file in SB3's layout. ``data`` holds the attributes as JSON, see ``plain``; what only a pickle can
hold lies apart, in ``pickled.NAME.pkl``, and is read where the file is trusted.
"""

import base64
import functools
import inspect
import io
import itertools
import json
import re
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import stable_baselines3
import torch as th
from gymnasium import spaces
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.utils import get_device, get_system_info

from sb3_td3x._version import __version__
from sb3_td3x.files.atomic import FileRefused, SavePath, name_of, refusing
from sb3_td3x.files.pickles import named_in_pickle, read_pickle
from sb3_td3x.files.records import (
    CLASSES,
    MAX_VALUES,
    PICKLE_PATHS,
    JsonReader,
    NotPlainError,
    PickleReader,
    from_pickle,
    from_plain,
    path_of,
    to_plain,
)
from sb3_td3x.files.sealed_zip import CheckedZip, open_checked_zip, write_sealed_zip
from sb3_td3x.files.tensors import TensorInfo, describe_state, load_state

# What tells a zip of the TD3 family from one of another algorithm
_HYPERPARAMETERS = ("policy_delay", "target_policy_noise", "target_noise_clip")
STATE_DICTS = ("policy", "actor.optimizer", "critic.optimizer")
VARIABLES = "pytorch_variables"
# Of old versions of SB3
_OLD_VARIABLES = "tensors"

# In SB3's files where it was asked for
_REPLAY_BUFFER = "replay_buffer"

# Made of other attributes or given, also where SB3 has pickled them
REBUILT = frozenset(
    {
        *("policy", "actor", "actor_target", "critic", "critic_target", "_networks", "_params", "_running_stats"),
        *("device", "env", "_vec_normalize_env", "_logger", "_custom_logger", "_replay_buffer", _REPLAY_BUFFER),
        *("lr_schedule", "qf_lr_schedule", "_shaping", "_shaping_source", "_untrusted_reward_shaping", "_resumed"),
        *("actor_batch_norm_stats", "actor_batch_norm_stats_target"),
        *("critic_batch_norm_stats", "critic_batch_norm_stats_target"),
    }
)

_PICKLED = ":pickled:"
_SB3_PICKLED = ":serialized:"

States = dict[str, dict[str, Any]]

# Limits
MAX_DATA_SIZE = 64 * 2**20
_MAX_TEXT_SIZE = 2**20
_MAX_UNITS = 2**20
_MAX_LAYERS = 100
_MAX_CRITICS = 1000


# Writing


def write_agent(path: SavePath, attributes: Mapping[str, Any], params: States, variables: dict[str, Any]) -> None:
    """
    Write an agent, as a whole or not at all.

    :param path: path to the file, with or without ``.zip``, or a file-like object
    :param attributes: attributes of the algorithm
    :param params: its state dictionaries
    :param variables: other tensors
    :raises OSError: it cannot be written; what was there before is untouched
    """
    data, pickles = {}, {}
    for name, value in attributes.items():
        try:
            data[name] = to_plain(value)
            # What an object was turned into since it was made may be nothing that it can be made of
            from_plain(data[name])
        except (NotPlainError, ValueError) as error:
            pickles[name] = cloudpickle.dumps(value)
            data[name] = {_PICKLED: str(error)}
    text = json.dumps(data, indent=2, allow_nan=False).encode()
    if len(text) > MAX_DATA_SIZE or JsonReader.count(text) > MAX_VALUES:
        warnings.warn(
            f"{name_of(path)} will load with trusted=True only: its attributes are large, {len(text)} bytes",
            stacklevel=3,
        )
    with write_sealed_zip(path, "zip", __version__) as archive:
        archive.writestr("data", text)
        for name, pickle in pickles.items():
            archive.writestr(_pickle_member(name), pickle)
        for name, state in {VARIABLES: variables, **params}.items():
            with archive.open(f"{name}.pth", "w", force_zip64=True) as file:
                th.save(state, file)
        archive.writestr("_stable_baselines3_version", stable_baselines3.__version__)
        archive.writestr("system_info.txt", get_system_info(print_info=False)[1])


def attributes_to_save(model: Any, exclude: Iterable[str] | None, include: Iterable[str] | None) -> dict[str, Any]:
    """
    :param model: the agent
    :param exclude: names of attributes to leave out besides those that are by default
    :param include: names of attributes to save that are not by default
    :return: the attributes that SB3's ``save`` would save, without methods
    """
    included = {*(include or ())}
    if _REPLAY_BUFFER in included:
        raise ValueError(f"include={include!r} is not allowed, expected no {_REPLAY_BUFFER}: use save_replay_buffer")
    state_dicts, variables = model._get_torch_save_params()
    excluded = ({*(exclude or ())} | {*model._excluded_save_params()}) - included
    excluded |= {name.split(".")[0] for name in (*state_dicts, *variables)}
    return {
        name: value
        for name, value in vars(model).items()
        # A method that was replaced in this object is no part of the agent
        if name not in excluded and not _is_method(type(model), name)
    }


def variables_to_save(model: Any) -> dict[str, Any]:
    """
    :param model: the agent
    :return: tensors outside of its state dictionaries, none in TD3X itself
    """
    return {name: recursive_getattr(model, name) for name in model._get_torch_save_params()[1]}


def _pickle_member(name: str) -> str:
    return f"pickled.{name}.pkl"


# Reading


@dataclass
class AgentFile:
    """
    What is in an agent's file, as far as it can be known without running any of it.

    :param name: how to name it in an error
    :param data: its attributes as they are written
    :param states: content of the state dictionaries and other tensors, by name
    :param pickles: those attributes that are pickled
    :param texts: version of SB3, and of the system
    :param sizes: of all members, in bytes
    :param is_sealed: whether it has a checksum, which is right then
    """

    name: str
    data: dict[str, Any]
    states: dict[str, bytes]
    pickles: dict[str, bytes] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    is_sealed: bool = False

    def describe(self) -> dict[str, Any]:
        """
        :return: the state dictionaries, with a ``TensorInfo`` for each tensor
        :raises FileRefused: one is damaged, or holds anything but tensors and plain data
        """
        states = {name: describe_state(content, f"{name}.pth in {self.name}") for name, content in self.states.items()}
        for name in (VARIABLES, _OLD_VARIABLES):
            variables = states.get(name) or {}
            entries = variables.values() if isinstance(variables, dict) else [variables]
            if not all(isinstance(entry, TensorInfo | None) for entry in entries):
                raise FileRefused(f"{name}.pth in {self.name} holds something else than tensors")
        return states

    def load_states(self, device: th.device | str, described: Mapping[str, Any]) -> States:
        """
        :param device: Device on which the tensors should be
        :param described: what ``describe`` returned
        :return: the state dictionaries, and as ``pytorch_variables`` other tensors
        """
        return {
            name: load_state(self.states[name], get_device(device), f"{name}.pth in {self.name}", description)
            for name, description in described.items()
            if name != _OLD_VARIABLES
        }


def open_agent(path: SavePath, trusted: bool = False) -> AgentFile:
    """
    :param path: path to the file, with or without ``.zip``, or a file-like object
    :param trusted: whether its attributes may be as large as they are
    :return: what is in it
    :raises FileRefused: the file is damaged, or holds another algorithm's agent
    :raises OSError: it is not there or cannot be read
    """
    with open_checked_zip(path, "zip") as archive:
        name = archive.name
        with refusing(name):
            data = _read_data(archive, trusted)
            absent = [f"{state}.pth" for state in STATE_DICTS if f"{state}.pth" not in archive.members]
            if absent:
                raise FileRefused(f"{name} is no whole agent, it lacks {', '.join(absent)}")
            pickles = {key: _read_pickled(archive, key, it, trusted) for key, it in data.items() if is_pickled(it)}
            texts = [it for it in ("_stable_baselines3_version", "system_info.txt") if it in archive.members]
            return AgentFile(
                name,
                data,
                {it.removesuffix(".pth"): archive.read(it) for it in archive.members if it.endswith(".pth")},
                pickles,
                {it: archive.read(it, _MAX_TEXT_SIZE).decode() for it in texts},
                {it: info.file_size for it, info in archive.members.items()},
                archive.is_sealed,
            )


def _read_data(archive: CheckedZip, trusted: bool) -> dict[str, Any]:
    """
    :param archive: the file
    :param trusted: whether it may be as large as it is
    :return: its attributes as they are written
    """
    name = archive.name
    try:
        text = archive.read("data", None if trusted else MAX_DATA_SIZE) if "data" in archive.members else b"{}"
        data = (JsonReader(name, len(text)) if trusted else JsonReader(name)).read(text)
    except FileRefused as error:
        raise FileRefused(f"{error}; TD3X.load takes it with trusted=True if you trust its author") from None
    if not isinstance(data, dict) or "policy_class" not in data:
        raise FileRefused(f"{name} is a zip file but no agent saved by Stable-Baselines3")
    absent = [key for key in _HYPERPARAMETERS if key not in data]
    if absent:
        policy_class = data["policy_class"]
        module = policy_class.get("__module__", "unknown") if isinstance(policy_class, dict) else policy_class
        raise FileRefused(
            f"{name} was saved by another algorithm (policy from {str(module)[:80]}, without {', '.join(absent)}): "
            "TD3X loads agents of TD3X, TD3 and DDPG"
        )
    return data


def is_pickled(value: Any) -> bool:
    """
    :param value: what is written for an attribute
    :return: whether the attribute itself is in a pickle
    """
    return isinstance(value, dict) and (_PICKLED in value or _SB3_PICKLED in value)


def _read_pickled(archive: CheckedZip, name: str, value: dict[str, Any], trusted: bool) -> bytes:
    """
    :param archive: the file
    :param name: name of an attribute
    :param value: what is written for it
    :param trusted: whether it may be as large as it is
    :return: the pickle
    """
    if _SB3_PICKLED in value:
        return base64.b64decode(value[_SB3_PICKLED], validate=True)
    return archive.read(_pickle_member(name), None if trusted else MAX_DATA_SIZE)


def read_agent(
    path: SavePath,
    cls: type,
    device: th.device | str = "auto",
    custom_objects: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    trusted: bool = False,
    print_system_info: bool = False,
) -> tuple[dict[str, Any], States]:
    """
    Read an agent saved by ``TD3X``, or by SB3's ``TD3`` or ``DDPG``.

    :param path: path to the file, with or without ``.zip``, or a file-like object
    :param cls: the algorithm's class; no attribute may take the place of a method
    :param device: Device on which the tensors should be
    :param custom_objects: objects to take instead of those in the file, by name
    :param given: what the attributes will be set to; of these no pickle is needed
    :param trusted: whether to run the pickles in it, which can do anything that the user can
    :param print_system_info: Whether to print the system info that was saved with the agent
    :return: the attributes of the algorithm, and its state dictionaries with other tensors as ``pytorch_variables``
    :raises ValueError: the file is damaged, holds another algorithm's agent, or needs to be trusted
    :raises OSError: it is not there or cannot be read
    """
    if custom_objects is not None and not isinstance(custom_objects, Mapping):
        raise ValueError(f"custom_objects={custom_objects!r} is not allowed, expected a dictionary or None")
    agent = open_agent(path, trusted)
    if print_system_info:
        print("== SAVED MODEL SYSTEM INFO ==")
        print(agent.texts.get("system_info.txt", "unknown"))
    replaced = {name: value for name, value in (custom_objects or {}).items() if name in agent.data}
    with refusing(agent.name):
        for name in agent.data.keys() - ({_REPLAY_BUFFER} & agent.pickles.keys()):
            check_name(name, cls, agent.name)
        replaced.update((name, value) for name, value in (given or {}).items() if name in agent.pickles)
        attributes = _with_integers({**read_attributes(agent, replaced, trusted), **replaced})
        check_attributes(attributes, agent.name)
        described = agent.describe()
        _check_networks(attributes, described, agent.name)
    return attributes, agent.load_states(device, described)


def read_parameters(path: SavePath, expected: States, device: th.device | str) -> States:
    """
    :param path: path to the file, with or without ``.zip``, or a file-like object
    :param expected: state dictionaries of the agent that they are for
    :param device: Device on which the tensors should be
    :return: the state dictionaries in the file
    :raises ValueError: the file is damaged, holds another algorithm's agent or one of other networks
    """
    agent = open_agent(path)
    with refusing(agent.name):
        states = agent.describe()
        for name in expected.keys() & states.keys():
            if name.endswith("optimizer"):
                shapes = [tuple(value.shape) for key, value in expected["policy"].items()]
                _check_optimizer(states[name], None, shapes, f"{name}.pth in {agent.name}")
            else:
                infos = {key: TensorInfo(tuple(it.shape), it.dtype) for key, it in expected[name].items()}
                _check_state(states[name], infos, f"{name}.pth in {agent.name}")
    return agent.load_states(device, {name: it for name, it in states.items() if name != VARIABLES})


def read_attributes(agent: AgentFile, unneeded: Collection[str], trusted: bool) -> dict[str, Any]:
    """
    :param agent: the file
    :param unneeded: names of attributes to leave out
    :param trusted: whether to run its pickles
    :return: its attributes
    :raises FileRefused: one of them needs the file to be trusted, or is damaged
    """
    attributes, refused = {}, []
    # Limits are those of all pickles together
    reader, numbers = PickleReader(), itertools.count()
    for name, value in agent.data.items():
        if name in unneeded or name in REBUILT:
            continue
        if trusted and name in agent.pickles:
            attributes[name] = _unpickle(agent.pickles[name], name, agent.name)
            continue
        try:
            if name not in agent.pickles:
                attributes[name] = from_plain(value)
            elif _SB3_PICKLED in value:
                with refusing("it"):
                    pickled = read_pickle(io.BytesIO(agent.pickles[name]), "it", PICKLE_PATHS, numbers=numbers)
                    attributes[name] = from_pickle(pickled, reader)
            else:
                refused.append(f"{name} ({value[_PICKLED]!s:.100})")
        except FileRefused as error:
            refused.append(f"{name} ({str(error).removeprefix('it ')})")
        except ValueError as error:
            raise FileRefused(f"{agent.name} has a bad {name[:40]}: {error}") from None
    if refused:
        raise FileRefused(
            f"{agent.name} has pickled attributes, and pickles can run code: {'; '.join(refused)[:600]}. "
            "Give what is yours by custom_objects={name: object}, or load with trusted=True if you trust its author"
        )
    return attributes


def _unpickle(pickle: bytes, name: str, file: str) -> Any:
    """
    :param pickle: a pickle of a file that is trusted
    :param name: name of the attribute
    :param file: how to name the file in an error
    :return: what is in it
    """
    try:
        return cloudpickle.loads(pickle)
    except Exception as error:  # of the user's own modules
        raise FileRefused(
            f"{file} has the attribute {name}, which cannot be unpickled ({type(error).__name__}: {error!s:.200}): "
            "give it by custom_objects"
        ) from None


# Checks of what was read


def check_name(name: str, cls: type, file: str) -> None:
    """
    :param name: name of an attribute
    :param cls: the algorithm's class
    :param file: how to name the file in an error
    """
    if not re.fullmatch(r"[^\W\d]\w{0,99}", name) or name.startswith("__") or _is_method(cls, name):
        raise FileRefused(f"{file} has an attribute {name[:40]!r}, which no agent has")


def _is_method(cls: type, name: str) -> bool:
    """
    :param cls: the algorithm's class
    :param name: name of an attribute
    :return: whether it has a method or property of this name
    """
    own = inspect.getattr_static(cls, name, None)
    return isinstance(own, property | classmethod | staticmethod | types.FunctionType)


_Kinds = type | types.UnionType
_NUMBER = int | float | np.integer | np.floating
_COUNTERS = (
    "n_envs",
    "num_timesteps",
    "_total_timesteps",
    "_num_timesteps_at_start",
    "_n_updates",
    "_episode_num",
    "_exploration_timesteps",
    "_rollout_timesteps",
    "_stats_window_size",
)
_ATTRIBUTES: dict[str, _Kinds] = {
    "policy_class": type,
    "policy_kwargs": dict,
    "observation_space": spaces.Space,
    "action_space": spaces.Box,
    "verbose": bool | _NUMBER,
    **dict.fromkeys(_COUNTERS, int),
    # SB3 goes to any number
    "_total_timesteps": _NUMBER,
    "_current_progress_remaining": _NUMBER,
    "action_noise": ActionNoise | None,
    "replay_buffer_kwargs": dict,
    "ep_info_buffer": deque | None,
    "ep_success_buffer": deque | None,
    "_last_obs": np.ndarray | dict | tuple | None,
    "_last_original_obs": np.ndarray | dict | tuple | None,
    "_last_episode_starts": np.ndarray | None,
    "tensorboard_log": str | Path | None,
    "start_time": _NUMBER,
}
_NEEDED = ("policy_class", "policy_kwargs", "observation_space", "action_space", "n_envs", "verbose")


def _with_integers(attributes: dict[str, Any]) -> dict[str, Any]:
    """
    :param attributes: attributes of an agent
    :return: the same with integers as counters, for which SB3 takes 1e6 and NumPy's numbers as well
    """
    counters = {name: attributes[name] for name in _COUNTERS if name in attributes}
    integers = {
        name: int(value)
        for name, value in counters.items()
        if isinstance(value, np.integer) or (isinstance(value, float | np.floating) and float(value).is_integer())
    }
    return {**attributes, **integers}


def check_attributes(attributes: Mapping[str, Any], file: str) -> None:
    """
    :param attributes: attributes of an agent; arguments are checked by the agent itself
    :param file: how to name the file in an error
    :raises FileRefused: one is of another type than it should be
    """
    for name in _NEEDED:
        if name not in attributes:
            raise FileRefused(f"{file} is no whole agent, it lacks {name}")
    for name, kinds in _ATTRIBUTES.items():
        value = attributes.get(name)
        is_allowed = isinstance(value, kinds) and (name == "verbose" or not isinstance(value, bool))
        if name in attributes and not is_allowed:
            raise FileRefused(f"{file} has a bad {name}: {type(value).__name__}")
    policy_class = attributes.get("policy_class", BasePolicy)
    if not issubclass(policy_class, BasePolicy):
        raise FileRefused(f"{file} has a bad policy_class: {path_of(policy_class)}")
    for name in ("policy_kwargs", "replay_buffer_kwargs"):
        if not all(isinstance(key, str) for key in attributes.get(name, {})):
            raise FileRefused(f"{file} has a bad {name}: its keys are no names")
    if not 1 <= attributes.get("n_envs", 1) <= _MAX_UNITS:
        raise FileRefused(f"{file} has a bad n_envs: {attributes['n_envs']}")


def _check_networks(attributes: Mapping[str, Any], states: dict[str, Any], file: str) -> None:
    """
    Compare the tensors in a file with those of the policy that it describes, before memory is taken for either.

    :param attributes: attributes of an agent
    :param states: its state dictionaries, with a ``TensorInfo`` for each tensor
    :param file: how to name the file in an error
    :raises FileRefused: they do not belong together
    """
    policy_class: type = attributes["policy_class"]
    policy_kwargs = attributes.get("policy_kwargs", {})
    if _is_own([policy_class, policy_kwargs]):
        # The user has given it or trusts the file; it may not know PyTorch's meta device, nor these limits
        return
    _check_numbers(policy_kwargs, f"policy_kwargs in {file}")
    _check_number_of_layers(policy_kwargs, states["policy"], file)
    _check_number_of_images(attributes["observation_space"], file)
    own_class: Any = type("Meta", (policy_class,), {"device": th.device("meta")})
    kwargs = {
        **{name: value for name, value in policy_kwargs.items() if name != "device"},
        # Of the optimizers only the parameters are compared, and those of SB3's layout
        "optimizer_class": th.optim.ASGD,
        "optimizer_kwargs": {},
    }
    optimizer_class = policy_kwargs.get("optimizer_class", th.optim.Adam)
    # Copies: some policies draw an observation. The weights are none and draw nothing.
    observation_space = deepcopy(attributes["observation_space"])
    try:
        with th.device("meta"):
            policy = own_class(observation_space, attributes["action_space"], lambda _: 0.0, **kwargs)
        optimizer_class([th.nn.Parameter(th.zeros(1))], **{"lr": 0.0, **(policy_kwargs.get("optimizer_kwargs") or {})})
    except Exception as error:  # whatever wrong arguments of wrong types make of PyTorch
        raise FileRefused(f"{file} describes a policy that cannot be made: {error!s:.200}") from None
    infos = {name: TensorInfo(tuple(it.shape), it.dtype) for name, it in policy.state_dict().items()}
    _check_state(states["policy"], infos, f"policy.pth in {file}")
    for name, network in (("actor.optimizer", policy.actor), ("critic.optimizer", policy.critic)):
        shapes = [tuple(it.shape) for it in network.parameters()]
        # Adafactor keeps sums of rows and columns
        own_shapes = None if optimizer_class is th.optim.Adafactor else shapes
        _check_optimizer(states[name], own_shapes, shapes, f"{name}.pth in {file}")


def _is_own(value: Any) -> bool:
    """
    :param value: arguments of a policy, or a part of them
    :return: whether a class or function in it is the user's own: no file that is not trusted can name one
    """
    if isinstance(value, dict | list | tuple):
        return any(map(_is_own, value.values() if isinstance(value, dict) else value))
    if isinstance(value, type):
        return CLASSES.get(path_of(value)) is not value
    return isinstance(value, types.FunctionType | functools.partial)


def _check_numbers(value: Any, where: str) -> None:
    """
    :param value: arguments of a policy, or a part of them
    :param where: how to name them in an error
    :raises FileRefused: networks of such sizes are not made
    """
    if isinstance(value, dict):
        n_critics = value.get("n_critics", 1)
        if not isinstance(n_critics, _NUMBER) or n_critics > _MAX_CRITICS:
            raise FileRefused(f"{where} has n_critics={n_critics!s:.40}, expected at most {_MAX_CRITICS}")
        for entry in value.values():
            _check_numbers(entry, where)
    elif isinstance(value, list | tuple):
        if len(value) > _MAX_LAYERS:
            raise FileRefused(f"{where} has a list of {len(value)}, expected at most {_MAX_LAYERS} layers")
        for entry in value:
            _check_numbers(entry, where)
    elif isinstance(value, _NUMBER) and value > _MAX_UNITS:
        raise FileRefused(f"{where} has the number {value!s:.40}, expected at most {_MAX_UNITS} units")


def _check_number_of_layers(policy_kwargs: Mapping[str, Any], state: Any, file: str) -> None:
    """
    :param policy_kwargs: arguments of a policy, whose numbers were checked
    :param state: its state dictionary
    :param file: how to name the file in an error
    :raises FileRefused: its critics would have more layers than the file has tensors for; making them takes long
    """
    net_arch = policy_kwargs.get("net_arch")
    critic_arch = net_arch.get("qf") if isinstance(net_arch, dict) else net_arch
    n_hidden = len(critic_arch) if isinstance(critic_arch, list | tuple) else 0
    n_layers = policy_kwargs.get("n_critics", 1) * (n_hidden + 1)
    n_tensors = len(state) if isinstance(state, dict) else 0
    # Each has a weight and a bias, once more in the target network
    if 4 * n_layers > n_tensors:
        raise FileRefused(
            f"policy.pth in {file} was saved with other policy_kwargs: {n_tensors} tensors are too few for {n_layers} "
            "layers of critics"
        )


def _check_number_of_images(space: spaces.Space, file: str) -> None:
    """
    :param space: the observation space
    :param file: how to name the file in an error
    :raises FileRefused: a network for each of its images would take long to make
    """
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else ()
    n_images = sum(len(part.shape or ()) == 3 for part in parts)
    if n_images > _MAX_LAYERS:
        raise FileRefused(f"{file} has an observation_space of {n_images} images, expected at most {_MAX_LAYERS}")


def _check_state(state: Any, expected: dict[str, TensorInfo], where: str) -> None:
    """
    :param state: a policy's state dictionary
    :param expected: what it should be
    :param where: how to name it in an error
    :raises FileRefused: it has other tensors
    """
    if not isinstance(state, dict) or state.keys() != expected.keys():
        keys = sorted(map(str, {*state} ^ {*expected})) if isinstance(state, dict) else [type(state).__name__]
        raise FileRefused(
            f"{where} was saved with other policy_kwargs or is not what it should be, it differs in {keys[0][:80]}"
        )
    for key, info in state.items():
        if not isinstance(info, TensorInfo):
            raise FileRefused(f"{where} holds no tensor as {key}")
        if info.shape != expected[key].shape or info.dtype.is_floating_point != expected[key].dtype.is_floating_point:
            raise FileRefused(
                f"{where} was saved with other policy_kwargs: {key} is {info.dtype} of shape {info.shape}, "
                f"expected {expected[key].dtype} of shape {expected[key].shape}"
            )


def _check_optimizer(
    state: Any, shapes: list[tuple[int, ...]] | None, known: list[tuple[int, ...]], where: str
) -> None:
    """
    :param state: an optimizer's state dictionary
    :param shapes: of the parameters, which are those of its tensors; None: they may be any of those known
    :param known: shapes of all parameters
    :param where: how to name it in an error
    :raises FileRefused: it has other tensors
    """
    with refusing(where):
        (group,) = state["param_groups"]
        indices = group["params"]
        if indices != list(range(len(indices))) or (shapes is not None and len(indices) != len(shapes)):
            raise FileRefused(f"{where} holds {len(indices)} parameters: it was saved with other policy_kwargs")
        known_indices = set(indices)
        largest = max(np.prod(shape, dtype=object) for shape in known) if known else 0
        for idx, entry in state["state"].items():
            if idx not in known_indices:
                raise FileRefused(f"{where} holds a state of a parameter {idx!s:.40} that there is not")
            for key, info in entry.items():
                if not isinstance(info, TensorInfo) or info.shape in ((), (1,)):
                    continue
                if shapes is not None and info.shape != shapes[idx]:
                    raise FileRefused(f"{where} holds {key} of shape {info.shape}, expected {shapes[idx]}")
                if np.prod(info.shape, dtype=object) > largest:
                    raise FileRefused(f"{where} holds {key} of shape {info.shape}, larger than any parameter")


def pickles_of(agent: AgentFile) -> dict[str, list[str]]:
    """
    :param agent: the file
    :return: what its pickles would import, by the names of the attributes
    """
    numbers = itertools.count()
    return {name: named_in_pickle(io.BytesIO(pickle), agent.name, numbers) for name, pickle in agent.pickles.items()}
