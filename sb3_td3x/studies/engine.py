"""
All runs of a study in parallel, on this machine or a cluster, through joblib.

On a cluster, all machines need the same packages, and a shared filesystem with the folder of the study under the same
path.
"""

import contextlib
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import joblib  # type: ignore[import-untyped]
from filelock import FileLock, Timeout
from tqdm import tqdm  # type: ignore[import-untyped]

from sb3_td3x.studies.measure import trained_timesteps
from sb3_td3x.studies.plan import LOCK_FILE, Plan, Run, prepare, runs_of
from sb3_td3x.studies.run import Outcome, do_run_in_worker

BACKENDS = ("loky", "ray")
# The study gives up after this many passes over the missing runs in which no run ends
FRUITLESS_PASSES = 3
# Seconds before a pass is repeated, in which what was running ends
_SETTLE = 5.0
# Seconds before the processors of a Ray cluster are counted again
_RESERVATION = 30.0
# Seconds between updates of the progress bar, on a terminal and in a file, where each is a line
_REFRESH, _REFRESH_FILE = 2.0, 60.0


def run_study(plan: Plan, study: Path, jobs: int = 1, backend: str = "loky", progress: bool = True) -> list[Outcome]:
    """
    Do the missing runs of a study. A run that fails is reported and does not stop the others.

    :param study: its folder; if it holds a study, it must be this one
    :param jobs: runs at a time; -1: one for each processor, of the whole cluster with ray
    :param backend: backend of joblib: "loky", processes of this machine, or "ray"
    :raises ValueError: the folder holds another study, or a study is running in it
    """
    if backend == "ray":
        _import_ray()
    with _locked(study):
        prepare(plan, study)
        runs = runs_of(plan, study)
        done, missing = _split(runs)
        finished = sum(outcome.error is None for outcome in done)
        print(f"{finished} of {len(runs)} runs are finished, {len(missing)} to do", flush=True)
        with _ended_by_sigterm(), _Progress(runs, finished, enabled=progress) as bar:
            return done + _passes(missing, jobs, backend, bar)


def report_failures(outcomes: Sequence[Outcome]) -> int:
    """Print which runs failed."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        log = f" ({outcome.run.failure})" if outcome.run.failure.exists() else ""
        print(f"FAILED {outcome.run.name}: {outcome.error}{log}")
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} runs are finished", end="")
    print(", the next start tries the others again" if failed else "", flush=True)
    return len(failed)


def _split(runs: Sequence[Run]) -> tuple[list[Outcome], list[Run]]:
    """Return the outcomes of runs that are finished or whose folder is broken, and the other runs."""
    done, missing = [], []
    for run in runs:
        try:
            if run.is_finished():
                done.append(Outcome(run))
            else:
                missing.append(run)
        except ValueError as error:
            done.append(Outcome(run, str(error)))
    return done, missing


def _passes(missing: list[Run], jobs: int, backend: str, bar: "_Progress") -> list[Outcome]:
    """Do runs, and repeat those that were lost with their processes or machines."""
    outcomes: list[Outcome] = []
    fruitless = 0
    lost = ""
    while missing and fruitless < FRUITLESS_PASSES:
        n_before = len(outcomes)
        try:
            for outcome in _pass(missing, jobs, backend):
                outcomes.append(outcome)
                bar.add(outcome)
        except Exception as error:
            # joblib gives up all runs when it loses a process; what they saved is kept
            lost = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            bar.write(f"Runs were lost with their process or machine, and are repeated ({lost})")
            time.sleep(_SETTLE)
            # Runs that ended before, whose results were lost with the others
            over = {outcome.run for outcome in outcomes}
            for outcome in _split([run for run in missing if run not in over])[0]:
                outcomes.append(outcome)
                bar.add(outcome)
        fruitless = 0 if len(outcomes) > n_before else fruitless + 1
        over = {outcome.run for outcome in outcomes}
        missing = [run for run in missing if run not in over]
    return outcomes + [Outcome(run, f"lost in each of {fruitless} passes, at last {lost}") for run in missing]


def _pass(runs: Sequence[Run], jobs: int, backend: str) -> Iterator[Outcome]:
    """Do runs, and yield the outcome of each when it ends."""
    options: dict[str, Any] = {}
    if backend == "ray":
        ray = _import_ray()
        importlib.import_module("ray.util.joblib").register_ray()
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.WARNING)
        # By default joblib's workers count as using no processor, and may all be placed on one machine
        options["ray_remote_args"] = {"num_cpus": 1}
    with joblib.parallel_config(backend=backend, **options):
        jobs = _reserved_processors(jobs) if backend == "ray" else jobs
        # The Ray backend cannot return results one by one
        return_as = "list" if backend == "ray" else "generator_unordered"
        parallel = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as=return_as)
        yield from parallel(joblib.delayed(do_run_in_worker)(run, os.getpid()) for run in runs)


def _reserved_processors(jobs: int) -> int:
    """
    Wait for processors of the Ray cluster, since joblib's pool waits forever for processors that it does not get.

    A machine that has just died still counts for some seconds.

    :param jobs: how many processors are wanted; -1: all
    """
    placement = importlib.import_module("ray.util.placement_group")
    while True:
        available: int = joblib.effective_n_jobs(-1)
        jobs_now = available if jobs == -1 else min(jobs, available)
        group = placement.placement_group([{"CPU": 1}] * jobs_now)
        reserved = group.wait(timeout_seconds=_RESERVATION)
        placement.remove_placement_group(group)
        if reserved:
            return jobs_now


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(f"--backend ray needs Ray, `pip install sb3-td3x[ray]`: {error}") from None


@contextlib.contextmanager
def _locked(study: Path) -> Iterator[None]:
    """
    Hold the lock of a study's folder, which is made if it does not exist.

    :raises ValueError: a study is running there, or the folder cannot be made
    """
    try:
        study.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{study} cannot be the folder of a study: {error}") from None
    lock = FileLock(study / LOCK_FILE)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"A study is running in {study}: wait for it, or take another folder") from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the study with all its processes, as Ctrl-C does."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Progress:
    """A progress bar over the env steps of the whole study."""

    def __init__(self, runs: Sequence[Run], finished: int, enabled: bool):
        self._runs = runs
        self._finished = finished
        self._failed = 0
        self._over: set[Run] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._bar = tqdm(total=sum(run.timesteps for run in runs), unit="step", unit_scale=True, disable=not enabled)

    def __enter__(self) -> "_Progress":
        self._over = {run for run in self._runs if run.folder.exists()}
        self._bar.update(self._timesteps())
        # Steps of earlier starts say nothing about the speed of this one
        self._bar.initial = self._bar.n
        self._show()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show()
        self._bar.close()

    def add(self, outcome: Outcome) -> None:
        """Count a run that has ended."""
        self._over.add(outcome.run)
        if outcome.error is None:
            self._finished += 1
        else:
            self._failed += 1
            self.write(f"FAILED {outcome.run.name}: {outcome.error}")

    def write(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def _watch(self) -> None:
        while not self._stop.wait(_REFRESH if sys.stderr.isatty() else _REFRESH_FILE):
            self._show()

    def _show(self) -> None:
        self._bar.set_postfix_str(f"{self._finished} of {len(self._runs)} runs, {self._failed} failed", refresh=False)
        self._bar.update(self._timesteps() - self._bar.n)

    def _timesteps(self) -> int:
        """Return the env steps done in all runs."""
        done = 0
        for run in self._runs:
            if run in self._over or run.folder.exists():
                done += run.timesteps
                continue
            # A line may be half written, or the folder may be moved right now
            with contextlib.suppress(Exception):
                done += min(trained_timesteps(run.unfinished), run.timesteps)
        return done
