"""
One peer of ``speed.py`` in a separate process, which works only on request.

It gets its job as JSON on the command line and prints ``{}`` when it is ready. For each number of steps on standard
input it prints how many it took and how long they lasted; when the input ends, its memory.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch as th
from cells import CAR_RACING, Cell
from floor import UpdateProducts, count_flops
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


class Work(Protocol):
    """What a worker does."""

    def advance(self, steps: int) -> int:
        """
        Take steps.

        :return: how many were taken: whole rollouts
        """

    def figures(self) -> dict[str, Any]:
        """Return figures at the end of the measurement."""


class Training:
    """
    Training of a cell.

    :param own_kwargs: arguments that only TD3X has
    """

    def __init__(self, peer: str, cell: Cell, own_kwargs: dict[str, Any], device: str):
        self.cell = cell
        self.model = make_model(peer, cell, own_kwargs, device)
        assert self.model.replay_buffer is not None
        fill(self.model.replay_buffer)
        self._learn(LEARNING_STARTS)
        # At least two rollouts, since SBX compiles updates with and without the actor
        warm_up(self._learn, 2 * cell.n_envs * cell.train_freq)

    def advance(self, steps: int) -> int:
        taken = self._learn(steps)
        wait_for_gpu()
        return taken

    def _learn(self, steps: int) -> int:
        """Train, and return the env steps until the end of the last rollout."""
        before = self.model.num_timesteps
        self.model.learn(steps, reset_num_timesteps=False)
        return self.model.num_timesteps - before

    def figures(self) -> dict[str, Any]:
        return {"replay_bytes": replay_bytes(self.model.replay_buffer)}


class Updates(Training):
    """Updates only, each with the sampling of its batch; see ``Training``."""

    def advance(self, steps: int) -> int:
        self.model.train(gradient_steps=steps, batch_size=self.cell.batch_size)
        wait_for_gpu()
        return steps

    def figures(self) -> dict[str, Any]:
        return {**super().figures(), "flops_of_2_updates": count_flops(lambda: self.advance(2))}


class UpdateFloor:
    """Matrix products of the updates of a cell."""

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
        self.products.run(steps)
        return steps

    def figures(self) -> dict[str, Any]:
        return {"flops_of_2_updates": count_flops(lambda: self.products.run(2))}


class Floor(UpdateFloor):
    """Training loop with the steps of the envs, with random actions, and the matrix products only."""

    def advance(self, steps: int) -> int:
        n_rollouts = -(-steps // self.cell.least_steps)
        for _ in range(n_rollouts):
            for _ in range(self.cell.train_freq):
                self.env.step(np.stack([self.env.action_space.sample() for _ in range(self.cell.n_envs)]))
            self.products.run(self.cell.gradient_steps)
        return n_rollouts * self.cell.least_steps


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
    """
    Make the envs of a cell.

    :return: the envs, each in a ``Monitor``
    """
    vec_env_cls = SubprocVecEnv if cell.processes else DummyVecEnv
    env = make_vec_env(make_env, n_envs=cell.n_envs, seed=0, env_kwargs={"env_id": cell.env}, vec_env_cls=vec_env_cls)
    return VecNormalize(env) if cell.normalize else env


def make_env(env_id: str) -> gym.Env:
    """
    Make an env.

    :return: the env; CarRacing has four gray frames of 84x84 as observations
    """
    if env_id != CAR_RACING:
        return gym.make(env_id)
    env: gym.Env = gym.wrappers.GrayscaleObservation(gym.make(env_id))
    return gym.wrappers.FrameStackObservation(gym.wrappers.ResizeObservation(env, (84, 84)), 4)


def fill(replay_buffer: ReplayBuffer) -> None:
    """
    Fill a replay buffer with random transitions, so that batches come from all of its memory, as late in a training.
    """
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


def wait_for_gpu() -> None:
    """Finish the work that was launched, so that the time of a segment is its own."""
    if th.cuda.is_available():
        th.cuda.synchronize()


def warm_up(advance: Callable[[int], int], chunk: int) -> None:
    """
    Advance until caches and thread pools have settled.

    :param advance: function that takes a number of steps
    """
    start = time.perf_counter()
    steps = 0
    while steps == 0 or (steps < WARM_UP_UPDATES and time.perf_counter() - start < WARM_UP_SECONDS):
        steps += advance(chunk)


def replay_bytes(replay_buffer: ReplayBuffer | None) -> int:
    """
    Return the memory of a replay buffer.

    :return: bytes of its arrays
    """
    if isinstance(replay_buffer, PackedReplayBuffer):
        return sum(block.nbytes for block in replay_buffer.blocks.values())
    return sum(array.nbytes for array in vars(replay_buffer).values() if isinstance(array, np.ndarray))


def peak_bytes() -> int | None:
    """
    Return the peak memory of this process.

    :return: bytes; None: the system does not say
    """
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def make_work(job: dict[str, Any]) -> Work:
    """
    Prepare a job.

    :param job: what ``speed.py`` asks for
    """
    peer, precision = job["peer"], job["precision"]
    own_kwargs = {} if precision == "float32" else {"precision": precision}
    cell = Cell(**job["cell"])
    if peer == "floor":
        return (UpdateFloor if cell.updates_only else Floor)(cell, precision)
    if job["overlap"]:
        own_kwargs["overlap_updates"] = True
    return (Updates if cell.updates_only else Training)(peer, cell, own_kwargs, job["device"])


def main() -> None:
    """Do one job."""
    job = json.loads(sys.argv[1])
    # Envs and libraries print too; their output goes to standard error
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    th.set_num_threads(job["threads"])
    work = make_work(job)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        steps = work.advance(int(line))
        print(json.dumps({"steps": steps, "seconds": time.perf_counter() - start}), file=answers, flush=True)
    # Before the figures, which take memory too
    peak = peak_bytes()
    print(json.dumps({"peak_bytes": peak, **work.figures()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
