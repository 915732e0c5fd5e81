"""Which of SB3's replay buffers an agent gets, and what each can store."""

import warnings
from typing import TYPE_CHECKING, Any

from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer

from sb3_td3x.shaping import RewardShaping

if TYPE_CHECKING:
    from sb3_td3x.td3x import TD3X


def make_replay_buffer(model: "TD3X") -> ReplayBuffer:
    """
    :param model: the agent
    :return: an empty replay buffer of the class that its arguments ask for
    """
    buffer_class = model.replay_buffer_class
    # The user's own dictionary is part of the zip: no env and nothing derived may enter it
    kwargs = dict(model.replay_buffer_kwargs)
    if buffer_class is None:
        if isinstance(model.observation_space, spaces.Dict):
            buffer_class = DictReplayBuffer
        elif model.n_steps > 1:
            buffer_class = NStepReplayBuffer
            kwargs.update(n_steps=model.n_steps, gamma=model.gamma)
        else:
            buffer_class = ReplayBuffer
    elif issubclass(buffer_class, HerReplayBuffer):
        if model.env is None:
            raise ValueError(f"env=None is not allowed with {buffer_class.__name__}, expected the env of the goals")
        kwargs["env"] = model.env
    return buffer_class(
        model.buffer_size,
        model.observation_space,
        model.action_space,
        device=model.device,
        n_envs=model.n_envs,
        optimize_memory_usage=model.optimize_memory_usage,
        **kwargs,
    )


def check_replay_buffer_arguments(model: "TD3X") -> None:
    """
    :param model: the agent
    :raises ValueError: there is no replay buffer with all of its options
    """
    buffer_class = model.replay_buffer_class
    if buffer_class is not None and not (isinstance(buffer_class, type) and issubclass(buffer_class, ReplayBuffer)):
        raise ValueError(f"replay_buffer_class={buffer_class!r} is not allowed, expected a ReplayBuffer class or None")
    has_dict_obs = isinstance(model.observation_space, spaces.Dict)
    if model.optimize_memory_usage and has_dict_obs:
        raise ValueError("optimize_memory_usage=True is not allowed with Dict observations, expected False")
    if model.n_steps == 1:
        return
    if buffer_class is not None:
        warnings.warn(
            f"n_steps={model.n_steps} is not used: replay_buffer_class={buffer_class.__name__} "
            "decides on returns; configure it by replay_buffer_kwargs",
            stacklevel=2,
        )
    elif has_dict_obs:
        raise ValueError(f"n_steps={model.n_steps} is not allowed with Dict observations, expected 1")
    elif model.optimize_memory_usage:
        raise ValueError(f"n_steps={model.n_steps} is not allowed with optimize_memory_usage=True, expected 1")


def check_terminations_can_be_stored(model: "TD3X", hook: RewardShaping) -> None:
    """
    :param model: the agent
    :param hook: a hook that changes terminations, which only a replay buffer that knows time-outs can store
    :raises ValueError: its replay buffer does not
    """
    if model.optimize_memory_usage or not model.replay_buffer_kwargs.get("handle_timeout_termination", True):
        raise ValueError(
            f"reward_shaping={hook!r} changes terminations, which is not allowed with "
            "optimize_memory_usage=True or handle_timeout_termination=False"
        )


def check_loaded_replay_buffer(model: "TD3X", replay_buffer: ReplayBuffer, path: Any) -> None:
    """
    :param model: the agent
    :param replay_buffer: what was loaded for it
    :param path: where from, for the error
    :raises ValueError: the transitions are not those of its envs, or for other n-step returns
    """
    names = ["n_envs", "observation_space", "action_space"]
    if model.replay_buffer_class is None:
        names.append("n_steps")
        if model.n_steps > 1:
            names.append("gamma")
    for name in names:
        # Only n-step buffers know their number of steps
        loaded, expected = getattr(replay_buffer, name, 1), getattr(model, name)
        if loaded != expected:
            raise ValueError(f"The replay buffer in {path} has {name}={loaded}, expected {expected}")
