"""
The peers of ``speed.py``. Each has a process of its own, where it works only on request.

``prepare`` is called when the process starts, then ``measure`` for each segment.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from cells import CAR_RACING, Cell
from floor import UpdateProducts
from stable_baselines3 import TD3
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.buffers import PackedReplayBuffer

LEARNING_STARTS = 100
WARM_UP_UPDATES = 200
# Enough where so many updates would last minutes; compilation happens in the first ones
WARM_UP_SECONDS = 5.0
# Transitions drawn at a time, so that filling a replay buffer takes little memory
FILL_BLOCK = 1_000


class Training:
    """
    Training of a cell, or its updates only, each with the sampling of its batch.

    :param own_kwargs: arguments that only TD3X has
    """

    def __init__(self, peer: str, cell: Cell, own_kwargs: dict[str, Any], device: str):
        self.cell = cell
        self.model = make_model(peer, cell, own_kwargs, device)
        assert self.model.replay_buffer is not None
        fill(self.model.replay_buffer)
        self.replay_bytes: int | None = replay_bytes(self.model.replay_buffer)
        self.model.learn(LEARNING_STARTS)
        # At least two rollouts, since SBX compiles updates with and without the actor
        warm_up(self.advance, 2 * cell.least_steps)

    def advance(self, steps: int) -> int:
        """Train, and return how many steps were taken: whole rollouts."""
        before = self.model.num_timesteps
        if self.cell.updates_only:
            self.model.train(gradient_steps=steps, batch_size=self.cell.batch_size)
        else:
            self.model.learn(steps, reset_num_timesteps=False)
        if th.cuda.is_available():
            # The time of a segment includes the work that it launched
            th.cuda.synchronize()
        return steps if self.cell.updates_only else self.model.num_timesteps - before


class Floor:
    """The steps of the envs, with random actions, and the matrix products of the updates; or these products only."""

    replay_bytes = None

    def __init__(self, cell: Cell, precision: str):
        self.cell = cell
        self.env = make_cell_env(cell)
        assert self.env.observation_space.shape is not None
        assert self.env.action_space.shape is not None
        (obs_dim,), (action_dim,) = self.env.observation_space.shape, self.env.action_space.shape
        self.products = UpdateProducts(obs_dim, action_dim, cell.net_arch, cell.batch_size, getattr(th, precision))
        self.env.reset()
        warm_up(self.advance, cell.least_steps)

    def advance(self, steps: int) -> int:
        """Take steps, and return how many were taken: whole rollouts."""
        if self.cell.updates_only:
            self.products.run(steps)
            return steps
        n_rollouts = -(-steps // self.cell.least_steps)
        for _ in range(n_rollouts):
            for _ in range(self.cell.train_freq):
                self.env.step(np.stack([self.env.action_space.sample() for _ in range(self.cell.n_envs)]))
            self.products.run(self.cell.gradient_steps)
        return n_rollouts * self.cell.least_steps


# The peer of this process
_peer: Training | Floor


def prepare(name: str, cell: Cell, args: argparse.Namespace) -> None:
    """Make the peer of this process, with the options of ``speed.py``."""
    global _peer
    th.set_num_threads(args.threads)
    own_kwargs: dict[str, Any] = {} if args.precision == "float32" else {"precision": args.precision}
    if args.overlap:
        own_kwargs["overlap_updates"] = True
    _peer = Floor(cell, args.precision) if name == "floor" else Training(name, cell, own_kwargs, args.device)


def memory() -> int | None:
    """Return the bytes of the replay buffer of this process's peer."""
    return _peer.replay_bytes


def measure(steps: int) -> dict[str, float]:
    """Measure a segment, and return how many steps were taken, and their seconds."""
    start = time.perf_counter()
    return {"steps": _peer.advance(steps), "seconds": time.perf_counter() - start}


def make_model(peer: str, cell: Cell, own_kwargs: dict[str, Any], device: str) -> OffPolicyAlgorithm:
    """
    Make the agent of a peer.

    :param own_kwargs: arguments that only TD3X has
    :param device: PyTorch device; JAX takes a GPU where it has one
    """
    env = make_cell_env(cell)
    action_dim = env.action_space.shape[0]  # type: ignore[index]
    model: OffPolicyAlgorithm = algorithm(peer)(
        cell.policy,
        env,
        learning_rate=1e-3,
        buffer_size=cell.buffer_size,
        learning_starts=LEARNING_STARTS,
        batch_size=cell.batch_size,
        tau=0.005,
        gamma=0.99,
        train_freq=cell.train_freq,
        gradient_steps=cell.gradient_steps,
        action_noise=NormalActionNoise(np.zeros(action_dim), np.full(action_dim, 0.1)),
        policy_delay=2,
        target_policy_noise=0.2,
        target_noise_clip=0.5,
        policy_kwargs={"net_arch": list(cell.net_arch), **cell.policy_kwargs},
        seed=0,
        device=device,
        **(own_kwargs if peer == "td3x" else {}),
        **cell.arguments,
    )
    return model


def algorithm(peer: str) -> Callable[..., Any]:
    """Return the class of a peer's agent."""
    if peer == "sbx":
        from sbx import TD3 as SBXTD3  # type: ignore[import-not-found, import-untyped, unused-ignore]

        return SBXTD3  # type: ignore[no-any-return, unused-ignore]
    return {"td3x": TD3X, "sb3": TD3}[peer]


def make_cell_env(cell: Cell) -> VecEnv:
    """Make the envs of a cell, each in a ``Monitor``."""
    vec_env_cls = SubprocVecEnv if cell.processes else DummyVecEnv
    env = make_vec_env(make_env, n_envs=cell.n_envs, seed=0, env_kwargs={"env_id": cell.env}, vec_env_cls=vec_env_cls)
    return VecNormalize(env) if cell.normalize else env


def make_env(env_id: str) -> gym.Env:
    """Make an env; CarRacing has four gray frames of 84x84 as observations."""
    if env_id != CAR_RACING:
        return gym.make(env_id)
    env: gym.Env = gym.wrappers.GrayscaleObservation(gym.make(env_id))
    return gym.wrappers.FrameStackObservation(gym.wrappers.ResizeObservation(env, (84, 84)), 4)


def fill(replay_buffer: ReplayBuffer) -> None:
    """Fill a replay buffer with random transitions, so that batches come from all of its memory, as after long."""
    rng = np.random.default_rng(0)
    for name in ("observations", "next_observations", "actions", "rewards"):
        column: np.ndarray = getattr(replay_buffer, name)
        block = rng.uniform(-1, 1, size=(FILL_BLOCK, *column.shape[1:]))
        if np.issubdtype(column.dtype, np.integer):
            block = 127 * (block + 1)
        for start in range(0, len(column), FILL_BLOCK):
            rows = column[start : start + FILL_BLOCK]
            rows[...] = block[: len(rows)]
    replay_buffer.full = True


def warm_up(advance: Callable[[int], int], chunk: int) -> None:
    """Advance by chunks of steps until caches and thread pools have settled."""
    start = time.perf_counter()
    steps = 0
    while steps == 0 or (steps < WARM_UP_UPDATES and time.perf_counter() - start < WARM_UP_SECONDS):
        steps += advance(chunk)


def replay_bytes(replay_buffer: ReplayBuffer) -> int:
    """Return the memory of a replay buffer's arrays."""
    if isinstance(replay_buffer, PackedReplayBuffer):
        return sum(block.nbytes for block in replay_buffer.blocks.values())
    return sum(array.nbytes for array in vars(replay_buffer).values() if isinstance(array, np.ndarray))
