"""The replay buffer of TD3X, which of SB3's an agent gets instead, and what each can store."""

import warnings
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.files.replay import register_replay_buffer
from sb3_td3x.shaping import RewardShaping
from sb3_td3x.validation import check_bool, check_known

# As in SB3, memory is looked at where psutil is installed
try:
    import psutil  # type: ignore[import-untyped]
except ImportError:
    psutil = None

# The one argument of the replay buffers that an agent makes by itself which is not the agent's own
_HANDLE_TIMEOUTS = "handle_timeout_termination"
# Columns of a packed row that are not a single number
_VECTORS = ("observations", "next_observations", "actions")
# Attributes of a packed buffer that follow from the others
REBUILT = ("columns", "_host_rows", "_device_rows", "_n_pending")


class _Column:
    """An array of SB3's ``ReplayBuffer`` that is a view of a ``PackedReplayBuffer``'s rows, also after assignment."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, replay_buffer: "PackedReplayBuffer | None", owner: type) -> np.ndarray:
        if replay_buffer is None or self.name not in replay_buffer.columns:
            raise AttributeError(self.name)
        return replay_buffer.columns[self.name]

    def __set__(self, replay_buffer: "PackedReplayBuffer", value: np.ndarray) -> None:
        replay_buffer.columns[self.name][...] = value
        replay_buffer._n_pending = replay_buffer.buffer_size


@register_replay_buffer("optimize_memory_usage")
class PackedReplayBuffer(ReplayBuffer):
    """
    SB3's ``ReplayBuffer`` for vectors of float32, with each transition in one row of memory: a batch is one gather,
    without conversions. The arrays of SB3's buffer are views of the rows. Same memory, same random draws.
    Batches for a GPU come from a copy of the rows there.

    :param buffer_size: Max number of transitions
    :param observation_space: Observation space, a Box of float32 with one dimension
    :param action_space: Action space
    :param device: PyTorch device of the batches
    :param n_envs: Number of parallel environments
    :param optimize_memory_usage: Store each observation once: the next one is that of the next row
    :param handle_timeout_termination: Handle timeout termination (due to timelimit) separately,
        not together with ``optimize_memory_usage``
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
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
    ):
        if optimize_memory_usage and handle_timeout_termination:
            raise ValueError(
                "handle_timeout_termination=True is not allowed with optimize_memory_usage=True, expected False"
            )
        # Not SB3's own constructor, which would take the memory a second time
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        # Of the columns in a row
        self._widths = {"observations": self.obs_shape[0], "actions": self.action_dim}
        self._widths |= {"rewards": 1, "dones": 1, "timeouts": 1}
        if not optimize_memory_usage:
            self._widths["next_observations"] = self.obs_shape[0]
        self._rows = np.zeros((self.buffer_size, n_envs, sum(self._widths.values())), dtype=np.float32)
        _warn_if_too_large(self._rows.nbytes)
        self._view_rows()

    def _view_rows(self) -> None:
        """Make SB3's arrays, and the tensor that batches are gathered from, views of the rows."""
        self.columns: dict[str, np.ndarray] = {}
        start = 0
        for name, width in self._widths.items():
            column = self._rows[..., start : start + width]
            self.columns[name] = column if name in _VECTORS else column[..., 0]
            start += width
        self._host_rows = th.from_numpy(self._rows).view(-1, start)
        self._device_rows: th.Tensor | None = None
        # Steps that the device does not know yet
        self._n_pending = self.buffer_size

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
        if self.optimize_memory_usage:
            self.observations[(self.pos + 1) % self.buffer_size] = next_obs
        else:
            self.next_observations[self.pos] = next_obs
        self.actions[self.pos] = action.reshape(self.n_envs, self.action_dim)
        self.rewards[self.pos] = reward
        self.dones[self.pos] = done
        if self.handle_timeout_termination:
            self.timeouts[self.pos] = [info.get("TimeLimit.truncated", False) for info in infos]
        self._n_pending += 1
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
        rows = self.rows_on_device()
        indices = th.from_numpy(self.draw(batch_size)).to(rows.device)
        batch = self.gather(rows, indices)
        if rows.device.type == self.device.type:
            return batch
        return ReplayBufferSamples(*(part.to(self.device) for part in batch if part is not None))

    def draw(self, batch_size: int) -> np.ndarray:
        """
        :param batch_size: Number of transitions
        :return: their rows, drawn with replacement as SB3 does, (batch_size,)
        """
        if self.optimize_memory_usage and self.full:
            # The observation that the newest transition led to stands in the oldest step
            steps = (np.random.randint(1, self.buffer_size, size=batch_size) + self.pos) % self.buffer_size
        else:
            steps = np.random.randint(0, self.size(), size=batch_size)
        if self.n_envs == 1:
            return steps
        return steps * self.n_envs + np.random.randint(0, self.n_envs, size=batch_size)

    def gather(self, rows: th.Tensor, indices: th.Tensor) -> ReplayBufferSamples:
        """
        :param rows: what ``rows_on_device`` returned
        :param indices: rows of a batch, on the device, (batch_size,)
        :return: their transitions
        """
        widths = tuple(self._widths.values())
        obs, actions, rewards, dones, timeouts, *rest = rows.index_select(0, indices).split_with_sizes(widths, dim=1)
        if self.optimize_memory_usage:
            next_obs = rows.index_select(0, (indices + self.n_envs) % len(rows))[:, : self.obs_shape[0]]
        else:
            (next_obs,) = rest
        return ReplayBufferSamples(obs, actions, next_obs, dones * (1 - timeouts), rewards)

    def rows_on_device(self) -> th.Tensor:
        """
        A copy on a GPU is kept up to date with what is added, and with arrays that are assigned, but cannot see
        numbers written into an array, but for the last step's.

        :return: all rows, (buffer_size * n_envs, width); on the CPU, and where a GPU has no memory for them, those of
            the buffer itself
        """
        if self._device_rows is None:
            if self.device.type == "cpu":
                return self._host_rows
            self._device_rows = self._make_device_rows()
        if self._device_rows is self._host_rows:
            return self._host_rows
        # The step before was marked, after it was sent, as the last of its episode if that was cut short. Where
        # observations are stored once, the next step holds one as well.
        n_new = 1 + self._n_pending + int(self.optimize_memory_usage)
        if n_new >= self.buffer_size:
            self._device_rows.copy_(self._host_rows)
        elif self._n_pending > 0:
            first = self.pos - self._n_pending - 1
            steps = np.arange(first, first + n_new) % self.buffer_size
            new_rows = th.from_numpy(self._rows[steps]).to(self.device)
            shape = (self.buffer_size, self.n_envs, -1)
            self._device_rows.view(shape).index_copy_(0, th.from_numpy(steps).to(self.device), new_rows)
        self._n_pending = 0
        return self._device_rows

    def _make_device_rows(self) -> th.Tensor:
        """
        :return: memory for a copy of the rows; the rows themselves where the device has too little
        """
        try:
            return th.zeros_like(self._host_rows, device=self.device)
        except th.cuda.OutOfMemoryError:
            warnings.warn(
                f"The replay buffer ({self._rows.nbytes / 1e9:.2f} GB) does not fit into the memory of {self.device}: "
                "it stays in the computer's own, which is slower",
                stacklevel=2,
            )
            return self._host_rows

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in REBUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view_rows()


def _warn_if_too_large(n_bytes: int) -> None:
    """
    :param n_bytes: memory that a replay buffer will take: the system gives it bit by bit, as it fills
    """
    if psutil is None:
        return
    available = psutil.virtual_memory().available
    if n_bytes > available:
        warnings.warn(
            f"The replay buffer will take {n_bytes / 1e9:.2f} GB of memory, but only {available / 1e9:.2f} GB are "
            "available: the training may be killed when it is full. A smaller buffer_size takes less",
            stacklevel=2,
        )


def make_replay_buffer(model: OffPolicyAlgorithm) -> ReplayBuffer:
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
        elif _can_be_packed(model.observation_space):
            buffer_class = PackedReplayBuffer
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


def _can_be_packed(space: spaces.Space) -> bool:
    """
    :param space: an observation space
    :return: whether its observations are vectors of float32
    """
    return isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype == np.float32


def end_open_episodes(replay_buffer: ReplayBuffer) -> None:
    """
    Make a time-out of each env's last row whose episode is still open: what follows comes from another episode. Where
    the replay buffer takes time-outs for terminal states, it is one.

    :param replay_buffer: a replay buffer
    """
    if not replay_buffer.full and replay_buffer.pos == 0:
        return
    last = (replay_buffer.pos - 1) % replay_buffer.buffer_size
    for env_idx in np.flatnonzero(replay_buffer.dones[last] == 0):
        replay_buffer.dones[last, env_idx] = 1
        if replay_buffer.handle_timeout_termination and not replay_buffer.optimize_memory_usage:
            # Bootstrapped. With `optimize_memory_usage` the next observation is about to be overwritten
            replay_buffer.timeouts[last, env_idx] = 1
        if isinstance(replay_buffer, HerReplayBuffer):
            replay_buffer._compute_episode_length(int(env_idx))


def check_replay_buffer_arguments(model: OffPolicyAlgorithm) -> None:
    """
    :param model: the agent
    :raises ValueError: there is no replay buffer with all of its options
    """
    buffer_class = model.replay_buffer_class
    if buffer_class is not None and not (isinstance(buffer_class, type) and issubclass(buffer_class, ReplayBuffer)):
        raise ValueError(f"replay_buffer_class={buffer_class!r} is not allowed, expected a ReplayBuffer class or None")
    if not isinstance(model.replay_buffer_kwargs, dict):
        raise ValueError(
            f"replay_buffer_kwargs={model.replay_buffer_kwargs!r} is not allowed, expected a dictionary or None"
        )
    if buffer_class is None:
        # SB3 writes the latter two into the user's own dictionary
        known = {_HANDLE_TIMEOUTS, *(("n_steps", "gamma") if model.n_steps > 1 else ())}
        check_known("ReplayBuffer", model.replay_buffer_kwargs, known)
    check_bool(_HANDLE_TIMEOUTS, model.replay_buffer_kwargs.get(_HANDLE_TIMEOUTS, True))
    has_dict_obs = isinstance(model.observation_space, spaces.Dict)
    if model.optimize_memory_usage and has_dict_obs:
        raise ValueError("optimize_memory_usage=True is not allowed with Dict observations, expected False")
    if model.optimize_memory_usage and model.buffer_size < 2 * model.n_envs:
        raise ValueError(
            f"buffer_size={model.buffer_size} is not allowed with optimize_memory_usage=True, expected at least "
            f"{2 * model.n_envs}: two steps of each env"
        )
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


def check_terminations_can_be_stored(replay_buffer: ReplayBuffer, hook: RewardShaping) -> None:
    """
    Check that a replay buffer knows time-outs, which a hook that changes terminations needs.

    :param replay_buffer: the agent's replay buffer
    :param hook: the shaping hook
    :raises ValueError: the replay buffer does not
    """
    # A user's own class may lack these attributes
    knows_timeouts = getattr(replay_buffer, _HANDLE_TIMEOUTS, True)
    if not knows_timeouts or getattr(replay_buffer, "optimize_memory_usage", False):
        raise ValueError(
            f"reward_shaping={hook!r} changes terminations, which is not allowed with "
            "optimize_memory_usage=True or handle_timeout_termination=False"
        )
