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


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="URL of an empty PostgreSQL database")
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000], help="numbers of workers")
    parser.add_argument("--trial-seconds", type=float, default=3600, help="length of a trial")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations in a trial, each of them reported")
    parser.add_argument("--seconds", type=float, default=60, help="length of each simulation")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that the workers share")
    parser.add_argument("--json", type=Path, help="where to write all figures to")
    return parser.parse_args(argv)


def query(server: sqlalchemy.Engine, text: str) -> list[Any]:
    """Query the server."""
    with server.connect() as connection:
        return list(connection.execute(sqlalchemy.text(text)))


def check_connections(server: sqlalchemy.Engine, workers: int) -> None:
    """Exit if the server does not accept so many connections."""
    ((text,),) = query(server, "SHOW max_connections")
    # A worker holds one, and sometimes two
    needed = 2 * workers + SPARE_CONNECTIONS
    if needed > int(text):
        sys.exit(f"{workers} workers need max_connections={needed} or more in postgresql.conf, the server has {text}")


def server_seconds(server: sqlalchemy.Engine) -> float:
    """Return the processor time of the server's processes that still run."""
    return sum(cpu_seconds(pid) for (pid,) in query(server, "SELECT pid FROM pg_stat_activity"))


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, in user space and in the kernel."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        sys.exit("The database must run on this machine, and may not restart: its processor time is read from /proc")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def create_study(url: str, study_name: str, evaluations: int) -> None:
    """Create a study with finished trials of td3x."""
    study = optuna.create_study(storage=url, study_name=study_name, sampler=RandomSampler(), direction="maximize")
    for _ in range(FINISHED_TRIALS):
        trial = study.ask()
        suggest_td3x_params(trial, n_step=True, her=False)
        for step in range(evaluations):
            trial.report(random.random(), step)
        study.tell(trial, random.random())


class Worker:
    """A worker of a study that does not train, with a trial. Its sampler is random, and reads as much as the zoo's."""

    def __init__(self, url: str, study_name: str, evaluations: int) -> None:
        self.timings: Timings = defaultdict(list)
        self.evaluations = evaluations
        self.study = optuna.load_study(
            study_name=study_name,
            storage=open_storage(url, study_name),
            sampler=RandomSampler(),
            pruner=optuna.pruners.MedianPruner(FINISHED_TRIALS, n_warmup_steps=0),
        )
        self.begin()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block."""
        start = time.perf_counter()
        yield
        self.timings[name].append(time.perf_counter() - start)

    def begin(self) -> None:
        """Start a trial, as ``Study.optimize`` does."""
        with self.timed("begin trial"):
            optuna.storages.fail_stale_trials(self.study)
            self.trial = self.study.ask()
        with self.timed("read trials"):
            self.study.get_trials(deepcopy=False)
        with self.timed("15 parameters"):
            suggest_td3x_params(self.trial, n_step=True, her=False)
            self.trial.set_user_attr("gamma", 0.99)
            self.trial.set_user_attr("batch_size", 256)

    def run(self, trial_seconds: float, seconds: float) -> None:
        """Pretend to be in the middle of the trial, and work for some time."""
        # What the start of all workers at once took is not part of the simulation
        self.timings.clear()
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
            if due == next_heartbeat:
                with self.timed("heartbeat"):
                    self.study._storage.record_heartbeat(self.trial._trial_id)  # type: ignore[attr-defined]
                next_heartbeat += interval
                continue
            with self.timed("report"):
                self.trial.report(random.random(), step)
            with self.timed("should prune"):
                self.trial.should_prune()
            step += 1
            if step == self.evaluations:
                with self.timed("end trial"):
                    self.study.tell(self.trial, random.random())
                # The zoo counts them, for --max-total-trials
                with self.timed("read trials"):
                    self.study.get_trials(deepcopy=False)
                self.begin()
                step, begun = 0, due


def run_workers(n_workers: int, args: argparse.Namespace, study_name: str, barrier: Any, results: Any) -> None:
    """
    Simulate the workers of one process.

    :param barrier: passed when all workers of all processes have a trial, and when the time is over
    :param results: queue for the timings of each worker
    """
    quiet()
    workers = [Worker(args.storage, study_name, args.evaluations) for _ in range(n_workers)]
    barrier.wait(TIMEOUT_SECONDS)
    with ThreadPoolExecutor(n_workers) as pool:
        list(pool.map(lambda worker: worker.run(args.trial_seconds, args.seconds), workers))
    barrier.wait(args.seconds + TIMEOUT_SECONDS)
    results.put([worker.timings for worker in workers])


def simulate(workers: int, args: argparse.Namespace, server: sqlalchemy.Engine) -> dict[str, Any]:
    """Simulate workers side by side."""
    check_connections(server, workers)
    study_name = f"workers-{workers}-{time.time_ns()}"
    create_study(args.storage, study_name, args.evaluations)
    context = multiprocessing.get_context("spawn")
    processes = min(workers, args.processes)
    barrier, results = context.Barrier(processes + 1), context.SimpleQueue()
    for index in range(processes):
        share = len(range(index, workers, processes))
        arguments = (share, args, study_name, barrier, results)
        context.Process(target=run_workers, args=arguments, daemon=True).start()
    try:
        barrier.wait(TIMEOUT_SECONDS)
        start, before = time.monotonic(), server_seconds(server)
        barrier.wait(args.seconds + TIMEOUT_SECONDS)
    except threading.BrokenBarrierError:
        sys.exit(f"A process of the {workers} workers has failed, see above")
    seconds, after = time.monotonic() - start, server_seconds(server)
    timings: Timings = defaultdict(list)
    for _ in range(processes):
        for part in results.get():
            for name, values in part.items():
                timings[name].extend(values)
    return {
        "workers": workers,
        "trial_seconds": args.trial_seconds,
        "seconds": seconds,
        "calls_per_second": sum(map(len, timings.values())) / seconds,
        "database_cores": (after - before) / seconds,
        "milliseconds": {name: percentiles(values) for name, values in timings.items()},
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the number of calls, and their median, 99th percentile and maximum in milliseconds."""
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
    # Its connection stays open, because its process on the server is counted, too
    server = sqlalchemy.create_engine(args.storage, pool_size=1)
    ((version,),) = query(server, "SHOW server_version")
    settings = {key: value for key, value in vars(args).items() if key not in ("storage", "json")}
    settings["heartbeat_seconds"] = heartbeat_seconds()
    rows = [simulate(workers, args, server) for workers in sorted(args.workers)]
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
