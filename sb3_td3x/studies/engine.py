"""
All runs of a study in parallel, on this machine or on a Ray cluster.

On a cluster, all machines need the same packages, and a shared filesystem with the folder of the study under the same
path.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from itertools import islice
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


def run_study(
    plan: Plan, study: Path, jobs: int = 1, backend: str = "local", trusted: bool = False, progress: bool = True
) -> list[Outcome]:
    """
    Do the missing runs of a study. A run that fails is reported and does not stop the others.

    :param study: its folder; if it holds a study, it must be this one
    :param jobs: runs at a time; -1: one for each processor, of the whole cluster with ray
    :param backend: "local", on this machine, or "ray"
    :param trusted: whether arms may name classes that are not in the registry
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
        missing = [run for run in runs if not (run.folder / RUN_FILE).exists()]
        # Files that are broken are reported
        outcomes = [do_run(run) for run in runs if run not in missing]
        print(f"{len(outcomes)} of {len(runs)} runs are finished, {len(missing)} to do", flush=True)
        with tqdm(total=len(runs), initial=len(outcomes), unit="run", disable=not progress) as bar:

            def note(outcome: Outcome) -> None:
                outcomes.append(outcome)
                bar.update()
                if outcome.error is not None:
                    bar.write(f"FAILED {outcome.run.name}: {outcome.error}", file=sys.stderr)

            do_all(missing, jobs, note)
    finally:
        lock.release()
    return outcomes


def report_failures(outcomes: Sequence[Outcome]) -> int:
    """Print which runs failed, and return their number."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    for outcome in failed:
        print(f"FAILED {outcome.run.name}: {outcome.error} ({outcome.run.failure})")
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} runs are finished", end="")
    print(", the next start tries the others again" if failed else "", flush=True)
    return len(failed)


def _do_here(runs: Sequence[Run], jobs: int, note: Callable[[Outcome], None]) -> None:
    """Do runs in threads, which wait for the processes that train and measure."""
    interrupted.clear()
    with ThreadPool(joblib.effective_n_jobs(jobs)) as pool:
        try:
            for outcome in pool.imap_unordered(do_run, runs):
                note(outcome)
        finally:
            interrupted.set()
            pool.terminate()
            pool.join()


def _do_on_cluster(runs: Sequence[Run], jobs: int, note: Callable[[Outcome], None]) -> None:
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
                note(ray.get(task))
            except ray.exceptions.RayError as error:
                note(Outcome(run, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]))
            running |= {start(run): run for run in islice(waiting, 1)}


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ValueError(f"--backend ray needs Ray, `pip install sb3-td3x[ray]`: {error}") from None
