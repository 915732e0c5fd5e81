"""
Saved agents: writing them, and reading them without running code, SB3's TD3 and DDPG included.

The file is a zip file in SB3's layout:

- ``data``: the attributes as JSON, see ``records``
- ``pickled.NAME.pkl``: an attribute that only a pickle can hold; read only if the user trusts the file
- ``policy.pth``, ``actor.optimizer.pth``, ``critic.optimizer.pth``: the state dictionaries, in SB3's layout
- ``pytorch_variables.pth``: further tensors of a subclass
"""

import base64
import contextlib
import functools
import inspect
import io
import json
import types
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import stable_baselines3
import torch as th
from gymnasium import spaces
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import recursive_getattr, recursive_setattr
from stable_baselines3.common.utils import get_system_info

from sb3_td3x.files.atomic import SavePath, name_of
from sb3_td3x.files.errors import FileRefused, reason_of, refusing
from sb3_td3x.files.pickles import allowed_in_pickles, from_pickle, read_pickle
from sb3_td3x.files.records import NotARecordError, Number, from_record, is_registered_class, path_of, to_record
from sb3_td3x.files.sealed_zip import CheckedZip, open_checked_zip, write_sealed_zip
from sb3_td3x.files.tensors import read_state
from sb3_td3x.validation import check_known

States = dict[str, Any]

# Attributes that `save` leaves out and `load` ignores: they are rebuilt from the others
UNSAVED = frozenset(
    {
        *("actor", "actor_target", "critic", "critic_target", "_learner", "_is_updated", "_overlapping_env"),
        "_replay_buffer",
        *("lr_schedule", "qf_lr_schedule", "_built_shaping", "_untrusted_reward_shaping", "_resumed"),
        # SB3's TD3 saves these
        *("actor_batch_norm_stats", "actor_batch_norm_stats_target"),
        *("critic_batch_norm_stats", "critic_batch_norm_stats_target"),
    }
)

# Arguments that the TD3 family has and other algorithms lack
_HYPERPARAMETERS = ("target_policy_noise", "target_noise_clip")
_STATE_DICTS = ("policy", "actor.optimizer", "critic.optimizer")
_VARIABLES = "pytorch_variables"
# SB3 can save it in the agent's file
_REPLAY_BUFFER = "replay_buffer"
_TEXTS = ("_stable_baselines3_version", "system_info.txt")

# Key of a pickled attribute in files of SB3
_SB3_PICKLED = ":serialized:"


# Writing


def save_agent(
    path: SavePath,
    model: OffPolicyAlgorithm,
    exclude: Iterable[str] | None = None,
    include: Iterable[str] | None = None,
    parameters: States | None = None,
) -> None:
    """
    Save an agent, as a whole or not at all.

    :param exclude: names of attributes to leave out in addition to the default ones
    :param include: names of attributes to save that are left out by default
    :param parameters: state dictionaries to save in place of the agent's own
    """
    if _REPLAY_BUFFER in (include or ()):
        raise ValueError(f"include={include!r} is not allowed, expected no {_REPLAY_BUFFER}: use save_replay_buffer")
    with write_sealed_zip(path, "zip") as archive:
        write_agent(archive, model, exclude or (), include or (), parameters)


def write_agent(
    archive: zipfile.ZipFile,
    model: OffPolicyAlgorithm,
    exclude: Iterable[str] = (),
    include: Iterable[str] = (),
    parameters: States | None = None,
    **changed: Any,
) -> None:
    """
    Write an agent to an open zip file. The arguments are those of ``save_agent``.

    :param changed: attributes to save with another value
    """
    state_dicts, variables = model._get_torch_save_params()
    excluded = {*exclude, *model._excluded_save_params()} - {*include}
    excluded |= {name.split(".")[0] for name in (*state_dicts, *variables)}
    data, pickles = {}, {}
    for name, value in {**vars(model), **changed}.items():
        # Skip methods that a user has replaced in the object
        if name in excluded or _is_method(type(model), name):
            continue
        try:
            data[name] = to_record(value)
            # An object that was changed after its construction may not be reconstructible, so try it now
            from_record(data[name])
        except (NotARecordError, ValueError, RecursionError) as error:
            pickles[name] = cloudpickle.dumps(value)
            data[name] = {"__type__": "pickle", "reason": str(error)}
    archive.writestr("data", json.dumps(data, indent=2, allow_nan=False))
    for name, content in pickles.items():
        archive.writestr(f"pickled.{name}.pkl", content)
    tensors = {name: recursive_getattr(model, name) for name in variables}
    for name, state in {_VARIABLES: tensors, **(parameters or model.get_parameters())}.items():
        # PyTorch hides the reason if it cannot write to the disk
        buffer = io.BytesIO()
        th.save(state, buffer)
        archive.writestr(f"{name}.pth", buffer.getbuffer())
    archive.writestr("_stable_baselines3_version", stable_baselines3.__version__)
    archive.writestr("system_info.txt", get_system_info(print_info=False)[1])


# Reading


@dataclass
class AgentFile:
    """
    The content of an agent's file, read without running any of it.

    :param data: the attributes as they are written
    :param states: state dictionaries and further tensors by their names
    :param texts: versions of SB3 and of the system
    :param is_sealed: whether the file has a checksum; a wrong one is refused
    """

    name: str
    data: dict[str, Any]
    states: States
    pickles: dict[str, bytes]
    texts: dict[str, str]
    is_sealed: bool

    def attribute(self, name: str, trusted: bool = False) -> Any:
        """Return an attribute."""
        value, content = self.data[name], self.pickles.get(name)
        if content is None:
            return from_record(value)
        if trusted:
            try:
                return cloudpickle.loads(content)
            except Exception as error:  # from the user's own modules
                reason = f"{type(error).__name__}: {error!s:.200}"
                raise ValueError(f"cannot be unpickled ({reason}), give it by custom_objects") from None
        if _SB3_PICKLED not in value:
            raise FileRefused(f"{value.get('reason')!s:.100}")
        with refusing("it"):
            return from_pickle(read_pickle(io.BytesIO(content), "it", allowed_in_pickles()), len(content))


def open_agent(path: SavePath) -> AgentFile:
    """
    Open an agent's file.

    :raises FileRefused: the file is damaged, or holds another algorithm's agent
    """
    with open_checked_zip(path, "zip") as archive, refusing(name := archive.name):
        data = _read_data(archive)
        absent = [f"{state}.pth" for state in _STATE_DICTS if f"{state}.pth" not in archive.members]
        if absent:
            raise FileRefused(f"{name} is no whole agent, it lacks {', '.join(absent)}")
        pickles = {}
        for attribute, value in data.items():
            if isinstance(value, dict) and _SB3_PICKLED in value:
                pickles[attribute] = base64.b64decode(value[_SB3_PICKLED], validate=True)
            elif isinstance(value, dict) and value.get("__type__") == "pickle":
                pickles[attribute] = archive.read(f"pickled.{attribute}.pkl")
        members = [member for member in archive.members if member.endswith(".pth")]
        states = {it.removesuffix(".pth"): read_state(archive.read(it), f"{it} in {name}") for it in members}
        for state, content in states.items():
            if not isinstance(content, dict):
                raise FileRefused(f"{state}.pth in {name} holds no state dictionary")
        if not all(isinstance(tensor, th.Tensor | None) for tensor in states.get(_VARIABLES, {}).values()):
            raise FileRefused(f"{_VARIABLES}.pth in {name} holds something else than tensors")
        texts = {member: archive.read(member).decode() for member in _TEXTS if member in archive.members}
        return AgentFile(name, data, states, pickles, texts, archive.is_sealed)


def _read_data(archive: CheckedZip) -> dict[str, Any]:
    """Return the attributes as they are written, if they are those of an agent of the TD3 family."""
    name = archive.name
    data = json.loads(archive.read("data")) if "data" in archive.members else {}
    if not isinstance(data, dict) or "policy_class" not in data:
        raise FileRefused(f"{name} is a zip file but no agent saved by Stable-Baselines3")
    if not data.keys() & {*_HYPERPARAMETERS}:
        policy_class = data["policy_class"]
        module = policy_class.get("__module__", "unknown") if isinstance(policy_class, dict) else policy_class
        raise FileRefused(
            f"{name} was saved by another algorithm (policy from {str(module)[:80]}, without "
            f"{', '.join(_HYPERPARAMETERS)}): TD3X loads agents of TD3X, TD3 and DDPG"
        )
    return data


def read_agent(
    path: SavePath,
    model: OffPolicyAlgorithm,
    custom_objects: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    trusted: bool = False,
    print_system_info: bool = False,
) -> tuple[dict[str, Any], States]:
    """
    Read an agent saved by ``TD3X``, or by SB3's ``TD3`` or ``DDPG``.

    :param model: the agent that will get the attributes, as its constructor made it
    :param custom_objects: objects to use in place of those in the file, by name; unknown names are ignored
    :param arguments: arguments of ``load``, used where the file lacks an attribute or has a pickle
    :param trusted: whether to run the pickles in the file, which can do anything that the user can
    :raises ValueError: the file is damaged, holds another algorithm's agent, or needs to be trusted
    """
    if not isinstance(custom_objects, Mapping | None):
        raise ValueError(f"custom_objects={custom_objects!r} is not allowed, expected a dictionary or None")
    agent = open_agent(path)
    if print_system_info:
        print("== CURRENT SYSTEM INFO ==")
        get_system_info()
        print("== SAVED MODEL SYSTEM INFO ==")
        print(agent.texts.get("system_info.txt", "unknown"))
    unsaved = {*model._excluded_save_params()}
    is_plain = agent.data.keys() - agent.pickles.keys()
    known = {*agent.data, *vars(model), *_NEEDED} - unsaved
    given = {name: value for name, value in (arguments or {}).items() if name in known - is_plain}
    given.update((name, value) for name, value in (custom_objects or {}).items() if name in known)
    with refusing(agent.name):
        # An attribute must not hide a method
        needed = [it for it in agent.data if it not in unsaved | given.keys() and not _is_method(type(model), it)]
        # The constructor does not set `n_envs` without an env
        attributes = {"n_envs": 1, **_read_attributes(agent, needed, trusted), **given}
        _check_attributes(attributes, agent.name)
        _check_networks(attributes, agent.states, agent.name)
    return attributes, agent.states


def _read_attributes(agent: AgentFile, names: Iterable[str], trusted: bool) -> dict[str, Any]:
    """Return attributes of a file, or one error that names all that need trust."""
    attributes, refused = {}, []
    for name in names:
        try:
            attributes[name] = agent.attribute(name, trusted)
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


def with_arguments(
    cls: type[OffPolicyAlgorithm], attributes: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """
    Return an agent's attributes with the arguments of ``load`` in place of the saved ones.

    :raises ValueError: an argument is unknown, or differs from the saved one but cannot be changed
    """
    known = {*inspect.signature(cls.__init__).parameters, *attributes} - {"self", "policy", "_init_setup_model"}
    check_known("load", arguments, known)
    policy_kwargs = attributes["policy_kwargs"]
    if arguments.get("policy_kwargs", policy_kwargs) != policy_kwargs:
        raise ValueError(
            f"policy_kwargs={arguments['policy_kwargs']!r} is not allowed, expected those of the saved agent, "
            f"{policy_kwargs!r}"
        )
    own_names = {"stats_window_size": "_stats_window_size"}
    return {**attributes, **{own_names.get(name, name): value for name, value in arguments.items()}}


@contextlib.contextmanager
def applying_states(path: SavePath) -> Iterator[None]:
    """
    Turn errors about parameters from a file into one sentence: only PyTorch knows what the state of an optimizer must
    contain.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise FileRefused(f"{name_of(path)} has parameters that do not fit: {reason_of(error)}") from None


def set_states(path: SavePath, model: OffPolicyAlgorithm, states: States) -> None:
    """Give an agent the networks, optimizers and further tensors from a file."""
    states = dict(states)
    variables = states.pop(_VARIABLES, {})
    with applying_states(path):
        model.set_parameters(states, exact_match=True)
    for name in model._get_torch_save_params()[1]:
        if variables.get(name) is not None:
            recursive_setattr(model, f"{name}.data", variables[name].data.to(model.device))


def read_parameters(path: SavePath, expected: States) -> States:
    """
    Read the state dictionaries of an agent.

    :raises ValueError: the file is damaged, holds another algorithm's agent or one with other networks
    """
    agent = open_agent(path)
    _check_policy(agent.states["policy"], expected["policy"], f"policy.pth in {agent.name}")
    return {name: state for name, state in agent.states.items() if name != _VARIABLES}


# Checks of what was read

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
# Types of attributes that the agent does not check itself
_ATTRIBUTE_TYPES: dict[str, Any] = {
    "policy_class": type,
    "policy_kwargs": dict,
    "observation_space": spaces.Space,
    "action_space": spaces.Box,
    "verbose": bool | Number,
    "replay_buffer_kwargs": dict,
    **dict.fromkeys(_COUNTERS, int),
    # SB3's users may train for infinitely many steps
    "_total_timesteps": Number,
    "_current_progress_remaining": Number,
    "ep_info_buffer": deque | None,
    "ep_success_buffer": deque | None,
    "_last_obs": np.ndarray | dict | tuple | None,
    "_last_original_obs": np.ndarray | dict | tuple | None,
    "_last_episode_starts": np.ndarray | None,
}
_NEEDED = ("policy_class", "observation_space", "action_space")


def _is_method(cls: type, name: str) -> bool:
    """Return whether a class has a method or property of a name."""
    own = inspect.getattr_static(cls, name, None)
    return isinstance(own, property | classmethod | staticmethod | types.FunctionType)


def _check_attributes(attributes: dict[str, Any], file: str) -> None:
    """Check the types of attributes, and make counters integers: SB3 also accepts 1e6 and NumPy's numbers."""
    for name in _NEEDED:
        if name not in attributes:
            raise FileRefused(f"{file} is no whole agent, it lacks {name}")
    for name, kinds in _ATTRIBUTE_TYPES.items():
        if name not in attributes:
            continue
        value = attributes[name]
        if name in _COUNTERS and isinstance(value, float | np.number) and float(value).is_integer():
            attributes[name] = value = int(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and name != "verbose"):
            raise FileRefused(f"{file} has a bad {name}: {type(value).__name__}")
    if not issubclass(attributes["policy_class"], BasePolicy):
        raise FileRefused(f"{file} has a bad policy_class: {path_of(attributes['policy_class'])}")
    if attributes["n_envs"] < 1:
        raise FileRefused(f"{file} has a bad n_envs: {attributes['n_envs']}")


def _check_networks(attributes: Mapping[str, Any], states: States, file: str) -> None:
    """Compare the tensors in a file with the networks that it describes, before these take memory."""
    policy_class: type = attributes["policy_class"]
    policy_kwargs = attributes.get("policy_kwargs", {})
    if _is_own([policy_class, policy_kwargs]):
        # The user has given it or trusts the file. It may not work on the meta device below
        return
    meta_class: Any = type("Meta", (policy_class,), {"device": th.device("meta")})
    # Fused optimizers do not know the meta device, where tensors take no memory
    kwargs = {**policy_kwargs, "optimizer_class": th.optim.SGD, "optimizer_kwargs": {}}
    kwargs.pop("device", None)
    optimizer_class = policy_kwargs.get("optimizer_class", th.optim.Adam)
    try:
        _check_number_of_layers(policy_kwargs, len(states["policy"]))
        with th.device("meta"):
            # A copy: some policies draw an observation from the space
            policy = meta_class(
                deepcopy(attributes["observation_space"]), attributes["action_space"], lambda _: 0.0, **kwargs
            )
            if any(str(name).startswith("checkpoint_actor.") for name in states["policy"]):
                policy.keep_actor()
        optimizer_class([th.nn.Parameter(th.zeros(1))], **{"lr": 0.0, **(policy_kwargs.get("optimizer_kwargs") or {})})
    except Exception as error:  # wrong arguments of wrong types cause any exception
        raise FileRefused(f"{file} describes a policy that cannot be made: {reason_of(error)}") from None
    _check_policy(states["policy"], policy.state_dict(), f"policy.pth in {file}")


def _is_own(value: Any) -> bool:
    """Return whether arguments of a policy contain a class or function that belongs to the user."""
    if isinstance(value, dict | list | tuple):
        return any(map(_is_own, value.values() if isinstance(value, dict) else value))
    if isinstance(value, type):
        return not is_registered_class(value)
    return isinstance(value, types.FunctionType | functools.partial)


def _check_number_of_layers(policy_kwargs: Mapping[str, Any], n_tensors: int) -> None:
    """Refuse networks of more layers than the file has tensors for: even without memory, making them takes long."""
    net_arch = policy_kwargs.get("net_arch") or []
    critic_arch = net_arch["qf"] if isinstance(net_arch, dict) else net_arch
    n_layers = policy_kwargs.get("n_critics", 1) * (len(critic_arch) + 1)
    if isinstance(net_arch, dict):
        n_layers += len(net_arch["pi"])
    if n_layers > n_tensors:
        raise ValueError(f"{n_tensors} tensors are too few for {n_layers} layers")


def _check_policy(state: Any, expected: States, where: str) -> None:
    """Compare the networks in a file with those that they are for."""
    with refusing(where):
        if state.keys() != expected.keys():
            key = min(map(str, state.keys() ^ expected.keys()))
            raise FileRefused(f"{where} was saved with other policy_kwargs, it differs in {key[:80]}")
        for key, tensor in state.items():
            shape, dtype = tuple(expected[key].shape), expected[key].dtype
            if tensor.shape != shape or tensor.dtype.is_floating_point != dtype.is_floating_point:
                raise FileRefused(
                    f"{where} was saved with other policy_kwargs: {key} is {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}, expected {dtype} of shape {shape}"
                )
