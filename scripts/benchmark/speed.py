"""
How fast TD3X trains compared with the TD3 of SB3 and SBX, with the same hyperparameters and number of threads.

    python scripts/benchmark/speed.py                       all cells
    python scripts/benchmark/speed.py --quick               one of each kind, in about two minutes

Each peer is a process (``peers.py``), and the peers are measured in turn. A table is printed; all figures go to the
folder ``--out`` as JSON.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import peers
from cells import CAR_RACING, CELLS, HALF_CHEETAH, QUICK_CELLS, Cell

from sb3_td3x.studies.machine import machine
from sb3_td3x.studies.options import at_least
from sb3_td3x.validation import PRECISIONS

PACKAGES = ("sb3-td3x", "stable-baselines3", "sbx-rl", "gymnasium", "torch", "jax", "jaxlib", "flax", "optax", "numpy")
PEER_NAMES = {"td3x": "TD3X", "sb3": "SB3", "sbx": "SBX", "floor": "floor"}
# Peers and envs that other packages bring
NEEDED_MODULES = {"sbx": "sbx", CAR_RACING: "cv2", HALF_CHEETAH.env: "mujoco"}
# Seconds of the slowest peer's segments
SECONDS, QUICK_SECONDS = 10.0, 0.5
# A higher load means that something else is running
IDLE_LOAD = 0.5


class Worker(ProcessPoolExecutor):
    """A peer in a separate process, with the options of the command line."""

    def __init__(self, peer: str, cell: Cell, args: argparse.Namespace):
        super().__init__(1, multiprocessing.get_context("spawn"), peers.prepare, (peer, cell, args))

    def measure(self, steps: int) -> dict[str, float]:
        """Measure a segment, and return how many steps were taken, and their seconds."""
        return self.submit(peers.measure, steps).result()


def rotate(names: Sequence[str], rep: int) -> list[str]:
    """Return the order of the peers in a repetition, so that each is first equally often."""
    first = rep % len(names)
    return [*names[first:], *names[:first]]


def steps_per_segment(workers: Mapping[str, Worker], cell: Cell, seconds: float) -> int:
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


def measure_cell(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all peers of a cell."""
    with ExitStack() as stack:
        names = [peer for peer in cell.peers if peer in args.peers]
        workers = {peer: stack.enter_context(Worker(peer, cell, args)) for peer in names}
        # They get ready side by side
        ready = {peer: worker.submit(peers.memory) for peer, worker in workers.items()}
        replay_bytes = {peer: future.result() for peer, future in ready.items()}
        steps = args.steps or steps_per_segment(workers, cell, args.seconds)
        segments: dict[str, list[dict[str, float]]] = {peer: [] for peer in names}
        for rep in range(args.reps):
            for peer in rotate(names, rep):
                segments[peer].append(workers[peer].measure(steps))
    return summarize({"cell": asdict(cell), "segments": segments, "replay_bytes": replay_bytes})


def ratio(rates: Sequence[float], peer_rates: Sequence[float]) -> dict[str, float]:
    """
    Return the ratio of two rates, computed in each repetition, whose segments met the same state of the machine.

    :return: median, minimum and maximum of rate / peer's rate
    """
    ratios = [rate / peer_rate for rate, peer_rate in zip(rates, peer_rates, strict=True)]
    return {"median": median(ratios), "min": min(ratios), "max": max(ratios)}


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """Add ``per_second``, and ``ratios``: TD3X's speed over the peer's, and its time over the floor's."""
    rates = {
        peer: [segment["steps"] / segment["seconds"] for segment in segments]
        for peer, segments in result["segments"].items()
    }
    own = rates.get("td3x", [])
    ratios = {
        peer: ratio(values, own) if peer == "floor" else ratio(own, values)
        for peer, values in rates.items()
        if own and peer != "td3x"
    }
    return {**result, "per_second": {peer: median(values) for peer, values in rates.items()}, "ratios": ratios}


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """Format results of ``summarize``: steps per second, or updates where a cell has only these, and ratios."""
    columns: dict[str, tuple[str, str, Callable[[Any], str]]] = {
        **{f"{name}/s": ("per_second", peer, _format_speed) for peer, name in PEER_NAMES.items()},
        **{f"TD3X / {PEER_NAMES[peer]}": ("ratios", peer, _format_ratio) for peer in ("sb3", "sbx")},
        "TD3X time / floor time": ("ratios", "floor", _format_ratio),
        **{f"{PEER_NAMES[peer]} replay MB": ("replay_bytes", peer, _format_memory) for peer in ("td3x", "sb3", "sbx")},
    }
    lines = [["cell", *columns], ["---"] * (1 + len(columns))]
    for result in results:
        entries = [(result[kind].get(peer), form) for kind, peer, form in columns.values()]
        lines.append([result["cell"]["name"], *("-" if entry is None else form(entry) for entry, form in entries)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _format_speed(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _format_ratio(values: Mapping[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def _format_memory(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f}"


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


def describe_run(args: argparse.Namespace) -> dict[str, Any]:
    """Describe what the figures depend on besides the cells, and warn if the machine is not idle."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if load is not None and load > IDLE_LOAD:
        print(f"WARNING: The machine is not idle: load average {load:.2f}. These figures mean little.", file=sys.stderr)
    return {
        "device": args.device,
        "overlap_updates": args.overlap,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": args.threads,
        "precision": args.precision,
        "load_average": load,
        "machine": machine(PACKAGES),
    }


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS), help="measure these cells only")
    mode.add_argument("--quick", action="store_true", help=f"one cell of each kind, segments of {QUICK_SECONDS:g} s")
    parser.add_argument(
        "--peers", nargs="+", choices=list(PEER_NAMES), default=list(PEER_NAMES), help="measure these only"
    )
    parser.add_argument("--reps", type=at_least(1), default=5, help="segments of each peer (default %(default)s)")
    parser.add_argument("--steps", type=at_least(1), help="steps of a segment, instead of --seconds")
    parser.add_argument(
        "--seconds",
        type=at_least(1),
        help=f"seconds of the slowest peer's segments (default {SECONDS:g}, with --quick {QUICK_SECONDS:g})",
    )
    parser.add_argument("--threads", type=at_least(1), help="threads of each worker (default: all processors)")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="precision of TD3X")
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
    args.threads = pin(args.threads, args.device)
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    missing = {name: module for name, module in NEEDED_MODULES.items() if find_spec(module) is None}
    if missing:
        print(f"Left out without their modules: {missing}", file=sys.stderr)
    args.peers = [peer for peer in args.peers if peer not in missing]
    report: dict[str, Any] = {**describe_run(args), "cells": []}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"cells-{args.device}-{args.precision}.json"
    cells = QUICK_CELLS if args.quick else [CELLS[name] for name in args.cells]
    for cell in cells:
        if cell.env in missing or not {*args.peers} & {*cell.peers}:
            continue
        print(f"{cell.name} ...", file=sys.stderr, flush=True)
        report["cells"].append(measure_cell(cell, args))
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(format_table(report["cells"]))
    print(f"\nAll figures: {path}")


if __name__ == "__main__":
    main()
