"""
Kill trainings at random moments, resume them, and check that nothing is lost but what came after the last checkpoint::

    python scripts/endurance/kills.py --kills 200

Exact trainings must end with the parameters of a training that was never killed.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint
from sb3_td3x.checkpoint.folder import list_checkpoints, newest_whole_checkpoint
from sb3_td3x.checkpoint.logs import cut_monitor_files
from sb3_td3x.files.atomic import TEMPORARY_PATTERN

# A forked child has everything imported
CONTEXT = multiprocessing.get_context("fork")


class Setting(NamedTuple):
    """
    A kind of training.

    :param in_processes: whether each env runs in a separate process
    :param exact: argument of ``ResumableCheckpoint``
    """

    name: str
    n_envs: int
    in_processes: bool
    exact: bool


SETTINGS = (
    Setting("exact, 1 env", 1, False, True),
    Setting("exact, 8 envs", 8, False, True),
    Setting("exact, 2 envs in processes", 2, True, True),
    Setting("1 env", 1, False, False),
    Setting("4 envs", 4, False, False),
)

FAILURES = (
    "damaged checkpoints",
    "lost checkpoints",
    "exact runs with other parameters",
    "monitor files with repeats",
)


def make_envs(setting: Setting, folder: Path) -> VecEnv:
    """Make normalized Pendulums, each with a ``Monitor`` that writes to the folder of the training."""

    def make_env(rank: int) -> gym.Env:
        path = folder / f"{rank}.monitor.csv"
        return Monitor(gym.make("Pendulum-v1"), str(path), override_existing=not path.exists())

    functions: list[Callable[[], gym.Env]] = [functools.partial(make_env, rank) for rank in range(setting.n_envs)]
    envs = SubprocVecEnv(functions, "fork") if setting.in_processes else DummyVecEnv(functions)
    return VecNormalize(envs)


def train(setting: Setting, folder: Path, steps: int, save_freq: int) -> None:
    """Train from the newest checkpoint, or from the start, and write the checksum of the parameters at the end."""
    os.setpgrp()
    checkpoints = folder / "checkpoints"
    if list_checkpoints(checkpoints):
        cut_monitor_files(folder, newest_whole_checkpoint(checkpoints).state["monitor_sizes"])
        model = TD3X.resume(checkpoints, make_envs(setting, folder))
    else:
        for path in folder.glob("*.csv"):
            path.unlink()
        model = TD3X(
            "MlpPolicy",
            make_envs(setting, folder),
            learning_starts=100,
            # Smaller than the training is long, so that rows are overwritten
            buffer_size=400,
            batch_size=16,
            train_freq=2,
            n_steps=3,
            policy_kwargs={"net_arch": [16]},
            action_noise=OrnsteinUhlenbeckActionNoise(np.zeros(1), 0.2 * np.ones(1)),
            reward_shaping={"sb3_td3x.shaping.RewardScale": {"scale": 0.1}},
            seed=1,
            device="cpu",
        )
    callback = ResumableCheckpoint(checkpoints, save_freq, exact=setting.exact, verbose=0)
    model.learn(steps - model.num_timesteps, callback, reset_num_timesteps=not model.num_timesteps)
    digest = hashlib.sha256()
    for parameter in model.policy.state_dict().values():
        digest.update(parameter.numpy().tobytes())
    (folder / "parameters").write_text(digest.hexdigest())


def run_until_killed(setting: Setting, folder: Path, args: argparse.Namespace, seconds: float | None) -> str | None:
    """
    Train in another process, and kill it.

    :param seconds: when to kill it; None: not at all
    :return: the checksum of the parameters; None: the training was killed before its end
    """
    process = CONTEXT.Process(target=train, args=(setting, folder, args.steps, args.save_freq))
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    # Processes of the envs outlive a killed training
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.exitcode not in (0, -signal.SIGKILL):
        raise SystemExit(f"{setting.name}: a resumed training ended with exit code {process.exitcode}")
    return (folder / "parameters").read_text() if process.exitcode == 0 else None


def main() -> int:
    """Kill trainings until there are enough kills, and return whether something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of SIGKILLs")
    parser.add_argument("--steps", type=int, default=1000, help="env timesteps of a training")
    parser.add_argument("--save-freq", type=int, default=50, help="env timesteps between two checkpoints")
    parser.add_argument("--seconds", type=float, default=1.0, help="longest time until a kill")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments of the kills")
    args = parser.parse_args()

    # In this process and its children; a pool of threads would not survive the fork
    th.set_num_threads(1)
    # Import PyTorch's optimizers once for all children
    th.optim.Adam([th.nn.Parameter(th.zeros(1))])
    rng = random.Random(args.seed)
    counts: Counter[str] = Counter()
    expected: dict[str, str | None] = {}
    start = time.monotonic()
    for setting in itertools.cycle(SETTINGS):
        if counts["kills"] >= args.kills:
            break
        if setting.exact and setting.name not in expected:
            with tempfile.TemporaryDirectory() as name:
                expected[setting.name] = run_until_killed(setting, Path(name), args, None)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            result, written = None, 0
            while result is None:
                # After enough kills the last training may end
                is_last = counts["kills"] >= args.kills
                result = run_until_killed(setting, folder, args, None if is_last else rng.uniform(0, args.seconds))
                counts["kills"] += result is None
                counts["kills while saving"] += any(folder.rglob(TEMPORARY_PATTERN))
                if list_checkpoints(folder / "checkpoints"):
                    with warnings.catch_warnings(record=True) as damage:
                        warnings.simplefilter("always")
                        checkpoint = newest_whole_checkpoint(folder / "checkpoints")
                    counts["damaged checkpoints"] += len(damage)
                    counts["resumed"] += 1
                    counts["lost checkpoints"] += checkpoint.num_timesteps < written
                    written = checkpoint.num_timesteps
                else:
                    counts["lost checkpoints"] += written > 0
            counts["runs"] += 1
            if setting.exact:
                counts["exact runs"] += 1
                counts["exact runs with other parameters"] += result != expected[setting.name]
            elif load_results(name)["l"].sum() > args.steps:
                counts["monitor files with repeats"] += 1
        print(f"{setting.name}: {dict(counts)}, {time.monotonic() - start:.0f} s", flush=True)
    return sum(counts[name] for name in FAILURES)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
