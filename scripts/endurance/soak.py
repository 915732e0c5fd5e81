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

import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.studies.options import at_least


def usage() -> str:
    """Describe the resident memory, the open file descriptors and the living child processes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    descriptors, processes = len(os.listdir("/proc/self/fd")), len(multiprocessing.active_children())
    return f"{memory:.1f} MiB, {descriptors} descriptors, {processes} processes"


class Usage(BaseCallback):
    """
    Print what the process uses.

    :param every: env timesteps between two lines
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def _on_step(self) -> bool:
        if self.num_timesteps // self.every > (self.num_timesteps - self.model.n_envs) // self.every:
            print(f"{self.num_timesteps} steps: {usage()}", flush=True)
        return True


def main() -> None:
    """Train, and print what the process uses: before, every twentieth of the training, and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(20), default=2_000_000, help="env timesteps")
    parser.add_argument("--n-envs", type=at_least(1), default=8, help="number of envs, each in a separate process")
    parser.add_argument("--save-freq", type=at_least(1), default=10_000, help="env timesteps between two checkpoints")
    args = parser.parse_args()

    th.set_num_threads(1)
    start = time.monotonic()
    print(f"before: {usage()}")
    env = make_vec_env("Pendulum-v1", args.n_envs, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    # The replay buffer is full after the first twentieth, and memory should not grow after the second
    model = TD3X(
        "MlpPolicy",
        env,
        batch_size=16,
        buffer_size=args.steps // 20,
        train_freq=8,
        policy_kwargs={"net_arch": [8]},
        device="cpu",
    )
    callback = Usage(args.steps // 20)
    with tempfile.TemporaryDirectory() as folder:
        model.learn(args.steps, [callback, ResumableCheckpoint(folder, args.save_freq)])
    env.close()
    # Each process object of Python holds two descriptors
    del env, model, callback
    gc.collect()
    print(f"after closing the envs: {usage()}; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
