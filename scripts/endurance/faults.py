"""
End trainings by faults at random steps, and check that each raises the right error and can be resumed::

    python scripts/endurance/faults.py --faults 100
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from sb3_td3x import TD3X
from sb3_td3x.checkpoint import ResumableCheckpoint

# A forked child has everything imported
CONTEXT = multiprocessing.get_context("fork")
STEPS, SAVE_FREQ, N_ENVS = 300, 50, 2


class InjectedError(Exception):
    """The error of a fault."""


class FaultyEnv(gym.Wrapper):
    """
    Pendulum with a fault.

    :param at: number of the step with the fault; for a fault of ``reset``, the first reset after that step
    """

    def __init__(self, fault: str, at: int) -> None:
        # Short episodes, so that there are resets
        super().__init__(gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 25))
        self.fault, self.at, self.n_steps = fault, at, 0

    def reset(self, **kwargs: Any) -> Any:
        if self.fault == "reset raises" and self.n_steps >= self.at:
            raise InjectedError
        return self.env.reset(**kwargs)

    def step(self, action: np.ndarray) -> Any:
        self.n_steps += 1
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self.n_steps == self.at:
            if self.fault == "observation of NaN":
                obs = np.full_like(obs, np.nan)
            elif self.fault == "infinite reward":
                reward = np.inf
            elif self.fault == "step raises":
                raise InjectedError
            elif self.fault == "late, then raises":
                time.sleep(0.5)
                raise TimeoutError
            elif self.fault == "process killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "process ends":
                os._exit(3)
        return obs, reward, terminated, truncated, info


class FaultyCallback(BaseCallback):
    """A callback with a fault."""

    def __init__(self, action: Callable[[], Any], at: int) -> None:
        super().__init__()
        self.action, self.at = action, at

    def _on_step(self) -> bool:
        if self.n_calls == self.at:
            self.action()
        return True


def throw() -> None:
    """Raise the error of a fault."""
    raise InjectedError


def fill_disk() -> None:
    """Let longer files fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


# Faults, and how a training with each must end
FAULTS: dict[str, str] = {
    "observation of NaN": "ValueError: The observation of env",
    "infinite reward": "ValueError: The reward of env",
    "step raises": "InjectedError",
    "reset raises": "InjectedError",
    "late, then raises": "TimeoutError",
    "process killed": "RuntimeError: The process of env 1",
    "process ends": "RuntimeError: The process of env 1",
    "callback raises": "InjectedError",
    "hook raises": "InjectedError",
    "hook returns NaN": "ValueError: FunctionShaping",
    "networks of NaN": "ValueError: The action of env",
    "interrupted": "KeyboardInterrupt",
    "terminated": "signal 15",
    "disk full": "no error",
    "killed": "signal 9",
}

# Faults after which nothing can or should be saved
WITHOUT_SAVING = ("networks of NaN", "disk full", "killed")


def make_envs(fault: str, at: int) -> VecEnv:
    """Make two envs, the second with a fault."""
    functions: list[Callable[[], gym.Env]] = [
        lambda: Monitor(FaultyEnv("none", 0)),
        lambda: Monitor(FaultyEnv(fault, at)),
    ]
    return SubprocVecEnv(functions, "fork") if fault.startswith("process") else DummyVecEnv(functions)


def train(fault: str, at: int, folder: Path, pipe: Connection) -> None:
    """Train until the fault."""
    th.set_num_threads(1)
    # A shell starts background processes without the handler of Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model: TD3X | None = None
    n_calls = 0

    def hook(batch: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == at and fault == "hook raises":
            raise InjectedError
        rewards = np.full_like(batch.rewards, np.nan) if n_calls == at else batch.rewards
        return rewards, batch.terminations

    def poison() -> None:
        assert model is not None
        next(model.actor.parameters()).data.fill_(np.nan)

    actions: dict[str, Callable[[], Any]] = {
        "callback raises": throw,
        "networks of NaN": poison,
        "interrupted": lambda: signal.raise_signal(signal.SIGINT),
        "terminated": lambda: signal.raise_signal(signal.SIGTERM),
        "disk full": fill_disk,
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    }
    model = TD3X(
        "MlpPolicy",
        make_envs(fault, at),
        learning_starts=20,
        batch_size=8,
        buffer_size=200,
        policy_kwargs={"net_arch": [8]},
        reward_shaping=hook if fault.startswith("hook") else None,
        seed=0,
        device="cpu",
    )
    callback = FaultyCallback(actions.get(fault, lambda: None), at)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.learn(STEPS, [callback, ResumableCheckpoint(folder, SAVE_FREQ, verbose=0)])
        pipe.send("no error")
    except BaseException as error:
        pipe.send("".join(traceback.format_exception_only(error)).strip().removeprefix("__main__."))


def resume(folder: Path, pipe: Connection) -> None:
    """Resume a training."""
    th.set_num_threads(1)
    model = TD3X.resume(folder, make_envs("none", 0), device="cpu", reward_shaping=None)
    start = model.num_timesteps
    assert model.replay_buffer.size() == min(start // N_ENVS, model.replay_buffer.buffer_size)
    callback = ResumableCheckpoint(folder, SAVE_FREQ, verbose=0)
    model.learn(SAVE_FREQ, callback, reset_num_timesteps=False)
    assert all(bool(th.isfinite(parameter).all()) for parameter in model.policy.parameters())
    pipe.send(start)


def in_process(target: Callable[..., None], *args: Any) -> tuple[Any, int]:
    """
    Call a function in another process.

    :param args: its arguments but the last, a pipe
    :return: what it sent through the pipe, and the exit code of the process
    """
    receiver, sender = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=target, args=(*args, sender))
    process.start()
    sender.close()
    received = None
    with contextlib.suppress(EOFError):
        received = receiver.recv()
    process.join()
    assert process.exitcode is not None
    return received, process.exitcode


def main(argv: list[str] | None = None) -> int:
    """
    Train with one fault after another.

    :param argv: arguments of the command line; None: those of the process
    :return: number of faults that did not end as they should
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps with faults")
    args = parser.parse_args(argv)

    # Import PyTorch's optimizers once for all children
    th.optim.Adam([th.nn.Parameter(th.zeros(1))])
    rng = random.Random(args.seed)
    counts: Counter[str] = Counter()
    wrong = 0
    for idx in range(args.faults):
        fault = list(FAULTS)[idx % len(FAULTS)]
        # Far enough from the end for a reset after it
        at = rng.randint(1, STEPS // N_ENVS - 30)
        with tempfile.TemporaryDirectory() as name:
            error, exit_code = in_process(train, fault, at, Path(name))
            ended = f"signal {-exit_code}" if exit_code < 0 else str(error)
            # Transitions that were stored before the fault
            lowest = (at - 1) * N_ENVS
            if fault in WITHOUT_SAVING:
                lowest = lowest // SAVE_FREQ * SAVE_FREQ
            saved = in_process(resume, Path(name))[0] if lowest > 0 else 0
            good = ended.startswith(FAULTS[fault]) and saved is not None and saved >= lowest
        counts[f"{fault}: {'good' if good else 'WRONG'}"] += 1
        if not good:
            wrong += 1
            print(f"{fault} at step {at}: ended in {ended!r}, resumed at {saved}", flush=True)
    for line, count in sorted(counts.items()):
        print(f"{count:4d} {line}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
