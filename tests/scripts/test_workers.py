"""A tiny run of scripts/benchmark/workers.py with a real server."""

import json
import multiprocessing
import re
import sys
import threading
from pathlib import Path

import pytest
import workers
from postgresql import postgresql_server


@pytest.mark.slow
def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    with postgresql_server() as url:
        arguments = ["--storage", url, "--json", str(figures), "--workers", "3", "--finished", "2", "4"]
        times = ["--trial-seconds", "2", "--seconds", "4", "--evaluations", "2", "--repeats", "1"]
        assert workers.main([*arguments, *times, "--processes", "1"]) == 0
        # Without the end of a trial, which a worker does not reach so soon
        long = ["--trial-seconds", "1e6", "--seconds", "0.1", "--processes", "1"]
        assert workers.main(["--storage", url, "--workers", "1", "--finished", *long]) == 0
        with pytest.raises(SystemExit, match=r"1000 workers need max_connections=2010 .* the server has 100"):
            workers.main(["--storage", url, "--workers", "1000", "--finished"])
    result = json.loads(figures.read_text())
    assert [(row["finished"], row["running"]) for row in result["calls"]] == [(2, 0), (4, 0), (2, 3)]
    (simulation,) = result["simulations"]
    # Two trials of each worker end in the time, with two evaluations each; fewer where the machine cannot keep up
    assert 0 < simulation["milliseconds"]["end trial"]["calls"] <= 6
    assert simulation["milliseconds"]["connect"]["calls"] == 3
    assert simulation["rows_per_second"] > 0
    output = capsys.readouterr().out
    assert "should prune" in output
    assert re.search(r"^ +4 +0 ", output, re.M)
    assert re.search(r"^ +3 +connect +3 ", output, re.M)


def test_other_databases_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"^--storage=sqlite:///a.db is not allowed, expected the URL of a PostgreSQL"):
        workers.main(["--storage", "sqlite:///a.db"])


def test_nobody_waits_for_a_process_that_has_failed() -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    children = [context.Process(target=target, daemon=True) for target in (barrier.wait, lambda: sys.exit(1))]
    for child in children:
        child.start()
    threading.Thread(target=workers.abort_with, args=(children, barrier), daemon=True).start()
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(timeout=60)
