"""
The load that the workers of an Optuna study put on PostgreSQL, without trainings:

    python scripts/benchmark/workers.py --storage postgresql+psycopg://td3x@/simulation --workers 10 100 1000

The workers run side by side, at the rate of real trials, each with its own connection. It needs an empty database,
which keeps the studies, on this machine, because the processor time of the server is read from ``/proc``.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd  # type: ignore[import-untyped]
import sqlalchemy
from optuna.samplers import RandomSampler
from optuna.trial import TrialState

from sb3_td3x.studies.machine import machine
from sb3_td3x.zoo.search_space import suggest_td3x_params
from sb3_td3x.zoo.storage import heartbeat_seconds, open_storage

# Seconds of each call: name -> list
Timings = dict[str, list[float]]

PACKAGES = ("optuna", "sqlalchemy", "psycopg")
# Connections that the server reserves, and those of this script
SPARE_CONNECTIONS = 10
# Finished trials of the study, as many as the zoo draws at random
FINISHED_TRIALS = 10
# Longest time until all workers are connected, or one of their processes has failed
TIMEOUT_SECONDS = 600


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Parse the command line.

    :param argv: arguments, by default those of the process
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="URL of an empty PostgreSQL database")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000], help="numbers of workers")
    parser.add_argument("--trial-seconds", type=float, default=3600, help="length of a trial")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations in a trial, each of them reported")
    parser.add_argument("--seconds", type=float, default=60, help="length of each simulation")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that the workers share")
    parser.add_argument("--json", type=Path, help="where to write all figures to")
    return parser.parse_args(argv)


class Database:
    """Statistics of the server."""

    def __init__(self, url: str) -> None:
        self.engine = sqlalchemy.create_engine(url, pool_size=1)

    def query(self, text: str) -> list[Any]:
        """Run a query."""
        with self.engine.connect() as connection:
            return list(connection.execute(sqlalchemy.text(text)))

    def check_connections(self, workers: int) -> None:
        """Exit if the server does not accept so many connections."""
        ((text,),) = self.query("SHOW max_connections")
        # A worker holds one, and sometimes two
        needed = 2 * workers + SPARE_CONNECTIONS
        if needed > int(text):
            sys.exit(
                f"{workers} workers need max_connections={needed} or more in postgresql.conf, the server has {text}"
            )

    def totals(self) -> dict[str, float]:
        """
        Return running totals.

        :return: processor seconds of the server's processes that still run; commits, rows, and bytes of the write-ahead
            log
        """
        ((commits, rows),) = self.query(
            "SELECT xact_commit, tup_returned FROM pg_stat_database WHERE datname = current_database()"
        )
        ((wal,),) = self.query("SELECT wal_bytes FROM pg_stat_wal")
        cpu = sum(cpu_seconds(pid) for (pid,) in self.query("SELECT pid FROM pg_stat_activity"))
        return {"database_cores": cpu, "commits": commits, "rows": rows, "wal_bytes": float(wal)}


def cpu_seconds(pid: int) -> float:
    """
    Return the processor time of a process.

    :return: seconds, in user space and in the kernel
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        sys.exit("The database must run on this machine, and may not restart: its processor time is read from /proc")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def store_trials(url: str, study_name: str, number: int, evaluations: int, state: TrialState) -> list[int]:
    """
    Add trials of td3x to a study, which is created if it does not exist.

    :param evaluations: number of reported values of each trial, if it is finished
    :return: their ids
    """
    storage = optuna.storages.RDBStorage(url)
    study = optuna.create_study(storage=storage, study_name=study_name, load_if_exists=True, direction="maximize")
    trial = optuna.create_study(sampler=RandomSampler()).ask()
    suggest_td3x_params(trial, n_step=True, her=False)
    finished = state.is_finished()
    template = optuna.create_trial(
        state=state,
        value=random.random() if finished else None,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={"gamma": 0.99, "batch_size": 256},
        intermediate_values={step: random.random() for step in range(evaluations if finished else 0)},
    )
    trial_ids = [storage.create_new_trial(study._study_id, template) for _ in range(number)]
    storage.engine.dispose()
    return trial_ids


class Worker:
    """
    A worker of a study that does not train. Its sampler is random, and reads as much as the zoo's.

    :param trial_id: id of the trial that it is in the middle of
    """

    def __init__(self, url: str, study_name: str, evaluations: int, trial_id: int) -> None:
        self.timings: Timings = defaultdict(list)
        self.evaluations = evaluations
        with self.timed("connect"):
            pruner = optuna.pruners.MedianPruner(FINISHED_TRIALS, n_warmup_steps=0)
            storage = open_storage(url, study_name)
            self.study = optuna.load_study(
                study_name=study_name, storage=storage, sampler=RandomSampler(), pruner=pruner
            )
        self.trial = optuna.Trial(self.study, trial_id)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self.timings[name].append(time.perf_counter() - start)

    def read(self) -> None:
        """Read all trials."""
        with self.timed("read trials"):
            self.study.get_trials(deepcopy=False)

    def begin(self) -> None:
        """Start a trial, as ``Study.optimize`` does."""
        with self.timed("begin trial"):
            optuna.storages.fail_stale_trials(self.study)
            self.trial = self.study.ask()
        self.read()
        with self.timed("15 parameters"):
            suggest_td3x_params(self.trial, n_step=True, her=False)
            self.trial.set_user_attr("gamma", 0.99)
            self.trial.set_user_attr("batch_size", 256)

    def heartbeat(self) -> None:
        """Send a heartbeat."""
        with self.timed("heartbeat"):
            self.study._storage.record_heartbeat(self.trial._trial_id)  # type: ignore[attr-defined]

    def report(self, step: int) -> None:
        """Report an evaluation."""
        with self.timed("report"):
            self.trial.report(random.random(), step)
        with self.timed("should prune"):
            self.trial.should_prune()

    def end(self) -> None:
        """End the trial, and count the trials, for ``--max-total-trials``."""
        with self.timed("end trial"):
            self.study.tell(self.trial, random.random())
        self.read()

    def run(self, trial_seconds: float, seconds: float) -> None:
        """Start in the middle of the trial, and work for some time."""
        start = time.monotonic()
        interval = heartbeat_seconds()
        next_heartbeat = start + random.random() * interval
        phase = random.random()
        step = int(phase * self.evaluations)
        begun = start - phase * trial_seconds
        while True:
            next_report = begun + (step + 1) / self.evaluations * trial_seconds
            due = min(next_report, next_heartbeat)
            if due > start + seconds:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            self.timings["behind"].append(time.monotonic() - due)
            if due == next_heartbeat:
                self.heartbeat()
                next_heartbeat += interval
                continue
            self.report(step)
            step += 1
            if step == self.evaluations:
                self.end()
                self.begin()
                step, begun = 0, due


def run_workers(trial_ids: list[int], args: argparse.Namespace, study_name: str, barrier: Any, results: Any) -> None:
    """
    Simulate the workers of one process.

    :param barrier: passed when all workers of all processes are connected, and when the time is over
    :param results: queue for the timings and the processor time of this process
    """
    quiet()
    workers = [Worker(args.storage, study_name, args.evaluations, trial_id) for trial_id in trial_ids]
    barrier.wait(TIMEOUT_SECONDS)
    cpu = time.process_time()
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.run(args.trial_seconds, args.seconds), workers))
    cpu = time.process_time() - cpu
    barrier.wait(args.seconds + TIMEOUT_SECONDS)
    results.put(([worker.timings for worker in workers], cpu))


def simulate(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Simulate workers side by side."""
    database = Database(args.storage)
    database.check_connections(workers)
    study_name = f"workers-{workers}-{time.time_ns()}"
    store_trials(args.storage, study_name, FINISHED_TRIALS, args.evaluations, TrialState.COMPLETE)
    trial_ids = store_trials(args.storage, study_name, workers, args.evaluations, TrialState.RUNNING)
    context = multiprocessing.get_context("spawn")
    processes = min(workers, args.processes)
    barrier, results = context.Barrier(processes + 1), context.SimpleQueue()
    for index in range(processes):
        arguments = (trial_ids[index::processes], args, study_name, barrier, results)
        context.Process(target=run_workers, args=arguments, daemon=True).start()
    try:
        barrier.wait(TIMEOUT_SECONDS)
        start, before = time.monotonic(), database.totals()
        barrier.wait(args.seconds + TIMEOUT_SECONDS)
    except threading.BrokenBarrierError:
        sys.exit(f"A process of the {workers} workers has failed, see above")
    seconds, after = time.monotonic() - start, database.totals()
    timings: Timings = defaultdict(list)
    worker_cpu = 0.0
    for _ in range(processes):
        parts, cpu = results.get()
        worker_cpu += cpu
        for part in parts:
            for name, values in part.items():
                timings[name].extend(values)
    rates = {
        name if "cores" in name else f"{name}_per_second": (after[name] - before[name]) / seconds for name in after
    }
    return {
        "workers": workers,
        "trial_seconds": args.trial_seconds,
        "seconds": seconds,
        "trials_per_second": len(timings.get("end trial", [])) / seconds,
        "calls_per_second": sum(map(len, timings.values())) / seconds,
        "worker_cores": worker_cpu / seconds,
        **rates,
        "milliseconds": {name: percentiles(values) for name, values in timings.items()},
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """
    Summarize the durations of one kind of call.

    :return: number of calls, and median, 99th percentile and maximum in milliseconds
    """
    median, high, highest = 1000 * np.percentile(seconds, [50, 99, 100])
    return {"calls": len(seconds), "median": float(median), "p99": float(high), "max": float(highest)}


def quiet() -> None:
    """Print no line for each trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module="optuna")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def main(argv: Sequence[str] | None = None) -> int:
    """
    Measure, print and write.

    :param argv: arguments, by default those of the process
    """
    args = parse_args(argv)
    if not args.storage.startswith("postgresql"):
        sys.exit(f"--storage={args.storage} is not allowed, expected the URL of a PostgreSQL database")
    quiet()
    ((version,),) = Database(args.storage).query("SHOW server_version")
    settings = {key: value for key, value in vars(args).items() if key not in ("storage", "json")}
    settings["heartbeat_seconds"] = heartbeat_seconds()
    rows = [simulate(workers, args) for workers in sorted(args.workers)]
    if args.json:
        report = {"machine": machine(PACKAGES), "postgresql": version, "settings": settings, "simulations": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print("Workers side by side, and milliseconds of each call\n")
    print(pd.DataFrame(rows).drop(columns="milliseconds").to_string(index=False, float_format="%.3f"), "\n")
    calls = pd.DataFrame(
        {"workers": row["workers"], "call": name, **call} for row in rows for name, call in row["milliseconds"].items()
    )
    print(calls.to_string(index=False, float_format="%.1f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
