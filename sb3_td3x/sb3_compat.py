"""Agents from and to SB3's TD3 and DDPG. State dictionaries have SB3's layout on both sides."""

import inspect
import warnings
from copy import deepcopy
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3 import TD3, HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.vec_env.patch_gym import _convert_space
from stable_baselines3.td3 import policies as sb3_policies

from sb3_td3x.policies import (
    OPTIMIZER_KERNEL_OPTIONS,
    CnnPolicy,
    MlpPolicy,
    MultiInputPolicy,
    TD3XPolicy,
)

# TD3X's policy for each of SB3's
OWN_POLICIES: dict[type[BasePolicy], type[TD3XPolicy]] = {
    sb3_policies.MlpPolicy: MlpPolicy,
    sb3_policies.CnnPolicy: CnnPolicy,
    sb3_policies.MultiInputPolicy: MultiInputPolicy,
}
_SB3_POLICIES: dict[type[BasePolicy], type[BasePolicy]] = {own: sb3 for sb3, own in OWN_POLICIES.items()}

# Options of the networks that SB3 lacks, with the values that correspond to its networks
_OWN_NETWORK_OPTIONS: dict[str, Any] = {
    "layer_norm": False,
    "actor_layer_norm": False,
    "critic_activation_fn": None,
    "stochastic_actor": False,
    "n_quantiles": 1,
}

# Arguments that SB3's TD3 lacks, with the values that correspond to SB3's behavior
_OWN_ARGUMENTS = {
    "qf_learning_rate": None,
    "action_noise_decay": 1.0,
    "action_noise_min_scale": 0.0,
    "reward_shaping": None,
    "clipped_double_q": True,
    "precision": "float32",
    "overlap_updates": False,
    "prioritized_replay_alpha": 0.0,
    "policy_checkpoint_episodes": 0,
    "top_quantiles_to_drop_per_net": 2,
    "actor_average_tau": 0.0,
}

# Names of the parameters begin with it if the actor that plays is not the newest
_CHECKPOINT = "checkpoint_actor."

# Attributes of a training that SB3's TD3 also has, besides its arguments
_SHARED_ATTRIBUTES = {
    "observation_space",
    "action_space",
    "n_envs",
    "num_timesteps",
    "_total_timesteps",
    "_num_timesteps_at_start",
    "_episode_num",
    "_n_updates",
    "_current_progress_remaining",
    "_stats_window_size",
    "ep_info_buffer",
    "ep_success_buffer",
}


def to_own_attributes(data: dict[str, Any]) -> dict[str, Any]:
    """
    Convert the attributes of an agent of TD3X, TD3 or DDPG to those of TD3X.

    :param data: attributes from a zip file
    :return: attributes of TD3X
    """
    data = dict(data)
    data["policy_class"] = OWN_POLICIES.get(data["policy_class"], data["policy_class"])
    # Agents of old versions of SB3
    for space in ("observation_space", "action_space"):
        data[space] = _convert_space(data[space])
    data.setdefault("policy_kwargs", {}).pop("device", None)
    # SB3 stores the buffer class that it chose itself; TD3X chooses again, by n_steps
    if data.get("replay_buffer_class") is NStepReplayBuffer:
        kwargs = dict(data.get("replay_buffer_kwargs", {}))
        data["n_steps"] = kwargs.pop("n_steps", 3)
        kwargs.pop("gamma", None)
        data.update(replay_buffer_class=None, replay_buffer_kwargs=kwargs)
    elif data.get("replay_buffer_class") in (ReplayBuffer, DictReplayBuffer) and data.get("n_steps", 1) == 1:
        data["replay_buffer_class"] = None
    return data


def to_sb3(model: OffPolicyAlgorithm) -> TD3:
    """
    Convert an agent to SB3's TD3, with its networks, optimizers, counters, and all arguments that TD3 has.

    :param model: the ``TD3X``
    :return: the same agent as SB3's TD3
    :raises ValueError: the networks have options that SB3 lacks
    """
    for option, default in _OWN_NETWORK_OPTIONS.items():
        value = model.policy_kwargs.get(option, default)
        if value != default:
            raise ValueError(f"policy_kwargs with {option}={value!r} are not allowed, SB3's TD3 has no such option")
    if issubclass(model.policy_class, TD3XPolicy) and model.policy_class not in _SB3_POLICIES:
        raise ValueError(f"policy={model.policy_class.__name__} is not allowed, SB3's TD3 has no such policy")
    for name, default in _OWN_ARGUMENTS.items():
        if getattr(model, name) != default:
            warnings.warn(
                f"{name}={getattr(model, name)!r} is left behind, SB3's TD3 has no such argument", stacklevel=2
            )

    sb3_model = TD3(
        _SB3_POLICIES.get(model.policy_class, model.policy_class),  # type: ignore[arg-type]
        env=None,  # type: ignore[arg-type]
        device=model.device,
        _init_setup_model=False,
    )
    shared = _SHARED_ATTRIBUTES | (inspect.signature(TD3.__init__).parameters.keys() - {"policy", "env", "device"})
    state = {name: deepcopy(value) for name, value in vars(model).items() if name in shared}
    policy_kwargs = {name: value for name, value in model.policy_kwargs.items() if name not in _OWN_NETWORK_OPTIONS}
    # Without the seed: a conversion must not reset the global random generators
    sb3_model.__dict__.update(state, policy_kwargs=policy_kwargs, learning_rate=model.lr_schedule, seed=None)
    sb3_model.env, sb3_model._vec_normalize_env = model.env, model._vec_normalize_env
    needs_env = sb3_model.replay_buffer_class is not None and issubclass(sb3_model.replay_buffer_class, HerReplayBuffer)
    if needs_env and model.env is None:
        # HER's buffer needs the env: without one, the agent can only play
        sb3_model.replay_buffer = ReplayBuffer(1, spaces.Box(0, 1), model.action_space)
    # The initial weights are drawn and replaced
    with th.random.fork_rng(devices=[]):
        sb3_model._setup_model()
    sb3_model.seed = model.seed
    params = copy_state(model.get_parameters())
    # The actor that plays becomes the actor, so that both predict the same
    for name in [name for name in params["policy"] if name.startswith(_CHECKPOINT)]:
        params["policy"][f"actor.{name.removeprefix(_CHECKPOINT)}"] = params["policy"].pop(name)
    sb3_model.set_parameters(params, device=model.device)
    return sb3_model


def to_own_parameters(model: OffPolicyAlgorithm, params: dict[str, Any]) -> dict[str, Any]:
    """
    Return state dictionaries for an agent, those of the optimizers with the kernel options of this machine's.

    :param params: state dictionaries by their names, as for ``set_parameters``, maybe from another machine
    :raises ValueError: an optimizer's state belongs to other networks
    """
    params = dict(params)
    if "policy" in params:
        params["policy"] = _with_own_checkpoint(model, params["policy"])
    for name in ("actor.optimizer", "critic.optimizer"):
        # PyTorch has its own error for an incomplete state
        if "param_groups" in params.get(name, ()):
            state = _with_own_kernels(name, recursive_getattr(model, name), params[name])
            # Optimizers that share their state would count each other's steps
            params[name] = copy_state(state)
    return params


def _with_own_checkpoint(model: OffPolicyAlgorithm, state: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's state dictionary with an actor that plays if the agent has one, at first the actor itself."""
    if getattr(model.policy, "checkpoint_actor", None) is None:
        return {name: value for name, value in state.items() if not name.startswith(_CHECKPOINT)}
    actor = {name.removeprefix("actor."): value for name, value in state.items() if name.startswith("actor.")}
    return {**{f"{_CHECKPOINT}{name}": value for name, value in actor.items()}, **state}


def _with_own_kernels(name: str, optimizer: th.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """
    Return an optimizer's state dictionary with the kernel options of another optimizer.

    :param name: name of the optimizer in errors
    :raises ValueError: it belongs to other networks
    """
    for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        if len(group["params"]) != len(own["params"]):
            raise ValueError(
                f"{name} holds the state of {len(group['params'])} parameters, expected {len(own['params'])}: it was "
                "saved with other policy_kwargs"
            )
    groups = [
        {**group, **{key: own[key] for key in OPTIMIZER_KERNEL_OPTIONS if key in own}}
        for group, own in zip(state["param_groups"], optimizer.param_groups, strict=True)
    ]
    return {"state": state["state"], "param_groups": groups}


def copy_state(value: Any) -> Any:
    """
    Return a deep copy of an optimizer's state in which no two entries share a tensor.

    :param value: dictionaries and lists of tensors and numbers
    """
    if isinstance(value, dict):
        return {key: copy_state(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [copy_state(entry) for entry in value]
    return value.clone() if th.is_tensor(value) else value
