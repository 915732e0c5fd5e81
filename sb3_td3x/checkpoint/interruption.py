"""Interruptions from outside: a request to terminate, and the death of an env's process."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper


class TerminationRequest:
    """
    Hold SIGTERM back until the training has saved itself, and then do what the signal would have done: call the earlier
    handler, or end the process.

    It does nothing in other threads than the main one, where Python allows no handlers, and where SIGTERM is ignored.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: Any = None
        self._is_active = False
        self._pid = os.getpid()

    def install(self) -> None:
        """Begin to hold the signal back."""
        previous = signal.getsignal(signal.SIGTERM)
        # None: a handler that was not installed by Python
        if threading.current_thread() is threading.main_thread() and previous not in (None, signal.SIG_IGN):
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._is_active = True

    def uninstall(self) -> None:
        """Restore the earlier handler, and let a signal through that was held back."""
        if self._is_active and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._previous)
        self._is_active = False
        if self.received:
            self.let_through()

    def let_through(self) -> None:
        """Do what the signal would have done. If the process survives, the next signal is held back again."""
        self.received = False
        if callable(self._previous):
            self._previous(signal.SIGTERM, None)
        else:
            signal.signal(signal.SIGTERM, self._previous)
            # Unlike `os.kill`, this returns after the handler
            signal.raise_signal(signal.SIGTERM)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        # A second signal is urgent, a process forked from this one has nothing to save, and a handler that was
        # installed later may call this one after the training
        if self.received or not self._is_active or os.getpid() != self._pid:
            self.let_through()
        else:
            self.received = True


@contextlib.contextmanager
def naming_dead_workers(model: Any, first_seed: Callable[[], int | None]) -> Iterator[None]:
    """
    Let a training notice the death of an env's process. Forked processes hold the pipes of those started before them
    open, so that reading from the pipe of a dead process would wait forever.

    :param model: the agent
    :param first_seed: returns the seed of the first env; the second has the next number, and so on
    """
    subproc_env = _subproc_env(model.env)
    if subproc_env is None:
        yield
        return
    with _breaking_pipes(subproc_env):
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            idx = _dead_worker(subproc_env)
            if idx is None:
                raise
            seed = first_seed()
            code: Any = subproc_env.processes[idx].exitcode
            raise RuntimeError(
                f"The process of env {idx} ({'no seed' if seed is None else f'seed {seed + idx}'}) "
                f"{f'was killed by signal {-code}' if code < 0 else f'ended with exit code {code}'} at timestep "
                f"{model.num_timesteps}; an error in the env itself is printed above"
            ) from error


def _subproc_env(env: VecEnv | None) -> SubprocVecEnv | None:
    """Return the ``SubprocVecEnv`` inside of wrappers, if there is one."""
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    return env if isinstance(env, SubprocVecEnv) else None


def _dead_worker(env: SubprocVecEnv) -> int | None:
    """Return the index of the first env whose process has ended. Its pipe may break before that."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        for idx, process in enumerate(env.processes):
            if not process.is_alive():
                return idx
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def _breaking_pipes(env: SubprocVecEnv) -> Iterator[None]:
    """Shut down the pipes of processes that end."""
    if os.name != "posix":
        yield
        return
    remotes = {process.sentinel: remote for process, remote in zip(env.processes, env.remotes, strict=True)}
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
