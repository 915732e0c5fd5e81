"""Reading and writing the folder of a study."""

import re
from pathlib import Path

import pytest
from study_folders import make_record, run_of, write, write_study

from sb3_td3x.studies.reference import references
from sb3_td3x.studies.results import read_record, read_results

ENV = "Pendulum-v1"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    for record in (
        make_record("full", ENV, 1, [1.0, 2.0]),
        make_record("full", ENV, 2, [1.0], value_estimates=None, best_returns=None, training_seconds=None),
    ):
        write(tmp_path, record)
        run = run_of(tmp_path, record)
        assert read_record(run, run.folder) == record


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"format": 1', '"format": 2', "format 2, expected 1"),
        ('"seed"', '"sead"', "it has no 'seed'"),
        ('"value_estimates"', '"value_estimate"', "it has no 'value_estimates'"),
        ("{", "", "Extra data"),
        ('"final_returns": [\n  1.0,', '"final_returns": [\n  NaN,', "a return is nan"),
        ('"seed": 1', '"seed": 2', "is another one"),
    ],
)
def test_a_broken_record_names_its_folder(tmp_path: Path, old: str, new: str, reason: str) -> None:
    record = make_record("full", ENV, 1, [1.0, 2.0])
    write(tmp_path, record)
    run = run_of(tmp_path, record)
    path = run.folder / "run.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(reason)) as info:
        read_record(run, run.folder)
    assert str(run.folder) in str(info.value)


def test_returns_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a return is inf"):
        write(tmp_path, make_record("full", ENV, 1, [1.0], best_returns=[float("inf")]))


def test_missing_and_failed_runs(tmp_path: Path) -> None:
    scores = {ENV: {"full": {2: [1.0], 1: [1.0]}, "ddpg": {1: [2.0]}}}
    study = write_study(tmp_path / "study", scores, seeds=[1, 2, 3])
    failures = study / "failures"
    failures.mkdir()
    (failures / "ddpg-Pendulum-v1-2.log").write_text("a command\nTraceback\nValueError: NaN in the reward\n\n")
    # This one has finished since
    (failures / "full-Pendulum-v1-1.log").write_text("old")
    # A run in progress does not count
    write(study / "unfinished", make_record("ddpg", ENV, 2, [3.0]))
    results = read_results(study)
    assert results.base == "full"
    assert [(run.arm, run.seed) for run in results.records] == [("full", 1), ("full", 2), ("ddpg", 1)]
    assert [(run.arm, run.seed) for run in results.missing] == [("full", 3), ("ddpg", 2), ("ddpg", 3)]
    assert results.failures == {"failures/ddpg-Pendulum-v1-2.log": "ValueError: NaN in the reward"}


def test_tables(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study", {ENV: {"full": {1: [1.0, 3.0], 2: [5.0]}}}, seeds=[1, 2])
    results = read_results(study)
    assert results.runs["score"].tolist() == [2.0, 5.0]
    assert results.runs["best_agent_score"].tolist() == [3.0, 6.0]
    assert results.evaluations["return"].tolist() == [-8.0, 2.0, -5.0, 5.0]
    assert results.value_estimates["timesteps"].tolist() == [10_000, 20_000] * 2


def test_refused_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no study\.json"):
        read_results(tmp_path)
    study = write_study(tmp_path / "study", {ENV: {"full": {}}}, seeds=[1])
    with pytest.raises(ValueError, match="has no finished run yet"):
        read_results(study)
    (study / "failures").mkdir()
    (study / "failures" / "full-Pendulum-v1-1.log").write_text("broken")
    with pytest.raises(ValueError, match=r"1 failed: see .*failures"):
        read_results(study)
    (study / "study.json").write_text('{"format": 1, "arms": {"a": {}}, "envs": ["Pendulum-v1"]}')
    with pytest.raises(ValueError, match=r"study\.json is broken: it has no 'seeds'"):
        read_results(study)
    (study / "study.json").write_text('{"format": 1, "arms": {}, "envs": ["Pendulum-v1"], "seeds": [1]}')
    with pytest.raises(ValueError, match=r"study\.json is broken: arms is empty"):
        read_results(study)


def test_references() -> None:
    known = references()
    assert set(known) >= {"Pendulum-v1", "LunarLanderContinuous-v3", "BipedalWalker-v3", "BipedalWalkerHardcore-v3"}
    assert known["LunarLanderContinuous-v3"]["published_as"] == "LunarLanderContinuous-v2"
    for reference in known.values():
        assert reference["scores"]["random"] < reference["scores"]["zoo"]
        assert set(reference["curves"]) >= {"td3", "sac", "tqc"}
        for curve in reference["curves"].values():
            assert len(curve["timesteps"]) == len(curve["returns"])
            assert curve["timesteps"] == sorted(set(curve["timesteps"]))
