"""
End trainings by faults at random steps, and check that each raises the right error and can be resumed::

    python scripts/endurance/faults.py --faults 100
"""

import argparse
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


class Fault(NamedTuple):
    """
    A fault, and how a training with it must end.

    :param place: the method of the second env, also in a separate process, or the callback or the hook
    :param function: what happens there: it changes observation and reward of an env, or the rewards of a hook
    :param is_saved: whether the steps before the fault can and should be saved
    """

    place: str
    function: Callable[..., Any]
    ending: str
    is_saved: bool = True


def throw(*_: Any) -> None:
    """Raise the error of a fault."""
    raise InjectedError


FAULTS = {
    "observation of NaN": Fault("step", lambda obs, reward: (obs * np.nan, reward), "ValueError: The observation of"),
    "infinite reward": Fault("step", lambda obs, reward: (obs, np.inf), "ValueError: The reward of env"),
    "step raises": Fault("step", throw, "InjectedError"),
    "reset raises": Fault("reset", throw, "InjectedError"),
    "process killed": Fault("process", lambda *_: os.kill(os.getpid(), signal.SIGKILL), "RuntimeError: The process of"),
    "process ends": Fault("process", lambda *_: os._exit(3), "RuntimeError: The process of env 1"),
    "callback raises": Fault("callback", throw, "InjectedError"),
    "hook raises": Fault("hook", throw, "InjectedError"),
    "hook returns NaN": Fault("hook", lambda rewards: rewards * np.nan, "ValueError: FunctionShaping"),
    "networks of NaN": Fault(
        "callback", lambda model: next(model.actor.parameters()).data.fill_(np.nan), "ValueError: The action of", False
    ),
    "interrupted": Fault("callback", lambda _: signal.raise_signal(signal.SIGINT), "KeyboardInterrupt"),
    "terminated": Fault("callback", lambda _: signal.raise_signal(signal.SIGTERM), "signal 15"),
    # Longer files fail
    "disk full": Fault(
        "callback",
        lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY)),
        "no error",
        False,
    ),
    "killed": Fault("callback", lambda _: os.kill(os.getpid(), signal.SIGKILL), "signal 9", False),
}


class FaultyEnv(gym.Wrapper):
    """
    Pendulum with a fault.

    :param at: number of the step with the fault; for a fault of ``reset``, the first reset after that step
    """

    def __init__(self, fault: Fault | None, at: int) -> None:
        # Short episodes, so that there are resets
        super().__init__(gym.wrappers.TimeLimit(gym.make("Pendulum-v1").unwrapped, 25))
        self.fault, self.at, self.n_steps = fault, at, 0

    def reset(self, **kwargs: Any) -> Any:
        if self.fault is not None and self.fault.place == "reset" and self.n_steps >= self.at:
            self.fault.function()
        return self.env.reset(**kwargs)

    def step(self, action: np.ndarray) -> Any:
        self.n_steps += 1
        obs, reward, *rest = self.env.step(action)
        if self.fault is not None and self.fault.place in ("step", "process") and self.n_steps == self.at:
            obs, reward = self.fault.function(obs, reward)
        return obs, reward, *rest


class FaultyCallback(BaseCallback):
    """A callback with a fault."""

    def __init__(self, fault: Fault, at: int) -> None:
        super().__init__()
        self.fault, self.at = fault, at

    def _on_step(self) -> bool:
        if self.fault.place == "callback" and self.n_calls == self.at:
            self.fault.function(self.model)
        return True


class FaultyHook:
    """A shaping hook with a fault, which changes nothing before."""

    def __init__(self, fault: Fault, at: int) -> None:
        self.fault, self.at, self.n_calls = fault, at, 0

    def __call__(self, batch: Any) -> Any:
        self.n_calls += 1
        rewards = self.fault.function(batch.rewards) if self.n_calls == self.at else batch.rewards
        return rewards, batch.terminations


def make_envs(fault: Fault | None, at: int) -> VecEnv:
    """Make two envs, the second with a fault."""
    functions: list[Callable[[], gym.Env]] = [
        lambda: Monitor(FaultyEnv(None, 0)),
        lambda: Monitor(FaultyEnv(fault, at)),
    ]
    in_processes = fault is not None and fault.place == "process"
    return SubprocVecEnv(functions, "fork") if in_processes else DummyVecEnv(functions)


def train(fault: Fault, at: int, folder: Path) -> None:
    """Train until the fault, and write its error to a file."""
    # A shell starts background processes without the handler of Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.simplefilter("ignore")
    model = TD3X(
        "MlpPolicy",
        make_envs(fault, at),
        learning_starts=20,
        batch_size=8,
        buffer_size=200,
        policy_kwargs={"net_arch": [8]},
        reward_shaping=FaultyHook(fault, at) if fault.place == "hook" else None,
        seed=0,
        device="cpu",
    )
    ending = "no error"
    try:
        model.learn(
            STEPS, [FaultyCallback(fault, at), ResumableCheckpoint(folder / "checkpoints", SAVE_FREQ, verbose=0)]
        )
    except BaseException as error:
        ending = "".join(traceback.format_exception_only(error)).strip().removeprefix("__main__.")
    (folder / "ending").write_text(ending)


def resume(folder: Path) -> int:
    """Resume a training, and return the timestep from which it continued."""
    model = TD3X.resume(folder / "checkpoints", make_envs(None, 0), device="cpu", reward_shaping=None)
    start = model.num_timesteps
    assert model.replay_buffer.size() == min(start // N_ENVS, model.replay_buffer.buffer_size)
    callback = ResumableCheckpoint(folder / "checkpoints", SAVE_FREQ, verbose=0)
    model.learn(SAVE_FREQ, callback, reset_num_timesteps=False)
    assert all(bool(th.isfinite(parameter).all()) for parameter in model.policy.parameters())
    return start


def main() -> int:
    """Train with one fault after another, and return the number of those that did not end as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps with faults")
    args = parser.parse_args()

    # In this process and its children; a pool of threads would not survive the fork
    th.set_num_threads(1)
    rng = random.Random(args.seed)
    counts: Counter[str] = Counter()
    wrong = 0
    for idx in range(args.faults):
        name = list(FAULTS)[idx % len(FAULTS)]
        fault = FAULTS[name]
        # Far enough from the end for a reset after it
        at = rng.randint(1, STEPS // N_ENVS - 30)
        # Transitions that were stored before the fault
        lowest = (at - 1) * N_ENVS
        if not fault.is_saved:
            lowest = lowest // SAVE_FREQ * SAVE_FREQ
        with tempfile.TemporaryDirectory() as folder:
            process = CONTEXT.Process(target=train, args=(fault, at, Path(folder)))
            process.start()
            process.join()
            code = process.exitcode
            ending = f"signal {-code}" if code else Path(folder, "ending").read_text()
            saved = resume(Path(folder)) if lowest > 0 else 0
        good = ending.startswith(fault.ending) and saved >= lowest
        counts[f"{name}: {'good' if good else 'WRONG'}"] += 1
        if not good:
            wrong += 1
            print(f"{name} at step {at}: ended in {ending!r}, resumed at {saved}", flush=True)
    for line, count in sorted(counts.items()):
        print(f"{count:4d} {line}")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
