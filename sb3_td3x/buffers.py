"""The replay buffer of TD3X, and the choice between it and SB3's."""

import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.files.replay import register_replay_buffer
from sb3_td3x.normalization import BatchNormalizer
from sb3_td3x.priorities import Priorities
from sb3_td3x.shaping import RewardShaping
from sb3_td3x.validation import check_bool, check_known

# As in SB3, memory is checked where psutil is installed
try:
    import psutil  # type: ignore[import-untyped]
except ImportError:
    psutil = None

# The only argument of the replay buffer that is not also an argument of the agent
_HANDLE_TIMEOUTS = "handle_timeout_termination"
# Name of the block with everything but images
_ROWS = "rows"
# Attributes that are made again after unpickling
REBUILT = (
    "columns",
    "_widths",
    "_host_blocks",
    "_device_blocks",
    "_newest_step",
    "_n_pending",
    "_normalizer",
    "_tree",
    "_n_unprioritized",
    "_drawn_rows",
)

Blocks = dict[str, th.Tensor]


class _Array:
    """One of SB3's arrays: a view of the memory of a ``PackedReplayBuffer``, also after an assignment."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, replay_buffer: "PackedReplayBuffer | None", owner: type) -> Any:
        columns = {} if replay_buffer is None else replay_buffer.columns
        if self.name in columns:
            return columns[self.name]
        parts = {name.partition(".")[2]: array for name, array in columns.items() if name.startswith(f"{self.name}.")}
        if not parts:
            raise AttributeError(self.name)
        return parts

    def __set__(self, replay_buffer: "PackedReplayBuffer", value: Any) -> None:
        array = self.__get__(replay_buffer, type(replay_buffer))
        if isinstance(array, dict):
            for key, part in array.items():
                part[...] = value[key]
        else:
            array[...] = value
        replay_buffer.mark_changed()


@register_replay_buffer("optimize_memory_usage", "n_steps", "gamma", "dtype", "prioritized_replay_alpha")
class PackedReplayBuffer(NStepReplayBuffer):
    """
    Replay buffer for all observation spaces. The numbers of a transition are one row of memory, so that a batch is one
    gather without conversions; images stay bytes, in memory of their own. SB3's arrays are views of that memory.

    A seed draws the same transitions as from SB3's replay buffers. Batches equal SB3's after the cast to float32. On a
    GPU they come from a copy of the memory there.

    :param buffer_size: Max number of transitions
    :param observation_space: Observation space
    :param action_space: Action space
    :param device: PyTorch device of the batches
    :param n_envs: Number of parallel environments
    :param optimize_memory_usage: Store each observation once: the next observation is that of the next row
    :param handle_timeout_termination: Handle timeout termination (due to timelimit) separately,
        not together with ``optimize_memory_usage``
    :param n_steps: Number of steps of the returns
    :param gamma: Discount factor of n-step returns
    :param dtype: Type of the numbers in memory: ``np.float32``, or ``np.float64`` if float32 is too coarse for what
        ``VecNormalize`` does with them
    :param prioritized_replay_alpha: α of prioritized sampling, see ``Priorities``; 0: uniform sampling
    """

    observations = _Array()
    next_observations = _Array()
    actions = _Array()
    rewards = _Array()
    dones = _Array()
    timeouts = _Array()

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_steps: int = 1,
        gamma: float = 0.99,
        dtype: type[np.floating] = np.float32,
        prioritized_replay_alpha: float = 0.0,
    ):
        if optimize_memory_usage and handle_timeout_termination:
            raise ValueError(
                "handle_timeout_termination=True is not allowed with optimize_memory_usage=True, expected False"
            )
        # SB3's own constructor would take the memory a second time
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.n_steps = n_steps
        self.gamma = gamma
        self.prioritized_replay_alpha = prioritized_replay_alpha
        # As of the last look at `priorities`
        self._priorities = None if prioritized_replay_alpha == 0 else np.zeros((self.buffer_size, n_envs), np.float32)
        self._max_priority = 1.0

        # None is the key of observations that are not a dictionary
        parts: dict[Any, spaces.Space] = {None: observation_space}
        if isinstance(observation_space, spaces.Dict):
            parts = dict(observation_space.spaces)
        self.keys = list(parts)
        shapes: dict[Any, Any] = {key: get_obs_shape(space) for key, space in parts.items()}
        images = {key: shape for key, shape in shapes.items() if parts[key].dtype == np.uint8}
        vectors = {key: shape for key, shape in shapes.items() if key not in images}
        next_name = "observations" if optimize_memory_usage else "next_observations"
        # Shapes of the columns in a row, in their order
        self._row: dict[str, tuple[int, ...]] = {
            **{_column("observations", key): shape for key, shape in vectors.items()},
            **{"actions": (self.action_dim,), "rewards": (), "dones": (), "timeouts": ()},
            **{_column(next_name, key): shape for key, shape in vectors.items()},
        }
        self.blocks = {_ROWS: np.zeros((self.buffer_size, n_envs, sum(map(math.prod, self._row.values()))), dtype)}
        for name in ("observations", next_name):
            for key, shape in images.items():
                self.blocks[_column(name, key)] = np.zeros((self.buffer_size, n_envs, *shape), np.uint8)
        _warn_if_too_large(sum(block.nbytes for block in self.blocks.values()))
        self._view_blocks()

    @property
    def dtype(self) -> type[np.floating]:
        """Type of the numbers in memory"""
        dtype: type[np.floating] = self.blocks[_ROWS].dtype.type
        return dtype

    def _view_blocks(self) -> None:
        """Make SB3's arrays, and the tensors that batches are gathered from, views of the memory."""
        self.columns = {name: block for name, block in self.blocks.items() if name != _ROWS}
        self._widths = [math.prod(shape) for shape in self._row.values()]
        parts = np.split(self.blocks[_ROWS], np.cumsum(self._widths)[:-1], axis=2)
        for (name, shape), part in zip(self._row.items(), parts, strict=True):
            self.columns[name] = part.reshape(self.buffer_size, self.n_envs, *shape)
        self._host_blocks = {name: th.from_numpy(block).flatten(0, 1) for name, block in self.blocks.items()}
        self._device_blocks: Blocks | None = None
        self._normalizer: BatchNormalizer | None = None
        self._tree: Priorities | None = None
        self._n_unprioritized = 0
        self.mark_changed()

    def mark_changed(self) -> None:
        """Let the copy on a GPU take over all rows before the next batch, after they were written to directly."""
        self._n_pending = self.buffer_size

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: np.ndarray,
        reward: np.ndarray,
        done: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """
        Store one transition of each env.

        :param obs: observations, (n_envs, ...), or a dictionary of such arrays
        :param next_obs: observations that the actions led to
        :param action: scaled actions, ``(n_envs, *action_shape)``
        :param reward: rewards, (n_envs,)
        :param done: whether the episode ended, by termination or time-out, (n_envs,)
        :param infos: the envs' infos
        """
        next_pos = (self.pos + 1) % self.buffer_size
        self._store("observations", self.pos, obs)
        if self.optimize_memory_usage:
            self._store("observations", next_pos, next_obs)
        else:
            self._store("next_observations", self.pos, next_obs)
        columns = self.columns
        columns["actions"][self.pos] = np.asarray(action, np.float32).reshape(self.n_envs, self.action_dim)
        # SB3 stores rewards in float32
        columns["rewards"][self.pos] = np.asarray(reward, np.float32)
        columns["dones"][self.pos] = done
        if self.handle_timeout_termination:
            columns["timeouts"][self.pos] = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        self._n_pending += 1
        self._n_unprioritized += 1
        self.pos = next_pos
        if next_pos == 0:
            self.full = True

    def _store(self, name: str, step: int, obs: Any) -> None:
        """Write the observations of one step."""
        for key in self.keys:
            row = self.columns[_column(name, key)][step]
            # Discrete observations lack the last dimension
            row[...] = np.reshape(obs if key is None else obs[key], row.shape)

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """
        Sample transitions with replacement.

        :param batch_size: Number of transitions
        :param env: associated gym VecEnv to normalize the observations/rewards when sampling
        :return: the transitions
        """
        blocks = self.blocks_on_device()
        rows = th.from_numpy(self.draw(batch_size)) if self._tree is None else self.draw_by_priority(batch_size)
        return self._get_rows(blocks, rows, env)

    def draw(self, batch_size: int) -> np.ndarray:
        """
        Draw rows with replacement from the same random numbers as SB3.

        :param batch_size: Number of transitions
        :return: their rows, (batch_size,)
        """
        return self._with_random_envs(self._draw_steps(batch_size))

    def _draw_steps(self, batch_size: int) -> np.ndarray:
        """Draw steps with replacement."""
        if self.optimize_memory_usage and self.full:
            # The oldest step holds the observation that the newest transition led to
            return (np.random.randint(1, self.buffer_size, size=batch_size) + self.pos) % self.buffer_size
        return np.random.randint(0, self.size(), size=batch_size)

    def _with_random_envs(self, steps: np.ndarray) -> np.ndarray:
        """Return the rows of steps, each of an env drawn at random."""
        if self.n_envs == 1:
            return steps
        return steps * self.n_envs + np.random.randint(0, self.n_envs, size=len(steps))

    def draw_by_priority(self, batch_size: int) -> th.Tensor:
        """
        Draw rows with replacement by their priorities. Call ``blocks_on_device`` first.

        :param batch_size: Number of transitions
        :return: their rows on the device, (batch_size,)
        """
        assert self._tree is not None
        self._drawn_rows = self._tree.draw(batch_size)
        return self._drawn_rows

    def update_priorities(self, td_errors: th.Tensor) -> None:
        """
        Change the priorities of the rows that were drawn last.

        :param td_errors: their TD errors, (batch_size,)
        """
        assert self._tree is not None
        self._tree.update(self._drawn_rows, td_errors)

    @property
    def priorities(self) -> np.ndarray | None:
        """A copy of the priorities in main memory, (buffer_size, n_envs); None if sampling is uniform"""
        if self._priorities is not None and (self._tree is not None or self._n_unprioritized > 0):
            tree = self._current_tree()
            self._priorities[...] = tree.values().reshape(self._priorities.shape)
            self._max_priority = tree.maximum.item()
        return self._priorities

    @property
    def max_priority(self) -> float | None:
        """The highest priority so far; None if sampling is uniform"""
        return None if self.priorities is None else self._max_priority

    @max_priority.setter
    def max_priority(self, value: float) -> None:
        self._max_priority = value

    @property
    def priority_state(self) -> list[th.Tensor]:
        """All tensors that ``update_priorities`` changes"""
        return [] if self._tree is None else self._tree.state

    def _current_tree(self) -> Priorities:
        """Return the priorities on the device, with those of the transitions added since the last call."""
        assert self._priorities is not None
        if self._tree is None:
            self._tree = Priorities(
                self._priorities, self._max_priority, self.prioritized_replay_alpha, th.device(self.device)
            )
        if self._n_unprioritized > 0:
            n_new = min(self._n_unprioritized, self.buffer_size)
            for first, end in self._ranges((self.pos - n_new) % self.buffer_size, n_new):
                self._tree.fill(first * self.n_envs, end * self.n_envs, self._tree.maximum)
            if self.optimize_memory_usage:
                # Its observation is that after the newest transition
                self._tree.fill(self.pos * self.n_envs, (self.pos + 1) * self.n_envs, 0)
            self._n_unprioritized = 0
        return self._tree

    def _ranges(self, first: int, n_steps: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of the one or two parts of memory in which some steps lie."""
        end = first + n_steps
        yield first, min(end, self.buffer_size)
        if end > self.buffer_size:
            yield 0, end - self.buffer_size

    def _get_samples(self, batch_inds: np.ndarray, env: VecNormalize | None = None) -> ReplayBufferSamples:
        return self._get_rows(self.blocks_on_device(), th.from_numpy(self._with_random_envs(batch_inds)), env)

    def _get_rows(self, blocks: Blocks, rows: th.Tensor, env: VecNormalize | None) -> ReplayBufferSamples:
        """Return the transitions of some rows on the device."""
        batch = self.gather(blocks, rows.to(blocks[_ROWS].device), self.normalizer(env))
        return batch if blocks[_ROWS].device.type == self.device.type else _to_device(batch, self.device)

    def gather(
        self, blocks: Blocks, indices: th.Tensor, normalizer: BatchNormalizer | None = None
    ) -> ReplayBufferSamples:
        """
        Return the transitions of some rows.

        :param blocks: the result of ``blocks_on_device``
        :param indices: the rows, on the same device, (batch_size,)
        :param normalizer: normalizes observations and rewards, if given
        :return: the transitions, in float32 and bytes
        """
        rows = blocks[_ROWS]
        if self.n_steps > 1:
            constants = _n_step_constants(self.n_steps, self.n_envs, self.gamma, rows.device)
            sequences = (indices.unsqueeze(1) + constants.rows) % len(rows)
            steps = rows.index_select(0, sequences.flatten()).view(*sequences.shape, -1)
            rewards, discounts, last_indices = self._n_step_returns(steps, sequences, constants, normalizer)
            first, last = self._split(steps[:, 0]), self._split(rows.index_select(0, last_indices))
        else:
            first = last = self._split(rows.index_select(0, indices))
            rewards = first["rewards"] if normalizer is None else normalizer.rewards(first["rewards"])
            discounts, last_indices = None, indices
        next_rows, next_indices, next_name = last, last_indices, "next_observations"
        if self.optimize_memory_usage:
            next_indices = (last_indices + self.n_envs) % len(rows)
            next_rows, next_name = self._split(rows.index_select(0, next_indices)), "observations"

        def observations(name: str, rows: Blocks, indices: th.Tensor) -> Any:
            parts = {}
            for key in self.keys:
                column = _column(name, key)
                part = rows[column] if column in rows else blocks[column].index_select(0, indices)
                part = part if normalizer is None else normalizer.observations(part, key)
                parts[key] = part.float() if part.dtype == th.float64 else part
            return parts.get(None, parts)

        samples: Any = DictReplayBufferSamples if None not in self.keys else ReplayBufferSamples
        batch: ReplayBufferSamples = samples(
            observations("observations", first, indices),
            first["actions"].float(),
            observations(next_name, next_rows, next_indices),
            (last["dones"] * (1 - last["timeouts"])).float(),
            rewards.float(),
            discounts,
        )
        return batch

    def _first_number(self, column: str) -> int:
        """Return where a column begins in a row."""
        return sum(self._widths[: [*self._row].index(column)])

    def _split(self, rows: th.Tensor) -> Blocks:
        """Return the columns of a batch of rows; single numbers as (batch_size, 1)."""
        parts = rows.split_with_sizes(self._widths, dim=1)
        return {
            name: part if len(shape) <= 1 else part.reshape(-1, *shape)
            for part, (name, shape) in zip(parts, self._row.items(), strict=True)
        }

    def _n_step_returns(
        self,
        steps: th.Tensor,
        sequences: th.Tensor,
        constants: "_NStepConstants",
        normalizer: BatchNormalizer | None,
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        Sum up rewards over ``n_steps`` steps, or up to the end of the episode or the newest step.

        :param steps: the transitions that follow each other, (b, n_steps, width)
        :param sequences: their rows, (b, n_steps)
        :param constants: numbers that depend on the settings only
        :param normalizer: normalizes rewards, if given
        :return: sums of discounted rewards, (b, 1), discounts of the value that follows, (b, 1), last rows, (b,)
        """
        # These three columns are neighbours
        rewards, dones, timeouts = steps.narrow(2, self._first_number("rewards"), 3).unbind(2)
        if normalizer is not None:
            rewards = normalizer.rewards(rewards)
        is_newest = sequences // self.n_envs == self._newest_step
        is_end = dones.maximum(timeouts).maximum(is_newest)
        is_end[:, -1] = 1
        # The first maximum
        last = is_end.argmax(dim=1, keepdim=True)
        returns = (rewards * constants.discounts * (constants.steps <= last)).sum(dim=1, keepdim=True)
        return returns, constants.next_discounts.take(last), sequences.gather(1, last).squeeze(1)

    def normalizer(self, env: VecNormalize | None) -> BatchNormalizer | None:
        """
        Return the current statistics of ``VecNormalize`` on the device of the batches.

        :param env: the env's wrapper, or None
        """
        if env is None:
            return None
        if self._normalizer is None or self._normalizer.env is not env:
            self._normalizer = BatchNormalizer(env, self.blocks_on_device()[_ROWS].device)
        self._normalizer.refresh()
        return self._normalizer

    def blocks_on_device(self) -> Blocks:
        """
        Return the memory to gather from. A copy on a GPU follows what is added and arrays that are assigned; after
        writing into an array call ``mark_changed``.

        :return: the blocks, (buffer_size * n_envs, ...). On the CPU, and where a GPU has too little memory, those of
            the replay buffer itself
        """
        if self._device_blocks is None:
            self._device_blocks = self._host_blocks if self.device.type == "cpu" else self._make_device_blocks()
            self._newest_step = th.zeros((), dtype=th.int64, device=self._device_blocks[_ROWS].device)
        if self.n_steps > 1:
            self._newest_step.fill_((self.pos - 1) % self.buffer_size)
        if self._device_blocks is not self._host_blocks:
            self._upload()
        if self._priorities is not None:
            self._current_tree()
        return self._device_blocks

    def _upload(self) -> None:
        """Copy the steps that are new to the device."""
        assert self._device_blocks is not None
        # The last step before may have been marked as the end of its episode. With `optimize_memory_usage` the next
        # step has changed, too
        n_new = 1 + self._n_pending + int(self.optimize_memory_usage)
        first, n_steps = 0, self.buffer_size
        if n_new < self.buffer_size:
            first, n_steps = (self.pos - self._n_pending - 1) % self.buffer_size, n_new
        if self._n_pending > 0:
            for name, block in self._device_blocks.items():
                for start, end in self._ranges(first, n_steps):
                    rows = slice(start * self.n_envs, end * self.n_envs)
                    block[rows].copy_(self._host_blocks[name][rows], non_blocking=True)
        self._n_pending = 0

    def _make_device_blocks(self) -> Blocks:
        """Return memory on the device; the replay buffer's own where the device has too little."""
        try:
            return {name: th.zeros_like(block, device=self.device) for name, block in self._host_blocks.items()}
        except th.cuda.OutOfMemoryError:
            size = sum(block.nbytes for block in self.blocks.values())
            warnings.warn(
                f"The replay buffer ({size / 1e9:.2f} GB) does not fit into the memory of {self.device}: "
                "it stays in the computer's main memory, which is slower",
                stacklevel=2,
            )
            return self._host_blocks

    def to_sb3(self) -> ReplayBuffer:
        """
        Copy the transitions into a replay buffer of SB3, for use where sb3_td3x is not installed::

            save_to_pkl("replay_buffer.pkl", model.replay_buffer.to_sb3())

        :return: the replay buffer
        :raises ValueError: SB3 has no replay buffer for Dict observations with n-step returns or with
            ``optimize_memory_usage``
        """
        options: dict[str, Any] = {"handle_timeout_termination": self.handle_timeout_termination}
        buffer_class: type[ReplayBuffer] = ReplayBuffer
        if None not in self.keys:
            if self.n_steps > 1 or self.optimize_memory_usage:
                raise ValueError("SB3 stores Dict observations without n-step returns and optimize_memory_usage only")
            buffer_class = DictReplayBuffer
        elif self.n_steps > 1:
            buffer_class = NStepReplayBuffer
            options.update(n_steps=self.n_steps, gamma=self.gamma)
        replay_buffer = buffer_class(
            self.buffer_size * self.n_envs,
            self.observation_space,
            self.action_space,
            self.device,
            self.n_envs,
            self.optimize_memory_usage,
            **options,
        )
        for name, column in self.columns.items():
            array, _, key = name.partition(".")
            target = getattr(replay_buffer, array)
            (target[key] if key else target)[...] = column
        replay_buffer.pos, replay_buffer.full = self.pos, self.full
        return replay_buffer

    def __getstate__(self) -> dict[str, Any]:
        # With the current priorities
        state = {**vars(self), "_priorities": self.priorities, "_max_priority": self.max_priority}
        return {name: value for name, value in state.items() if name not in REBUILT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._view_blocks()


class _NStepConstants(NamedTuple):
    """For each of n steps its index, the number of rows up to it, its discount, and that of the value after it."""

    steps: th.Tensor
    rows: th.Tensor
    discounts: th.Tensor
    next_discounts: th.Tensor


@functools.lru_cache
def _n_step_constants(n_steps: int, n_envs: int, gamma: float, device: th.device) -> _NStepConstants:
    """Return what the index arithmetic of n-step returns needs again and again."""
    steps = th.arange(n_steps + 1, device=device)
    powers = th.pow(gamma, steps)
    return _NStepConstants(steps[:-1], steps[:-1] * n_envs, powers[:-1], powers[1:])


def _column(name: str, key: str | None) -> str:
    """Return the name of the column of observations with a key."""
    return name if key is None else f"{name}.{key}"


def _to_device(batch: Any, device: th.device) -> Any:
    """Return a batch on a device."""
    if isinstance(batch, dict):
        return {key: _to_device(part, device) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return type(batch)(*(_to_device(part, device) for part in batch))
    return batch if batch is None else batch.to(device)


def _warn_if_too_large(n_bytes: int) -> None:
    """Warn if a full replay buffer will exceed the available memory, which the system provides as it fills."""
    if psutil is None:
        return
    available = psutil.virtual_memory().available
    if n_bytes > available:
        warnings.warn(
            f"The replay buffer will take {n_bytes / 1e9:.2f} GB of memory, but only {available / 1e9:.2f} GB are "
            "available: the training may be killed when it is full. A smaller buffer_size takes less",
            stacklevel=2,
        )


def make_replay_buffer(model: Any) -> ReplayBuffer:
    """
    Make an empty replay buffer of the class that the agent's arguments ask for.

    :param model: the ``TD3X``
    :return: the replay buffer
    :raises ValueError: the class needs an env
    """
    buffer_class = model.replay_buffer_class
    # A copy: the user's dictionary is saved with the agent
    kwargs = dict(model.replay_buffer_kwargs)
    if buffer_class is None:
        buffer_class = PackedReplayBuffer
        kwargs.update(n_steps=model.n_steps, gamma=model.gamma)
        kwargs["prioritized_replay_alpha"] = model.prioritized_replay_alpha
        if _needs_float64(model._vec_normalize_env):
            kwargs["dtype"] = np.float64
    elif issubclass(buffer_class, HerReplayBuffer):
        if model.env is None:
            raise ValueError(f"env=None is not allowed with {buffer_class.__name__}, expected the env of the goals")
        kwargs["env"] = model.env
    made: ReplayBuffer = buffer_class(
        model.buffer_size,
        model.observation_space,
        model.action_space,
        device=model.device,
        n_envs=model.n_envs,
        optimize_memory_usage=model.optimize_memory_usage,
        **kwargs,
    )
    return made


def _needs_float64(env: VecNormalize | None) -> bool:
    """Return whether ``VecNormalize`` may subtract nearly equal numbers that float32 cannot tell apart."""
    if env is None or not env.norm_obs:
        return False
    space = env.observation_space
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    return any(part.dtype is not None and part.dtype.itemsize > 4 for part in parts)


def can_be_sampled(replay_buffer: ReplayBuffer) -> bool:
    """
    Return whether a replay buffer has transitions to sample.

    :param replay_buffer: the replay buffer; HER's needs a complete episode
    """
    if isinstance(replay_buffer, HerReplayBuffer):
        return bool((replay_buffer.ep_length > 0).any())
    return replay_buffer.size() > 0


def end_open_episodes(replay_buffer: ReplayBuffer) -> None:
    """
    Mark the last row of each env as a time-out if its episode is still open, because the next row will belong to
    another episode. In a replay buffer that does not know time-outs it becomes a terminal state.

    :param replay_buffer: the replay buffer
    """
    if not replay_buffer.full and replay_buffer.pos == 0:
        return
    last = (replay_buffer.pos - 1) % replay_buffer.buffer_size
    for env_idx in np.flatnonzero(replay_buffer.dones[last] == 0):
        replay_buffer.dones[last, env_idx] = 1
        if replay_buffer.handle_timeout_termination and not replay_buffer.optimize_memory_usage:
            # With `optimize_memory_usage` the next observation is about to be overwritten, so its value is useless
            replay_buffer.timeouts[last, env_idx] = 1
        if isinstance(replay_buffer, HerReplayBuffer):
            replay_buffer._compute_episode_length(int(env_idx))


def check_replay_buffer_arguments(model: Any) -> None:
    """
    Check the agent's arguments of the replay buffer.

    :param model: the ``TD3X``
    :raises ValueError: no replay buffer has all of its options
    """
    buffer_class = model.replay_buffer_class
    if buffer_class is not None and not (isinstance(buffer_class, type) and issubclass(buffer_class, ReplayBuffer)):
        raise ValueError(f"replay_buffer_class={buffer_class!r} is not allowed, expected a ReplayBuffer class or None")
    if not isinstance(model.replay_buffer_kwargs, dict):
        raise ValueError(
            f"replay_buffer_kwargs={model.replay_buffer_kwargs!r} is not allowed, expected a dictionary or None"
        )
    if buffer_class is None:
        # SB3 writes the last two into the user's own dictionary
        known = {_HANDLE_TIMEOUTS, *(("n_steps", "gamma") if model.n_steps > 1 else ())}
        check_known("ReplayBuffer", model.replay_buffer_kwargs, known)
    check_bool(_HANDLE_TIMEOUTS, model.replay_buffer_kwargs.get(_HANDLE_TIMEOUTS, True))
    if model.optimize_memory_usage and model.buffer_size < 2 * model.n_envs:
        raise ValueError(
            f"buffer_size={model.buffer_size} is not allowed with optimize_memory_usage=True, expected at least "
            f"{2 * model.n_envs}: two steps of each env"
        )
    if model.prioritized_replay_alpha > 0 and buffer_class is not None:
        raise ValueError(
            f"prioritized_replay_alpha={model.prioritized_replay_alpha} is not allowed with "
            f"replay_buffer_class={buffer_class.__name__}, expected 0"
        )
    if model.n_steps > 1 and buffer_class is not None:
        warnings.warn(
            f"n_steps={model.n_steps} is not used: replay_buffer_class={buffer_class.__name__} "
            "decides on returns; configure it by replay_buffer_kwargs",
            stacklevel=2,
        )


def check_shaping(model: Any, hook: RewardShaping) -> None:
    """
    Check that a replay buffer can store what a shaping hook returns.

    :param model: the ``TD3X``
    :raises ValueError: it computes rewards itself, or does not know time-outs
    """
    buffer_class = model.replay_buffer_class or ReplayBuffer
    if issubclass(buffer_class, HerReplayBuffer):
        raise ValueError(
            f"reward_shaping={model.reward_shaping!r} is not allowed with {buffer_class.__name__}, "
            "which computes rewards from goals"
        )
    if hook.changes_terminations:
        check_terminations_can_be_stored(model.replay_buffer, hook)


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
