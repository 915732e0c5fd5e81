"""Saving and loading: SB3's methods, with files that a kill cannot break and that run no code."""

import pathlib
from collections.abc import Iterable
from typing import Any, TypeVar

import torch as th
from stable_baselines3 import TD3
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv

from sb3_td3x import sb3_compat
from sb3_td3x.buffers import make_replay_buffer
from sb3_td3x.checkpoint.resume import resume
from sb3_td3x.files.agent import (
    UNSAVED,
    applying_states,
    read_agent,
    read_parameters,
    save_agent,
    set_states,
    with_arguments,
)
from sb3_td3x.files.atomic import SavePath
from sb3_td3x.files.replay import read_replay_buffer, write_replay_buffer
from sb3_td3x.policies import MlpPolicy

SelfAlgorithm = TypeVar("SelfAlgorithm", bound="SavableAlgorithm")


class SavableAlgorithm(OffPolicyAlgorithm):
    """What ``TD3X`` does with files."""

    # Value of `reward_shaping` that comes from a file, and must not import or call anything
    _untrusted_reward_shaping: Any = None
    _replay_buffer: ReplayBuffer | None

    @property
    def replay_buffer(self) -> ReplayBuffer:
        """The replay buffer. After loading it is made at its first use: an agent that only plays needs none."""
        if self._replay_buffer is None:
            self._replay_buffer = make_replay_buffer(self)
        return self._replay_buffer

    @replay_buffer.setter
    def replay_buffer(self, replay_buffer: ReplayBuffer | None) -> None:
        self._replay_buffer = replay_buffer

    def save(self, path: SavePath, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """
        Save all the attributes of the object and the model parameters in a zip-file with a checksum. If the process is
        killed or the disk is full, the old file stays whole.

        :param path: path to the file (or a file-like) where the agent should be saved
        :param exclude: name of parameters that should be excluded in addition to the default ones
        :param include: name of parameters that might be excluded but should be included anyway
        :raises ValueError: ``replay_buffer`` is included; use ``save_replay_buffer``
        """
        save_agent(path, self, exclude, include)

    def save_replay_buffer(self, path: SavePath) -> None:
        """
        Save the replay buffer in a zip-file of arrays with a checksum. A replay buffer of a class that is not SB3's or
        TD3X's is pickled.

        :param path: Path to the file (or a file-like) where the replay buffer should be saved
        """
        write_replay_buffer(path, self.replay_buffer)

    def load_replay_buffer(self, path: SavePath, truncate_last_traj: bool = True, trusted: bool = False) -> None:
        """
        Load a replay buffer that was saved by TD3X or by SB3. If it is larger than ``buffer_size`` and not full, it
        becomes as large as its content or ``buffer_size``.

        :param path: Path to the file (or a file-like)
        :param truncate_last_traj: When using ``HerReplayBuffer``, whether the last trajectory counts as finished
        :param trusted: whether to unpickle a replay buffer of a class that is not SB3's, which can run any code
        :raises ValueError: the file is damaged or needs to be trusted, or the transitions belong to other envs or other
            n-step returns; the agent keeps its own replay buffer
        """
        self.replay_buffer = read_replay_buffer(path, self, truncate_last_traj, trusted)

    @classmethod
    def load(
        cls: type[SelfAlgorithm],
        path: SavePath,
        env: GymEnv | str | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        trusted: bool = False,
        **kwargs: Any,
    ) -> SelfAlgorithm:
        """
        Load an agent saved by TD3X, or by SB3's ``TD3`` or ``DDPG``, with its optimizers and counters. No code in the
        file is run, unless it is trusted. Attributes that ``save`` was told to exclude have their defaults.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on, or its id (can be None if you only need prediction)
        :param device: Device on which the code should run.
        :param custom_objects: Dictionary of objects to replace upon loading
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training
        :param trusted: whether to unpickle attributes that only a pickle can hold, such as a function of your own, and
            to import the hook that the file names. This lets a stranger's file run any code
        :param kwargs: arguments of the constructor to change when loading
        :return: new model instance with loaded parameters
        :raises ValueError: the file is damaged, holds another algorithm's agent or needs to be trusted, an argument is
            unknown or not allowed, or the env's spaces are not those of the agent
        """
        agent_class: Any = cls
        model = agent_class(MlpPolicy, env=None, device=device, _init_setup_model=False)
        attributes, states = read_agent(path, model, custom_objects, kwargs, trusted, print_system_info)
        vars(model).update(with_arguments(cls, sb3_compat.to_own_attributes(attributes), kwargs))
        if not (trusted or "reward_shaping" in {**(custom_objects or {}), **kwargs}):
            model._untrusted_reward_shaping = model.reward_shaping
        if env is not None:
            env = cls._wrap_env(maybe_make_env(env, model.verbose), model.verbose)
            model.n_envs = env.num_envs
            model.set_env(env, force_reset)
        model._setup_model()
        set_states(path, model, states)
        if "reward_shaping" in kwargs:
            model._check_shaping()
        loaded: SelfAlgorithm = model
        return loaded

    @classmethod
    def resume(
        cls: type[SelfAlgorithm],
        directory: str | pathlib.Path,
        env: GymEnv | str,
        device: th.device | str = "auto",
        **kwargs: Any,
    ) -> SelfAlgorithm:
        """
        Resume from the newest whole checkpoint of a ``sb3_td3x.checkpoint.ResumableCheckpoint``::

            model = TD3X.resume("checkpoints", env)
            callback = ResumableCheckpoint("checkpoints")
            model.learn(total_timesteps - model.num_timesteps, callback, reset_num_timesteps=False)

        :param directory: the folder of the checkpoints
        :param env: the envs, made like those of the training, or the id of one; they begin new episodes
        :param device: Device on which the code should run.
        :param kwargs: further arguments of ``load``
        :return: the agent with its replay buffer, counters and random generators
        :raises ValueError: there is no whole checkpoint, or the envs or arguments do not fit it
        """
        return resume(cls.load, pathlib.Path(directory), maybe_make_env(env, verbose=0), device=device, **kwargs)

    def to_sb3(self) -> TD3:
        """
        Convert the agent to SB3's ``TD3``, for use where sb3_td3x is not installed, with networks, optimizers and
        counters. Warn of what SB3's TD3 has no argument for: shaping, noise decay, the critics' separate learning rate,
        ``clipped_double_q=False``.

        :return: an SB3 TD3 that predicts the same
        :raises ValueError: the networks have options that SB3 lacks
        """
        return sb3_compat.to_sb3(self)

    def set_parameters(
        self,
        load_path_or_dict: SavePath | dict[str, Any],
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        Load parameters from a file of an agent, or from a dictionary as ``get_parameters`` returns it.

        :param load_path_or_dict: path to the file (or a file-like), or the dictionary, in SB3's layout
        :param exact_match: whether parameters may not be missing
        :param device: Device on which the code should run.
        """
        if not isinstance(load_path_or_dict, dict):
            params = read_parameters(load_path_or_dict, self.get_parameters())
            with applying_states(load_path_or_dict):
                self.set_parameters(params, exact_match=exact_match, device=device)
            return
        params = sb3_compat.to_own_parameters(self, load_path_or_dict)
        super().set_parameters(params, exact_match=exact_match, device=device)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *UNSAVED]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "actor.optimizer", "critic.optimizer"], []
