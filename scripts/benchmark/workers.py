"""
The load that the workers of an Optuna study put on PostgreSQL, without trainings:

    python scripts/benchmark/workers.py --storage postgresql+psycopg://td3x@/simulation --workers 10 100 1000

First it measures the calls of one worker, by the number of finished and of running trials in the study; then workers
side by side, at the rate of real trials, each with its own connection. It needs an empty database, which keeps the
studies, on this machine, because the processor time of the server is read from ``/proc``.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd  # type: ignore[import-untyped]
import sqlalchemy
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from sb3_td3x.studies.machine import machine
from sb3_td3x.zoo.search_space import suggest_td3x_params
from sb3_td3x.zoo.storage import heartbeat_seconds, open_storage

# Seconds of each call: name -> list
Timings = dict[str, list[float]]

PACKAGES = ("optuna", "sqlalchemy", "psycopg")
# Connections that the server reserves, and those of this script
SPARE_CONNECTIONS = 10
# As in the zoo
STARTUP_TRIALS = 10
TICKS = os.sysconf("SC_CLK_TCK")
# A study is filled with this many different trials, and copies of them
DIFFERENT_TRIALS = 20
# Copy the trials from `first` up to `end`, with numbers higher by `shift`
COPY_TRIALS = [
    "INSERT INTO trials (number, study_id, state, datetime_start, datetime_complete) "
    "SELECT number + :shift, study_id, state, datetime_start, datetime_complete FROM trials "
    "WHERE study_id = :study AND number >= :first AND number < :end ORDER BY number"
] + [
    f"INSERT INTO {table} (trial_id, {columns}) SELECT copy.trial_id, {columns} FROM {table} "
    f"JOIN trials AS original USING (trial_id) JOIN trials AS copy "
    "ON copy.study_id = original.study_id AND copy.number = original.number + :shift "
    "WHERE original.study_id = :study AND original.number >= :first AND original.number < :end"
    for table, columns in {
        "trial_params": "param_name, param_value, distribution_json",
        "trial_values": "objective, value, value_type",
        "trial_intermediate_values": "step, intermediate_value, intermediate_value_type",
        "trial_user_attributes": "key, value_json",
    }.items()
]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """
    Parse the command line.

    :param argv: arguments, by default those of the process
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="URL of an empty PostgreSQL database")
    parser.add_argument("--workers", type=int, nargs="*", default=[10, 100, 1000], help="numbers of workers")
    parser.add_argument("--finished", type=int, nargs="*", default=[100, 1000, 10000], help="numbers of trials")
    parser.add_argument("--trial-seconds", type=float, default=3600, help="length of a trial")
    parser.add_argument("--evaluations", type=int, default=10, help="evaluations in a trial, each of them reported")
    parser.add_argument("--seconds", type=float, default=60, help="length of each simulation")
    parser.add_argument("--repeats", type=int, default=5, help="calls of which the median is taken")
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

    def cpu_seconds(self) -> float:
        """
        Return the processor time of the server.

        :return: seconds of its processes that still run
        """
        return sum(cpu_seconds(pid) for (pid,) in self.query("SELECT pid FROM pg_stat_activity"))

    def counters(self) -> dict[str, float]:
        """
        Return running totals of the database.

        :return: commits, rows and bytes of the write-ahead log
        """
        ((commits, rows),) = self.query(
            "SELECT xact_commit, tup_returned FROM pg_stat_database WHERE datname = current_database()"
        )
        ((wal,),) = self.query("SELECT wal_bytes FROM pg_stat_wal")
        return {"commits": commits, "rows": rows, "wal_bytes": float(wal)}


def cpu_seconds(pid: int) -> float:
    """
    Return the processor time of a process.

    :return: seconds, in user space and in the kernel
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        sys.exit("The database must run on this machine, and may not restart: its processor time is read from /proc")
    return (int(fields[11]) + int(fields[12])) / TICKS


def make_trial(evaluations: int, state: TrialState) -> FrozenTrial:
    """
    Make a trial of td3x.

    :param evaluations: number of reported values, if the trial is finished
    """
    study = optuna.create_study(sampler=RandomSampler())
    trial = study.ask()
    suggest_td3x_params(trial, n_step=True, her=False)
    finished = state.is_finished()
    return optuna.create_trial(
        state=state,
        value=random.random() if finished else None,
        params=trial.params,
        distributions=trial.distributions,
        user_attrs={"gamma": 0.99, "batch_size": 256},
        intermediate_values={step: random.random() for step in range(evaluations if finished else 0)},
    )


def store_trials(url: str, study_name: str, number: int, evaluations: int, state: TrialState) -> None:
    """
    Add trials to a study.

    :param study_name: name of the study, which is created if it does not exist
    :param evaluations: number of reported values of each trial, if it is finished
    """
    storage = optuna.storages.RDBStorage(url)
    study = optuna.create_study(storage=storage, study_name=study_name, load_if_exists=True, direction="maximize")
    first = storage.get_n_trials(study._study_id)
    there = min(number, DIFFERENT_TRIALS)
    for _ in range(there):
        storage.create_new_trial(study._study_id, make_trial(evaluations, state))
    # Through Optuna, each trial would take about sixty statements
    with storage.engine.begin() as connection:
        while 0 < there < number:
            block = {
                "study": study._study_id,
                "first": first,
                "end": first + min(there, number - there),
                "shift": there,
            }
            for statement in COPY_TRIALS:
                connection.execute(sqlalchemy.text(statement), block)
            there += block["end"] - first
        # Otherwise the server would plan its queries for the smaller tables of before
        connection.execute(sqlalchemy.text("ANALYZE"))
    storage.engine.dispose()


@contextmanager
def timed(timings: Timings, name: str) -> Iterator[None]:
    """
    Time the block.

    :param timings: timings to add the seconds to
    """
    start = time.perf_counter()
    yield
    timings[name].append(time.perf_counter() - start)


class Worker:
    """
    A worker of a study that does not train.

    :param tpe: whether to use the zoo's sampler, which computes in the worker, instead of a random one that reads as
        much
    """

    def __init__(self, url: str, study_name: str, evaluations: int, tpe: bool = False) -> None:
        self.timings: Timings = defaultdict(list)
        self.evaluations = evaluations
        self.tpe = tpe
        with timed(self.timings, "connect"):
            self.storage = open_storage(url, study_name)
            self.study = optuna.load_study(
                study_name=study_name,
                storage=self.storage,
                sampler=TPESampler(n_startup_trials=STARTUP_TRIALS, multivariate=True) if tpe else RandomSampler(),
                pruner=optuna.pruners.MedianPruner(STARTUP_TRIALS, n_warmup_steps=0),
            )

    def read(self, name: str = "read trials") -> None:
        """Read all trials."""
        with timed(self.timings, name):
            self.study.get_trials(deepcopy=False)

    def begin(self) -> None:
        """Start a trial, as ``Study.optimize`` does."""
        with timed(self.timings, "begin trial"):
            optuna.storages.fail_stale_trials(self.study)
            self.trial = self.study.ask()
        if not self.tpe:
            self.read()
        with timed(self.timings, "15 parameters"):
            suggest_td3x_params(self.trial, n_step=True, her=False)
            self.trial.set_user_attr("gamma", 0.99)
            self.trial.set_user_attr("batch_size", 256)

    def heartbeat(self) -> None:
        """Send a heartbeat."""
        with timed(self.timings, "heartbeat"):
            self.study._storage.record_heartbeat(self.trial._trial_id)  # type: ignore[attr-defined]

    def report(self, step: int) -> None:
        """Report an evaluation."""
        with timed(self.timings, "report"):
            self.trial.report(random.random(), step)
        with timed(self.timings, "should prune"):
            self.trial.should_prune()

    def end(self) -> None:
        """End the trial, and count the trials, for ``--max-total-trials``."""
        with timed(self.timings, "end trial"):
            self.study.tell(self.trial, random.random())
        self.read()

    def run(self, trial_seconds: float, seconds: float) -> None:
        """Start in the middle of a trial, and work for some time."""
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
    workers = []
    for trial_id in trial_ids:
        worker = Worker(args.storage, study_name, args.evaluations)
        worker.trial = optuna.Trial(worker.study, trial_id)
        workers.append(worker)
    errors: list[Exception] = []

    def run(worker: Worker) -> None:
        try:
            worker.run(args.trial_seconds, args.seconds)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    barrier.wait()
    cpu = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cpu = time.process_time() - cpu
    if errors:
        raise errors[0]
    barrier.wait()
    timings: Timings = defaultdict(list)
    for worker in workers:
        for name, values in worker.timings.items():
            timings[name].extend(values)
    results.put((dict(timings), cpu))


def abort_with(children: list[Any], barrier: Any) -> None:
    """Abort the barrier when a process fails, so that the others do not wait for it."""
    running = list(children)
    while running:
        multiprocessing.connection.wait([child.sentinel for child in running])
        if any(child.exitcode for child in running):
            barrier.abort()
            return
        running = [child for child in running if child.exitcode is None]


def simulate(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    """Simulate workers side by side."""
    database = Database(args.storage)
    database.check_connections(workers)
    study_name = f"workers-{workers}-{time.time_ns()}"
    store_trials(args.storage, study_name, STARTUP_TRIALS, args.evaluations, TrialState.COMPLETE)
    # Each worker is in the middle of a trial
    store_trials(args.storage, study_name, workers, args.evaluations, TrialState.RUNNING)
    running = database.query(
        "SELECT trial_id FROM trials JOIN studies USING (study_id) "
        f"WHERE study_name = '{study_name}' AND state = 'RUNNING' ORDER BY number"
    )
    trial_ids = [trial_id for (trial_id,) in running]
    context = multiprocessing.get_context("spawn")
    processes = min(workers, args.processes)
    barrier, results = context.Barrier(processes + 1), context.SimpleQueue()
    children = [
        context.Process(
            target=run_workers, args=(trial_ids[index::processes], args, study_name, barrier, results), daemon=True
        )
        for index in range(processes)
    ]
    for child in children:
        child.start()
    threading.Thread(target=abort_with, args=(children, barrier), daemon=True).start()
    try:
        barrier.wait()
        start, cpu, before = time.monotonic(), database.cpu_seconds(), database.counters()
        barrier.wait()
    except threading.BrokenBarrierError:
        sys.exit(f"A process of the {workers} workers has failed, see above")
    seconds, cpu, after = time.monotonic() - start, database.cpu_seconds() - cpu, database.counters()
    timings: Timings = defaultdict(list)
    worker_cpu = 0.0
    for _ in children:
        part, part_cpu = results.get()
        worker_cpu += part_cpu
        for name, values in part.items():
            timings[name].extend(values)
    for child in children:
        child.join()
    return {
        "workers": workers,
        "trial_seconds": args.trial_seconds,
        "seconds": seconds,
        "trials_per_second": len(timings.get("end trial", [])) / seconds,
        "calls_per_second": sum(map(len, timings.values())) / seconds,
        "database_cores": cpu / seconds,
        "worker_cores": worker_cpu / seconds,
        **{f"{name}_per_second": (after[name] - before[name]) / seconds for name in after},
        "milliseconds": {name: percentiles(values) for name, values in timings.items()},
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """
    Summarize the durations of one kind of call.

    :return: number of calls, and median, 99th percentile and maximum in milliseconds
    """
    median, high, highest = 1000 * np.percentile(seconds, [50, 99, 100])
    return {"calls": len(seconds), "median": float(median), "p99": float(high), "max": float(highest)}


def measure_calls(study_name: str, finished: int, running: int, args: argparse.Namespace) -> dict[str, Any]:
    """
    Measure the calls of a single worker.

    :return: median milliseconds of each call, and of the database's processor for reading trials
    """
    timings: Timings = defaultdict(list)
    cpu: Timings = defaultdict(list)
    for _ in range(args.repeats):
        worker = Worker(args.storage, study_name, args.evaluations, tpe=True)
        ((pid,),) = worker_query(worker, "SELECT pg_backend_pid()")
        # The kernel counts in hundredths of a second, so shorter calls are repeated
        for name, repeats in (("first read", 1), ("read trials", 20)):
            before = cpu_seconds(pid)
            for _ in range(repeats):
                worker.read(name)
            cpu[name].append((cpu_seconds(pid) - before) / repeats)
        worker.begin()
        worker.heartbeat()
        worker.heartbeat()
        worker.report(0)
        worker.end()
        worker.storage.engine.dispose()  # type: ignore[union-attr]
        for name, values in worker.timings.items():
            timings[name].extend(values)
    return {
        "finished": finished,
        "running": running,
        "milliseconds": {name: percentiles(values)["median"] for name, values in timings.items()},
        "database_milliseconds": {name: percentiles(values)["median"] for name, values in cpu.items()},
    }


def worker_query(worker: Worker, text: str) -> list[Any]:
    """Run a query through the connection of a worker."""
    with worker.storage.engine.connect() as connection:  # type: ignore[union-attr]
        return list(connection.execute(sqlalchemy.text(text)))


def quiet() -> None:
    """Print no line for each trial."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning, module="optuna")
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def print_calls(rows: list[dict[str, Any]]) -> None:
    """
    Print a table of calls.

    :param rows: results of ``measure_calls``
    """
    print("\nMilliseconds of a call by a single worker, and of the database's processor\n")
    table = pd.json_normalize(rows)
    print(table.rename(columns=lambda name: name.rpartition(".")[2]).to_string(index=False, float_format="%.1f"))


def print_simulations(rows: list[dict[str, Any]]) -> None:
    """
    Print a table of simulations.

    :param rows: results of ``simulate``
    """
    print("\nWorkers side by side, and milliseconds of each call\n")
    columns = ["workers", *(name for name in rows[0] if name.endswith(("_per_second", "_cores")))]
    print(pd.DataFrame(rows)[columns].to_string(index=False, float_format="%.3f"), "\n")
    calls = pd.DataFrame(
        {"workers": row["workers"], "call": name, **call} for row in rows for name, call in row["milliseconds"].items()
    )
    print(calls.to_string(index=False, float_format="%.1f"))


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
    report: dict[str, Any] = {"machine": machine(PACKAGES), "postgresql": version}
    report |= {"settings": {**settings, "heartbeat_seconds": heartbeat_seconds()}, "calls": [], "simulations": []}

    def add(kind: str, row: dict[str, Any]) -> None:
        report[kind].append(row)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    if args.finished:
        study_name = f"finished-{time.time_ns()}"
        there = 0
        for finished in sorted(args.finished):
            store_trials(args.storage, study_name, max(0, finished - there), args.evaluations, TrialState.COMPLETE)
            add("calls", measure_calls(study_name, finished, 0, args))
            there = finished + args.repeats
        for running in sorted(args.workers):
            study_name = f"running-{running}-{time.time_ns()}"
            store_trials(args.storage, study_name, min(args.finished), args.evaluations, TrialState.COMPLETE)
            store_trials(args.storage, study_name, running, args.evaluations, TrialState.RUNNING)
            add("calls", measure_calls(study_name, min(args.finished), running, args))
        print_calls(report["calls"])
    for workers in sorted(args.workers):
        add("simulations", simulate(workers, args))
    if report["simulations"]:
        print_simulations(report["simulations"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
