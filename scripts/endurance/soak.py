"""
Train for a long time with checkpoints, and print whether memory, file descriptors or processes grow::

    python scripts/endurance/soak.py --steps 2000000
"""

import argparse
import gc
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.studies.options import at_least


class TrivialEnv(gym.Env[np.ndarray, np.ndarray]):
    """An env that does nothing, in episodes of 100 steps."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        return np.full(2, self.steps / 100, np.float32), float(action[0]), False, self.steps == 100, {}


class Usage(BaseCallback):
    """
    Print and record what the process uses.

    :param every: env timesteps between two measurements
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.measurements: list[tuple[int, int, int]] = []

    def _on_step(self) -> bool:
        if self.num_timesteps // self.every > (self.num_timesteps - self.model.n_envs) // self.every:
            self.measurements.append(usage())
            rss, descriptors, processes = self.measurements[-1]
            print(
                f"{self.num_timesteps} steps: {rss / 2**20:.1f} MiB, {descriptors} descriptors, {processes} processes",
                flush=True,
            )
        return True


def usage() -> tuple[int, int, int]:
    """
    Measure what the process uses.

    :return: resident memory in bytes, open file descriptors, and living child processes
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(multiprocessing.active_children()),
    )


def main() -> None:
    """Train, and print what has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(20), default=2_000_000, help="env timesteps")
    parser.add_argument("--n-envs", type=at_least(1), default=8, help="number of envs, each in a separate process")
    parser.add_argument("--save-freq", type=at_least(1), default=10_000, help="env timesteps between two checkpoints")
    args = parser.parse_args()

    th.set_num_threads(1)
    # Full after the first tenth
    buffer_size = args.steps // 20
    start, before = time.monotonic(), usage()
    env = SubprocVecEnv([lambda: Monitor(TrivialEnv())] * args.n_envs, "fork")
    model = TD3X(
        "MlpPolicy",
        env,
        batch_size=16,
        buffer_size=buffer_size,
        train_freq=8,
        policy_kwargs={"net_arch": [8]},
        device="cpu",
    )
    callback = Usage(args.steps // 20)
    with tempfile.TemporaryDirectory() as folder:
        model.learn(args.steps, [callback, ResumableCheckpoint(folder, args.save_freq)])
    env.close()
    # Each process object of Python holds two descriptors
    del env, model, callback.model, callback.locals
    gc.collect()
    # The first tenth is warm-up
    first, last, after = callback.measurements[1], callback.measurements[-1], usage()
    print(f"{args.steps} steps with {args.n_envs} envs in {time.monotonic() - start:.0f} s")
    print(f"memory: {100 * (last[0] / first[0] - 1):+.2f}% since the first tenth")
    print(
        f"descriptors: {before[1]} before, {first[1]} then {last[1]} while training, {after[1]} after closing the envs"
    )
    print(f"child processes: {last[2]} while training, {after[2]} after closing the envs")


if __name__ == "__main__":
    main()
