"""A tiny run of scripts/benchmark/workers.py with a real server."""

import json
import re
from pathlib import Path

import pytest
import workers
from postgresql import postgresql_server


@pytest.mark.slow
def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    with postgresql_server() as url:
        times = ["--trial-seconds", "2", "--seconds", "4", "--evaluations", "2", "--processes", "1"]
        assert workers.main(["--storage", url, "--json", str(figures), "--workers", "3", *times]) == 0
        # Without the end of a trial, which a worker does not reach so soon
        long = ["--trial-seconds", "1e6", "--seconds", "0.1", "--processes", "1"]
        assert workers.main(["--storage", url, "--workers", "1", *long]) == 0
        with pytest.raises(SystemExit, match=r"1000 workers need max_connections=2010 .* the server has 100"):
            workers.main(["--storage", url, "--workers", "1000"])
    (simulation,) = json.loads(figures.read_text())["simulations"]
    # Two trials of each worker end in the time, with two evaluations each; fewer where the machine cannot keep up
    assert 0 < simulation["milliseconds"]["end trial"]["calls"] <= 6
    assert simulation["calls_per_second"] > 0
    assert simulation["database_cores"] >= 0
    output = capsys.readouterr().out
    assert "should prune" in output
    assert re.search(r"^ +3 +end trial +\d ", output, re.M)


@pytest.mark.slow
def test_failed_process_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TIMEOUT_SECONDS", 10)
    monkeypatch.setattr(workers, "run_workers", _fail)
    with postgresql_server() as url, pytest.raises(SystemExit, match="A process of the 2 workers has failed"):
        workers.main(["--storage", url, "--workers", "2", "--processes", "1"])


def _fail(*args: object) -> None:
    raise ConnectionError


def test_other_databases_are_refused() -> None:
    with pytest.raises(SystemExit, match=r"^--storage=sqlite:///a.db is not allowed, expected the URL of a PostgreSQL"):
        workers.main(["--storage", "sqlite:///a.db"])
