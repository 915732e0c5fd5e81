"""The figures of scripts/results.py, by hand, and its way from trainings to a table."""

import importlib.util
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import TD3

from sb3_td3x.studies.arms import entries_of, entry_of
from sb3_td3x.zoo.register import hyperparams_path

pytest.importorskip("rliable")

SCRIPT = Path(__file__).parents[2] / "scripts" / "results.py"


@pytest.fixture(scope="module")
def results() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("td3x_results", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.__dict__["N_BOOTSTRAP"] = 1000  # enough here, and fast
    yield module
    del sys.modules[spec.name]


def test_interquartile_mean(results: ModuleType) -> None:
    # Of eight sorted returns the middle four: (2 + 3 + 4 + 10) / 4
    assert results.interquartile_mean(np.array([[-100.0, 2, 4, 99], [1, 3, 10, 50]])) == 4.75


def test_interval_of_seeds(results: ModuleType) -> None:
    # Two seeds, all episodes alike: half of the resamples mix the seeds and give 5, a quarter each is 0 and 10 alone
    returns = np.array([[0.0] * 4, [10.0] * 4])
    assert results.iqm_interval(returns) == (0.0, 10.0)


def test_interval_of_episodes(results: ModuleType) -> None:
    # One seed, two kinds of episodes: with 100 episodes the share of each kind varies, but little
    low, high = results.iqm_interval(np.array([[0.0, 10.0] * 50]))
    assert 0 < low < 5 < high < 10


def test_interval_does_not_take_returns_of_one_agent_for_independent(results: ModuleType) -> None:
    # Ten agents, each with one return all over: a hundred episodes each say no more than one
    agents = np.arange(10.0)[:, None]
    assert results.iqm_interval(agents.repeat(100, axis=1)) == pytest.approx(results.iqm_interval(agents), abs=0.3)


def test_intervals_are_reproducible(results: ModuleType) -> None:
    returns = np.random.default_rng(0).normal(size=(5, 20))
    assert results.iqm_interval(returns) == results.iqm_interval(returns)


def test_difference_of_episodes_is_paired(results: ModuleType) -> None:
    # The peer is 1 behind from every start state: however the start states are drawn, the difference is 1
    returns = np.array([[0.0, 100.0, -50.0, 30.0]])
    low, high = results.iqm_difference_interval(returns, returns - 1)
    assert (low, high) == pytest.approx((1.0, 1.0))


def test_difference_of_seeds_is_not_paired(results: ModuleType) -> None:
    returns = np.array([[0.0] * 4, [10.0] * 4])
    assert results.iqm_difference_interval(returns, returns) == (-10.0, 10.0)


@pytest.mark.parametrize(("shift", "holds"), [(-4.0, True), (-6.0, False), (4.0, True)])
def test_not_behind_means_within_five_percent(results: ModuleType, shift: float, holds: bool) -> None:
    peer = np.full((3, 4), -100.0)
    comparison = results.compare(peer + shift, peer)
    assert comparison == {
        "difference": shift,
        "difference_95": (shift, shift),
        "limit": -5.0,
        "holds": holds,
    }


def test_table(results: ModuleType) -> None:
    study = results.Study("Pendulum-v1", ("td3x",), (1, 2), 20_000)
    summary = results.summarize({"td3x": np.array([[-100.0] * 4, [-200.0] * 4])})
    summary["td3x"]["train_minutes"] = 2.0
    assert results.format_table(study, summary).splitlines()[2] == (
        "| Pendulum-v1 | td3x | 20,000 | 2 | -150.0 [-200.0, -100.0] | -150.0 ± 50.0 | -150.0 "
        "| -200.0 to -100.0 | 2.0 min |"
    )


def test_studies_are_those_of_the_readme(results: ModuleType) -> None:
    runs = results.make_runs(results.STUDIES["pendulum"], Path("logs"))
    assert len({run.folder for run in runs}) == 20
    assert [(run.algo, run.seed, run.steps) for run in runs[3:6]] == [
        ("tqc", 1, 20_000),
        ("td3x", 2, 10_000),
        ("td3", 2, 20_000),
    ]
    assert runs[0].command[1:7] == ["-m", "rl_zoo3.train", "--algo", "td3x", "--env", "Pendulum-v1"]


def test_parity_is_with_the_hyperparameters_of_the_zoos_td3(results: ModuleType) -> None:
    own = entry_of(hyperparams_path(), "td3x", "Pendulum-v1")
    zoos = entry_of(entries_of("td3"), "td3", "Pendulum-v1")
    # The zoo takes this from an entry, and names no value where it is SB3's default
    params = dict(text.split(":", 1) for text in results.STUDIES["parity"].params)
    changed = {name: value if name == "policy_kwargs" else int(value) for name, value in params.items()}
    changed["n_timesteps"] = results.STUDIES["parity"].steps
    assert {**own, **changed} == {"batch_size": TD3("MlpPolicy", "Pendulum-v1").batch_size, **zoos}


def test_repeated_actions_count_as_env_steps(results: ModuleType) -> None:
    run = results.make_runs(results.STUDIES["lunarlander"], Path("logs"))[0]
    # Three env steps a decision
    assert (run.steps, run.zoo_timesteps) == (300_000, 100_000)
    assert run.command[run.command.index("-n") + 1] == "100000"


def test_a_training_has_at_least_one_decision(results: ModuleType) -> None:
    run = results.make_runs(replace(results.STUDIES["lunarlander"], steps=2), Path("logs"))[0]
    assert run.zoo_timesteps == 1


def test_what_is_named_twice_counts_once(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[str, int]] = []

    def train(runs: list[Any], jobs: int) -> None:
        trained.extend((run.algo, run.seed) for run in runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "train", train)
    with pytest.raises(KeyboardInterrupt):
        results.main(["pendulum", "--algos", "td3x", "td3", "td3x", "--seeds", "2", "1", "2", "-f", str(tmp_path)])
    assert trained == [("td3x", 2), ("td3", 2), ("td3x", 1), ("td3", 1)]


def test_a_finished_training_is_not_deleted(results: ModuleType, tmp_path: Path) -> None:
    run = results.Run("Pendulum-v1", "td3x", 1, 100, tmp_path / "run")
    run.folder.mkdir()
    other = {"hyperparams": {**run.entry, "gamma": 0.5}, "steps": 300}
    run.timing_path.write_text(json.dumps({**run.settings, **other, "train_seconds": 1.0}))
    (run.folder / "agent").touch()
    with pytest.raises(SystemExit, match=r"run holds a finished training of other steps and hyperparams: take another"):
        results.train([run], 1)
    assert (run.folder / "agent").exists()


def test_a_run_is_finished_when_all_its_steps_are_there(results: ModuleType, tmp_path: Path) -> None:
    run = results.Run("Pendulum-v1", "td3x", 1, 100, tmp_path)

    def save(steps: int) -> None:
        with zipfile.ZipFile(run.run_path / "Pendulum-v1.zip", "w") as archive:
            archive.writestr("data", json.dumps({"num_timesteps": steps}))

    assert not run.is_finished()
    run.run_path.mkdir(parents=True)
    save(100)
    assert not run.is_finished()  # nothing says how long it took
    timing = {**run.settings, "train_seconds": 1.0}
    run.timing_path.write_text(json.dumps({**timing, "hyperparams": {**run.entry, "gamma": 0.5}}))
    assert not run.is_finished()  # the zoo's file has changed since
    run.timing_path.write_text('{"steps": 100, "train_seconds": 1.0}')
    assert not run.is_finished()
    run.timing_path.write_text(json.dumps(timing))
    assert run.is_finished()
    save(99)  # what the zoo saves on Ctrl-C
    assert not run.is_finished()
    (run.run_path / "Pendulum-v1.zip").write_bytes(b"cut")
    assert not run.is_finished()


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
@pytest.mark.parametrize("option", ["--reuse", "--against"])
def test_what_is_no_report(results: ModuleType, tmp_path: Path, option: str, content: str | None) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=rf"^{option} .*report\.json is no report of this script: "):
        results.main(["pendulum", option, str(path), "-f", str(tmp_path / "logs")])
    assert not (tmp_path / "logs").exists()


def test_figures_of_an_earlier_report_are_of_the_same_training(results: ModuleType) -> None:
    (run,) = results.make_runs(results.Study("Pendulum-v1", ("td3",), (1,), 500, params=("gamma:0.9",)), Path("logs"))
    row = {"algo": "td3", "seed": 1, "steps": 500, "params": ["gamma:0.9"], "hyperparams": run.entry}
    assert results.reusable_rows({"runs": [row]}, [run]) == {run: row}
    others = ({"algo": "sac"}, {"seed": 2}, {"steps": 400}, {"params": []}, {"hyperparams": {**run.entry, "tau": 1.0}})
    for other in others:
        assert results.reusable_rows({"runs": [{**row, **other}]}, [run]) == {}


def test_shipped_reports_of_earlier_entries_are_not_taken(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NoTrainingError(Exception):
        pass

    def train(*args: object) -> None:
        raise NoTrainingError

    monkeypatch.setattr(results, "train", train)
    with pytest.raises(NoTrainingError):
        results.main(["hardcore", "--reuse", str(SCRIPT.parent.parent / "docs" / "results" / "hardcore.json")])
    assert "0 of 1 trainings are those of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--jobs", "0"], "argument --jobs: '0' is not allowed, expected a whole number of at least 1"),
        (["--jobs", "-1"], "argument --jobs: '-1' is not allowed"),
        (["--seeds", "1", "-2"], "argument --seeds: '-2' is not allowed"),
        (["--params", "env_wrapper:[]"], "argument --params: env_wrapper is not allowed"),
        (["--steps", "-5"], "argument --steps: '-5' is not allowed"),
        (["--algos", "td3", "td4"], "The algorithm 'td4' is unknown: did you mean 'td3"),
    ],
)
def test_bad_options(
    results: ModuleType, tmp_path: Path, options: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        results.main(["pendulum", *options, "-f", str(tmp_path / "logs")])
    assert error in f"{info.value}{capsys.readouterr().err}"
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
def test_from_trainings_to_the_report(results: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["pendulum", "-f", str(tmp_path), "--algos", "td3x", "--seeds", "1", "--steps", "200"]
    assert results.main(arguments) == 0
    report = json.loads((tmp_path / "pendulum.json").read_text())
    (run,) = report["runs"]
    assert len(run["final"]["returns"]) == len(run["best"]["returns"]) == 100
    assert len(set(run["final"]["returns"])) == 100  # a hundred start states
    assert report["machine"]["versions"]["sb3-td3x"]
    capsys.readouterr()

    # Again: nothing to train, and the same returns
    assert results.main(arguments) == 0
    assert "1 of 1 trainings are there, 0 to do" in capsys.readouterr().out
    assert json.loads((tmp_path / "pendulum.json").read_text())["runs"] == [run]

    # Beside an earlier report, here itself
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(report))
    reuse = ["-f", str(tmp_path / "elsewhere"), "--reuse", str(earlier)]
    assert results.main([*arguments, *reuse]) == 0
    assert f"1 of 1 trainings are those of {earlier}\n0 of 0 trainings are there" in capsys.readouterr().out
    assert json.loads((tmp_path / "elsewhere" / "pendulum.json").read_text())["runs"] == [run]
    assert results.main([*arguments, "--against", str(earlier)]) == 0
    (comparison,) = json.loads((tmp_path / "pendulum.json").read_text())["comparisons"].values()
    assert comparison["difference"] == 0
    with pytest.raises(SystemExit, match="is a report of the study pendulum, not of hardcore"):
        results.main(["hardcore", "--against", str(earlier)])
