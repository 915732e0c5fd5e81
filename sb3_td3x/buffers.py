"""The replay buffer of TD3X, which of SB3's an agent gets instead, and what each can store."""

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.shaping import RewardShaping

if TYPE_CHECKING:
    from sb3_td3x.td3x import TD3X


class _Column:
    """An array of SB3's ``ReplayBuffer`` that is a view of a ``PackedReplayBuffer``'s rows, also after assignment."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, replay_buffer: "PackedReplayBuffer | None", owner: type) -> np.ndarray:
        if replay_buffer is None:
            raise AttributeError(self.name)
        return replay_buffer.columns[self.name]

    def __set__(self, replay_buffer: "PackedReplayBuffer", value: np.ndarray) -> None:
        replay_buffer.columns[self.name][...] = value


class PackedReplayBuffer(ReplayBuffer):
    """
    SB3's ``ReplayBuffer`` for vectors of float32, with each transition in one row of memory: a batch is one gather,
    without conversions. The arrays of SB3's buffer are views of the rows. Same memory, same random draws.

    :param buffer_size: Max number of transitions
    :param observation_space: Observation space, a Box of float32 with one dimension
    :param action_space: Action space
    :param device: PyTorch device of the batches
    :param n_envs: Number of parallel environments
    :param handle_timeout_termination: Handle timeout termination (due to timelimit) separately
    """

    observations = _Column()
    next_observations = _Column()
    actions = _Column()
    rewards = _Column()
    dones = _Column()
    timeouts = _Column()

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Box,
        action_space: spaces.Box,
        device: th.device | str = "auto",
        n_envs: int = 1,
        handle_timeout_termination: bool = True,
    ):
        # Not SB3's own constructor, which would take the memory a second time
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        # observation, next observation, action, reward, done, timeout
        self._widths = (*self.obs_shape, *self.obs_shape, self.action_dim, 1, 1, 1)
        self._rows = np.zeros((self.buffer_size, n_envs, sum(self._widths)), dtype=np.float32)
        self._view_rows()

    def _view_rows(self) -> None:
        """Make SB3's arrays, and the tensor that batches are gathered from, views of the rows."""
        obs, next_obs, actions, *scalars = np.split(self._rows, np.cumsum(self._widths[:-1]), axis=2)
        rewards, dones, timeouts = (column[..., 0] for column in scalars)
        self.columns = {
            "observations": obs,
            "next_observations": next_obs,
            "actions": actions,
            "rewards": rewards,
            "dones": dones,
            "timeouts": timeouts,
        }
        self._row_tensor = th.from_numpy(self._rows).view(-1, self._rows.shape[2])

    def add(
        self,
        obs: np.ndarray,
        next_obs: np.ndarray,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one transition of each env.

        :param obs: observations, (n_envs, features)
        :param next_obs: what the actions led to, (n_envs, features)
        :param action: scaled actions, (n_envs, *action_shape)
        :param reward: rewards, (n_envs,)
        :param done: whether the episode ended, by termination or time-out, (n_envs,)
        :param infos: the envs' infos
        """
        self.observations[self.pos] = obs
        self.next_observations[self.pos] = next_obs
        self.actions[self.pos] = action.reshape(self.n_envs, self.action_dim)
        self.rewards[self.pos] = reward
        self.dones[self.pos] = done
        if self.handle_timeout_termination:
            self.timeouts[self.pos] = [info.get("TimeLimit.truncated", False) for info in infos]
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """
        :param batch_size: Number of transitions
        :param env: associated gym VecEnv to normalize the observations/rewards when sampling
        :return: transitions, drawn with replacement
        """
        if env is not None:
            return super().sample(batch_size, env)
        rows = np.random.randint(0, self.size(), size=batch_size)
        if self.n_envs > 1:
            rows = rows * self.n_envs + np.random.randint(0, self.n_envs, size=batch_size)
        batch = self._row_tensor.index_select(0, th.from_numpy(rows)).to(self.device)
        obs, next_obs, actions, rewards, dones, timeouts = batch.split_with_sizes(self._widths, dim=1)
        return ReplayBufferSamples(obs, actions, next_obs, dones * (1 - timeouts), rewards)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("columns", "_row_tensor")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view_rows()


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
        elif isinstance(model.observation_space, spaces.Box) and _can_be_packed(model):
            return PackedReplayBuffer(
                model.buffer_size, model.observation_space, model.action_space, model.device, model.n_envs, **kwargs
            )
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


def _can_be_packed(model: "TD3X") -> bool:
    """
    :param model: the agent
    :return: whether its transitions are vectors of float32, with the next observation in a place of its own
    """
    shape, dtype = model.observation_space.shape, model.observation_space.dtype
    return shape is not None and len(shape) == 1 and dtype == np.float32 and not model.optimize_memory_usage


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


def check_loaded_replay_buffer(model: "TD3X", replay_buffer: Any, path: str) -> None:
    """
    :param model: the agent
    :param replay_buffer: what was loaded for it, or is going to be: anything with the attributes of a replay buffer
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
