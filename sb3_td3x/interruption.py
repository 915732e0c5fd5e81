"""What ends a training from outside: a request to terminate, and the death of an env's process."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper

# What the pipe to a dead process raises
PIPE_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)


class TerminationRequest:
    """
    Holds SIGTERM back until the training has saved itself, then does what it would have done: call the handler that was
    there before, or end the process. In other threads than the main one, where Python allows no handlers, and where
    SIGTERM is ignored, it does nothing.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None
        self._pid = os.getpid()
        self._installed = False

    def install(self) -> None:
        """Begin to hold the signal back."""
        previous = signal.getsignal(signal.SIGTERM)
        # None: a handler that was not installed by Python
        if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
            return
        if not self._installed:
            self._pid = os.getpid()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def uninstall(self) -> None:
        """Put the handler back that was there before; a signal that was held back is let through."""
        if not self._installed:
            return
        signal.signal(signal.SIGTERM, self._previous)
        self._installed = False
        if self.received:
            self.received = False
            os.kill(os.getpid(), signal.SIGTERM)

    def let_through(self) -> None:
        """Do what the signal would have done. If the process goes on, the next one is held back again."""
        self.uninstall()
        self.install()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """
        :param signum: number of the signal
        :param frame: where the process was
        """
        urgent = self.received or os.getpid() != self._pid
        self.received = True
        if urgent:
            # Asked twice; or in a process forked from this one, which has nothing to save
            self.uninstall()


def describe_workers(env: VecEnv | None) -> list[str]:
    """
    :param env: the envs of the training
    :return: for envs in processes of their own, what each is, to be asked while they live; else an empty list
    """
    # Their texts, not their specs: what cannot be pickled would end the process
    return [str(text) for text in env.env_method("__str__")] if env is not None and _processes(env) else []


def dead_worker_error(env: VecEnv | None, workers: list[str], seed: int | None, timestep: int) -> RuntimeError | None:
    """
    :param env: the envs of the training
    :param workers: what ``describe_workers`` returned
    :param seed: seed of the first env at its last seeded reset
    :param timestep: number of env timesteps so far
    :return: an error that names the first env whose process has ended; None if all live
    """
    processes = _processes(env) if env is not None else []
    # The pipe may break before the process has ended
    deadline = time.monotonic() + 2
    while processes and time.monotonic() < deadline:
        for idx, process in enumerate(processes):
            if not process.is_alive():
                env_seed = "no seed" if seed is None else f"seed {seed + idx}"
                name = workers[idx] if idx < len(workers) else "unknown env"
                code = process.exitcode
                ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return RuntimeError(
                    f"The process of env {idx} ({name}, {env_seed}) {ended} at timestep {timestep}; "
                    "an error in the env itself is printed above"
                )
        time.sleep(0.01)
    return None


def _processes(env: VecEnv) -> list[Any]:
    """
    :param env: envs
    :return: their processes, if they have any of their own
    """
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    return env.processes if isinstance(env, SubprocVecEnv) else []
