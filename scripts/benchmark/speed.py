"""
How fast TD3X trains compared with the TD3 of SB3 and SBX, with the same hyperparameters and number of threads.

    python scripts/benchmark/speed.py                       all cells
    python scripts/benchmark/speed.py --quick               one of each kind, in about two minutes

Each peer is a process (``worker.py``), and the peers are measured in turn. Tables are printed; all figures go to the
folder ``--out`` as JSON.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cells import CELLS, PEER_NAMES, QUICK_CELLS, Cell, missing_package
from tables import format_report, summarize

from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.options import at_least

PACKAGES = (
    *("sb3-td3x", "stable-baselines3", "sbx-rl", "gymnasium", "torch", "jax", "jaxlib", "flax", "optax", "numpy"),
    "opencv-python-headless",
)
# Seconds of the slowest peer's segments
SECONDS, QUICK_SECONDS = 10.0, 0.5
REPS = 5
# A higher load means that something else is running
IDLE_LOAD = 0.5


@dataclass(frozen=True)
class Options:
    """
    Options of all measurements.

    :param steps: steps of a segment; None: as many as take ``seconds``
    :param seconds: seconds of the slowest peer's segments
    :param precision: argument ``precision`` of TD3X
    :param overlap: argument ``overlap_updates`` of TD3X
    """

    peers: Sequence[str]
    reps: int
    steps: int | None
    seconds: float
    threads: int
    precision: str
    device: str = "cpu"
    overlap: bool = False

    def job(self, peer: str) -> dict[str, Any]:
        """Return the part of a worker's job that all measurements share."""
        shared = {name: getattr(self, name) for name in ("threads", "precision", "device", "overlap")}
        return {"peer": peer, **shared}


class Worker:
    """
    A peer in a separate process, which works only on request.

    :param job: job of ``worker.py``
    """

    def __init__(self, job: dict[str, Any]):
        self._job = job
        script = Path(__file__).with_name("worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def receive(self) -> dict[str, Any]:
        """Wait for the next answer, of which the first comes when the worker is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The worker ended with status {self._process.wait()}, its job was {self._job}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def measure(self, steps: int) -> dict[str, Any]:
        """
        Measure a segment.

        :return: how many were taken, and their seconds
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self.receive()

    def finish(self) -> dict[str, Any]:
        """End the measurement."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.receive()

    def end(self) -> None:
        """Terminate the process."""
        self._process.terminate()
        self._process.wait()


@contextmanager
def make_workers(jobs: dict[str, dict[str, Any]]) -> Iterator[dict[str, Worker]]:
    """Start a worker for each peer, and end them with the block."""
    with ExitStack() as stack:
        workers = {}
        for peer, job in jobs.items():
            workers[peer] = Worker(job)
            stack.callback(workers[peer].end)
        for worker in workers.values():
            worker.receive()
        yield workers


def rotate(peers: Sequence[str], rep: int) -> list[str]:
    """Return the order of the peers in a repetition, so that each is first equally often."""
    first = rep % len(peers)
    return [*peers[first:], *peers[:first]]


def steps_per_segment(workers: dict[str, Worker], cell: Cell, seconds: float) -> int:
    """
    Return how many steps a segment needs to take some time.

    :param seconds: seconds of the slowest peer's segments
    """
    speeds: list[float] = []
    for worker in workers.values():
        steps = cell.least_steps
        segment = worker.measure(steps)
        while segment["seconds"] < seconds / 4:
            steps *= 2
            segment = worker.measure(steps)
        speeds.append(segment["steps"] / segment["seconds"])
    return max(round(min(speeds) * seconds / cell.least_steps), 1) * cell.least_steps


def measure_cell(cell: Cell, options: Options) -> dict[str, Any]:
    """Measure all peers of a cell."""
    wanted = [peer for peer in cell.peers if peer in options.peers]
    missing = {peer: package for peer in wanted if (package := missing_package(peer, cell.env))}
    jobs = {peer: {**options.job(peer), "cell": asdict(cell)} for peer in wanted if peer not in missing}
    result: dict[str, Any] = {"cell": asdict(cell), "missing": missing}
    with make_workers(jobs) as workers:
        result["segments"] = _measure_in_turn(workers, cell, options) if workers else {}
        result["figures"] = {peer: worker.finish() for peer, worker in workers.items()}
    return summarize(result)


def _measure_in_turn(workers: dict[str, Worker], cell: Cell, options: Options) -> dict[str, list[dict[str, Any]]]:
    steps = options.steps or steps_per_segment(workers, cell, options.seconds)
    segments: dict[str, list[dict[str, Any]]] = {peer: [] for peer in workers}
    for rep in range(options.reps):
        for peer in rotate([*workers], rep):
            segments[peer].append(workers[peer].measure(steps))
    return segments


def measure_cells(cells: Sequence[Cell], options: Options, report: dict[str, Any], path: Path) -> None:
    """
    Measure cells, and print tables.

    :param report: description of the run, to which the results are added
    :param path: JSON file, written after each cell
    """
    report["cells"] = []
    for cell in cells:
        print(f"{cell.name} ...", file=sys.stderr, flush=True)
        report["cells"].append(measure_cell(cell, options))
        _write(report, path)
    print(format_report(report["cells"]))
    for result in report["cells"]:
        flops = {peer: figures.get("flops_of_2_updates") for peer, figures in result["figures"].items()}
        if result["cell"]["updates_only"] and len(set(flops.values())) > 1:
            print(f"\nThe products of {result['cell']['name']} are not those of its floor, flops of 2 updates: {flops}")


def pin(threads: int | None, device: str) -> int:
    """
    Limit this process and its workers to some threads.

    JAX takes the size of its pool from the number of processors, other libraries from environment variables.

    :param threads: number of threads; None: one for each processor
    :param device: ``"cpu"`` keeps JAX away from a GPU
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    threads = threads or len(cpus)
    if threads > len(cpus):
        raise SystemExit(f"--threads {threads} is not possible: {len(cpus)} processors are available")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus[:threads])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PJRT_NPROC"):
        os.environ[name] = str(threads)
    if device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    # The peers share the GPU
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return threads


def describe_run(threads: int, precision: str) -> dict[str, Any]:
    """
    Describe what the figures depend on besides the cells.

    :param precision: argument ``precision`` of TD3X
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    report: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": threads,
        "precision": precision,
        "load_average": load,
        "machine": machine(PACKAGES),
    }
    if load is not None and load > IDLE_LOAD:
        report["warning"] = f"The machine is not idle: load average {load:.2f}. These figures mean little."
        print(f"WARNING: {report['warning']}", file=sys.stderr, flush=True)
    return report


def _write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=1) + "\n")


def positive(text: str) -> float:
    """Convert the text of an option to a number above 0, for ``argparse``."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed, expected a number above 0")
    return number


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cells", nargs="+", choices=list(CELLS), help="measure these cells only")
    mode.add_argument("--quick", action="store_true", help=f"one cell of each kind, segments of {QUICK_SECONDS:g} s")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEER_NAMES), default=list(PEER_NAMES), help="measure these only"
    )
    parser.add_argument("--reps", type=at_least(1), default=REPS, help="segments of each peer (default %(default)s)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a segment, instead of --seconds")
    parser.add_argument(
        "--seconds",
        type=positive,
        help=f"seconds of the slowest peer's segments (default {SECONDS:g}, with --quick {QUICK_SECONDS:g})",
    )
    parser.add_argument("--threads", type=at_least(1), help="threads of each worker (default: all processors)")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="precision of TD3X")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of all peers (default: cpu)")
    parser.add_argument("--overlap", action="store_true", help="TD3X trains with overlap_updates=True")
    parser.add_argument("--out", type=Path, default=Path("logs/benchmark_speed"), help="folder of the JSON file")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """
    Measure, print and write.

    :param arguments: arguments, by default those of the process
    """
    args = make_parser().parse_args(arguments)
    # Otherwise the workers would continue alone
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    threads = pin(args.threads, args.device)
    report = {"device": args.device, "overlap_updates": args.overlap, **describe_run(threads, args.precision)}
    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        args.peers,
        args.reps,
        args.steps,
        args.seconds or (QUICK_SECONDS if args.quick else SECONDS),
        threads,
        args.precision,
        args.device,
        args.overlap,
    )
    cells = QUICK_CELLS if args.quick else [CELLS[name] for name in args.cells or CELLS]
    measure_cells(cells, options, report, args.out / f"cells-{args.device}-{args.precision}.json")
    print(f"\nAll figures: {args.out}")


if __name__ == "__main__":
    main()
