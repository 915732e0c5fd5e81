"""
All runs of a study in parallel, on this machine or on a Ray cluster.

On a cluster, all machines need the same packages, and a shared filesystem with the folder of the study under the same
path.
"""

import contextlib
import importlib
import logging
from collections.abc import Generator, Sequence
from itertools import chain, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import joblib  # type: ignore[import-untyped]
from tqdm import tqdm  # type: ignore[import-untyped]

from sb3_td3x.files.atomic import lock_folder
from sb3_td3x.studies.plan import Plan, Run, prepare
from sb3_td3x.studies.results import RUN_FILE
from sb3_td3x.studies.run import Outcome, do_run, interrupted

BACKENDS = ("local", "ray")


def run_study(plan: Plan, study: Path, jobs: int = 1, backend: str = "local", trusted: bool = False) -> int:
    """
    Do the missing runs of a study. A run that fails is printed and does not stop the others.

    :param study: its folder; if it holds a study, it must be this one
    :param jobs: runs at a time; -1: one for each processor, of the whole cluster with ray
    :param backend: "local", on this machine, or "ray"
    :param trusted: whether arms may name classes that are not in the registry
    :return: number of runs that failed
    :raises ValueError: the folder holds another study, or a study is running in it
    """
    do_all = _do_on_cluster if backend == "ray" else _do_here
    try:
        study.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{study} cannot be the folder of a study: {error}") from None
    lock = lock_folder(study)
    try:
        prepare(plan, study)
        runs = list(plan.runs(study, trusted))
        finished = [run for run in runs if (run.folder / RUN_FILE).exists()]
        missing = [run for run in runs if run not in finished]
        print(f"{len(finished)} of {len(runs)} runs are finished, {len(missing)} to do", flush=True)
        n_failed = 0
        with contextlib.closing(do_all(missing, jobs)) as outcomes:
            # The files of a finished run may be broken
            for outcome in chain(map(do_run, finished), tqdm(outcomes, total=len(missing), unit="run")):
                if outcome.error is not None:
                    n_failed += 1
                    tqdm.write(f"FAILED {outcome.run.name}: {outcome.error} ({outcome.run.failure})")
    finally:
        lock.release()
    print(f"{len(runs) - n_failed} of {len(runs)} runs are finished", end="")
    print(", the next start tries the others again" if n_failed else "", flush=True)
    return n_failed


def _do_here(runs: Sequence[Run], jobs: int) -> Generator[Outcome, None, None]:
    """Do runs in threads, which wait for the processes that train and measure."""
    with ThreadPool(joblib.effective_n_jobs(jobs)) as pool:
        try:
            yield from pool.imap_unordered(do_run, runs)
        finally:
            interrupted.set()
            pool.terminate()
            pool.join()
            interrupted.clear()


def _do_on_cluster(runs: Sequence[Run], jobs: int) -> Generator[Outcome, None, None]:
    """Do runs as tasks of Ray, which repeats those whose machine dies."""
    ray = _import_ray()
    with ray.init(log_to_driver=False, logging_level=logging.WARNING):
        start = ray.remote(num_cpus=1)(do_run).remote
        waiting = iter(runs)
        running = {start(run): run for run in islice(waiting, None if jobs == -1 else jobs)}
        while running:
            (task,), _ = ray.wait(list(running))
            run = running.pop(task)
            try:
                yield ray.get(task)
            except ray.exceptions.RayError as error:
                yield Outcome(run, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
            running |= {start(run): run for run in islice(waiting, 1)}


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(f"--backend ray needs Ray, `pip install sb3-td3x[ray]`: {error}") from None
