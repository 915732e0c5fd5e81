"""Interruptions from outside: a request to terminate, and the death of an env's process."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper

# Errors of the pipe to a dead process
PIPE_ERRORS = (EOFError, BrokenPipeError, ConnectionResetError)


class TerminationRequest:
    """
    Hold SIGTERM back until the training has saved itself, and then do what the signal would have done: call the earlier
    handler, or end the process.

    It does nothing in other threads than the main one, where Python allows no handlers, and where SIGTERM is ignored.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None
        self._pid = os.getpid()
        self._installed = False
        # Whether our handler is registered, maybe below handlers that were installed later
        self._is_in_place = False

    def install(self) -> None:
        """Begin to hold the signal back."""
        previous = signal.getsignal(signal.SIGTERM)
        # None: a handler that was not installed by Python
        if threading.current_thread() is not threading.main_thread() or previous in (None, signal.SIG_IGN):
            return
        if not self._is_in_place:
            self._pid = os.getpid()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._is_in_place = True
        self._installed = True

    def uninstall(self) -> None:
        """Restore the earlier handler, and let a signal through that was held back."""
        if not self._installed:
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
            self._is_in_place = False
        if self.received:
            self.received = False
            self._pass_on()

    def let_through(self) -> None:
        """Do what the signal would have done. If the process survives, hold the next signal back again."""
        self.uninstall()
        self.install()

    def _pass_on(self) -> None:
        """Do what the signal would have done without our handler."""
        if callable(self._previous):
            self._previous(signal.SIGTERM, None)
        else:
            signal.signal(signal.SIGTERM, self._previous)
            # Unlike `os.kill`, this returns after the handler
            signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if not self._installed:
            # A later handler calls ours, so only forward the signal
            self._pass_on()
            return
        # A process forked from this one has nothing to save
        urgent = self.received or os.getpid() != self._pid
        self.received = True
        if urgent:
            self.uninstall()


def describe_workers(env: VecEnv | None) -> list[str]:
    """
    Describe envs that run in processes. Call this while they are alive.

    :return: a description of each env; empty if they do not run in processes
    """
    # Strings, because an object that cannot be pickled would end the process
    subproc_env = _subproc_env(env)
    if subproc_env is None or subproc_env.waiting:
        # While it waits for a step that was interrupted, the next answer belongs to that step
        return []
    return [str(text) for text in subproc_env.env_method("__str__")]


@contextlib.contextmanager
def broken_pipes_to_dead_workers(env: VecEnv | None) -> Iterator[None]:
    """
    Let a training notice the death of an env's process. Forked processes hold the pipes of those started before them
    open, so that reading from the pipe of a dead process would wait forever.
    """
    subproc_env = _subproc_env(env)
    if subproc_env is None or os.name != "posix":
        yield
        return
    remotes = {
        process.sentinel: remote for process, remote in zip(subproc_env.processes, subproc_env.remotes, strict=True)
    }
    stop, stopper = multiprocessing.Pipe(duplex=False)
    thread = threading.Thread(target=_break_pipes, args=(remotes, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        # Closing this end would not be enough: a process forked meanwhile also holds it open
        stopper.send(None)
        thread.join()
        stopper.close()
        stop.close()


def _break_pipes(remotes: dict[int, Any], stop: Connection) -> None:
    """
    Shut down the pipes of processes that end.

    :param stop: becomes readable when there is nothing more to do
    """
    while remotes:
        ready: Any = wait([*remotes, stop])
        if stop in ready:
            return
        for sentinel in ready:
            # What the process sent before can still be read. An error means that the envs were closed
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(remotes.pop(sentinel).fileno())) as pipe:
                pipe.shutdown(socket.SHUT_RDWR)


def dead_worker_error(env: VecEnv | None, workers: list[str], seed: int | None, timestep: int) -> RuntimeError | None:
    """
    Find the first env whose process has ended.

    :param workers: the result of ``describe_workers``
    :param timestep: number of env timesteps so far
    :return: an error that names the env; None if all processes are alive
    """
    subproc_env = _subproc_env(env)
    processes: list[Any] = [] if subproc_env is None else subproc_env.processes
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


def _subproc_env(env: VecEnv | None) -> SubprocVecEnv | None:
    """Return the ``SubprocVecEnv`` inside of wrappers, if there is one."""
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    return env if isinstance(env, SubprocVecEnv) else None
